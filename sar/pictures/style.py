"""The look of all pictures: two palettes, a figure as PNG or SVG, labels, ticks and numbers.

matplotlib is imported when something is drawn, never before.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sar.files import write_whole

SUFFIXES = (".png", ".svg")
_DPI = 144
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"  # the first is what widths are measured with
_LINE, _AROUND = 0.22, 0.6  # inches between two labels beside lines; of titles around the axes


@dataclass(frozen=True)
class Palette:
    """Colors by what they are for; no two are equal, so that a page can exchange them.

    Attributes:
        paper: behind everything. ink: words. quiet: ticks, notes. grid: lines behind the data.
        pale: what is there anyway.
        first, second, third, fourth: of the data. They differ in lightness and in blue, so they
            stay apart to a reader who sees no red or no green; each is also told by a label.
    """

    paper: str
    ink: str
    quiet: str
    grid: str
    pale: str
    first: str
    second: str
    third: str
    fourth: str

    @property
    def data(self) -> tuple[str, ...]:
        """Colors of the data, in their order."""
        return self.first, self.second, self.third, self.fourth


LIGHT = Palette(
    paper="#ffffff", ink="#1b1f24", quiet="#57606a", grid="#dfe3e8", pale="#b4bcc6",
    first="#0a5bcf", second="#b7550c", third="#17604f", fourth="#8a2f9e",
)  # fmt: skip
DARK = Palette(
    paper="#14181d", ink="#e8ecf1", quiet="#a3adb8", grid="#333b45", pale="#596470",
    first="#7ad5f8", second="#d98b2b", third="#4eb18c", fourth="#d94ff0",
)  # fmt: skip

Draw = Callable[[Any, Palette], None]


def save(path: Path, draw: Draw, size: tuple[float, float], dark: bool = False) -> None:
    """Write what ``draw(figure, colors)`` draws, as PNG or SVG by ``path``'s suffix.

    Args:
        size: width and height in inches.

    The same picture has the same bytes. Raises ``OSError`` that names ``path``.
    """
    form, colors = path.suffix.lower().removeprefix("."), DARK if dark else LIGHT
    content = render(draw, size, form, colors, name=path.stem)
    write_whole(path, lambda file: file.write(content))


def render(
    draw: Draw, size: tuple[float, float], form: str, colors: Palette = LIGHT, name: str = "sar"
) -> bytes:
    """What ``draw(figure, colors)`` draws, as bytes; ``form`` is ``png`` or ``svg``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_settings(colors, name)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, colors)
        file = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(file, format=form, dpi=_DPI, metadata=metadata)
    content = file.getvalue()
    return _tidy(content.decode()).encode() if form == "svg" else content


def _tidy(text: str) -> str:
    """An SVG of half the size: no metadata, indents, needless decimals, or font for each word."""
    text = re.sub(r"\s*(<!DOCTYPE.*?>|<metadata>.*?</metadata>)", "", text, flags=re.S)
    text = re.sub(r"<[^>]+>", lambda tag: _tidy_tag(tag[0]), re.sub(r">\n\s+", ">\n", text))
    return text.replace("butt}", f"butt}} text{{font-family: {_FONTS}}}", 1)


def _tidy_tag(tag: str) -> str:
    tag = re.sub(r" font-family: [^;]*;| transform=\"rotate\(-0 [^\"]*\"", "", tag)
    return re.sub(r"(?<=\d\.\d{2})\d+", "", tag).replace(" \n", "\n")


def _settings(colors: Palette, name: str) -> Any:
    quiet = dict.fromkeys(("xtick.color", "ytick.color"), colors.quiet)
    paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), colors.paper)
    ink = dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor"), colors.ink
    )
    return {
        **quiet, **paper, **ink,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10.5,
        "axes.titlesize": 11.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.labelsize": 10.5, "xtick.labelsize": 10, "ytick.labelsize": 10,
        "axes.edgecolor": colors.quiet, "axes.linewidth": 0.8,
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
        "grid.color": colors.grid, "grid.linewidth": 0.8,
        "lines.linewidth": 1.8, "lines.markersize": 4.5,
        "figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12,
        "legend.frameon": False, "legend.fontsize": 10,
        "svg.fonttype": "none", "svg.hashsalt": name,
        "savefig.bbox": "standard",
        "axes.formatter.useoffset": False, "text.parse_math": False,
    }  # fmt: skip


def title(axes: Any, text: str, note: str = "") -> None:
    """Write the title of a panel, above the line for a note or :func:`key_above`."""
    from matplotlib import rcParams

    axes.set_title(text, pad=26)
    axes.annotate(
        note, (0, 1), xycoords="axes fraction", xytext=(0, 8), textcoords="offset points",
        color=rcParams["xtick.color"], fontsize=10, annotation_clip=False,
    )  # fmt: skip


def key_above(axes: Any) -> None:
    """Name the colors between title and data, where no data can lie."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, borderaxespad=0.2, borderpad=0.2,
        handlelength=0.9, handleheight=0.9, handletextpad=0.5, columnspacing=1.4,
    )  # fmt: skip


def label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write (height, text, color) of each line to the right of the axes, none over another. Call it
    when the limits of the axes stand."""
    ordered = sorted((_share(axes, y), text, color) for y, text, color in ends)
    height = axes.get_position().height * axes.figure.get_figheight() - _AROUND
    places = _apart([share for share, _, _ in ordered], _LINE / height)
    for place, (_, text, color) in zip(places, ordered):
        axes.annotate(
            text, (1.0, place), xycoords="axes fraction", xytext=(6, 0),
            textcoords="offset points", va="center", color=color, annotation_clip=False,
        )  # fmt: skip


def _apart(shares: Sequence[float], gap: float) -> list[float]:
    """Rising heights moved until they are ``gap`` apart: crowds spread around their middle."""
    crowds: list[tuple[float, int]] = []  # middle, number
    for share in shares:
        middle, number = share, 1
        while crowds and middle - crowds[-1][0] < gap * (number + crowds[-1][1]) / 2:
            other, more = crowds.pop()
            middle = (middle * number + other * more) / (number + more)
            number += more
        crowds.append((middle, number))
    return [m + gap * (i - (n - 1) / 2) for m, n in crowds for i in range(n)]


def _share(axes: Any, y: float) -> float:
    """Where on the axis ``y`` lies: 0 below, 1 above."""
    low, high = axes.transScale.transform([(1, limit) for limit in axes.get_ylim()])[:, 1]
    return float((axes.transScale.transform((1, y))[1] - low) / (high - low))


def themed(svg: str, name: str) -> str:
    """An SVG of :data:`LIGHT` for a page: its colors are CSS variables, its ids start with
    ``name``. The page defines ``--paper``, ``--ink`` and the others, for light and for dark."""
    svg = svg[svg.index("<svg") :]
    for role, color in asdict(LIGHT).items():
        svg = svg.replace(color, f"var(--{role})")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(r' ((width|height)="[^"]*pt"|xmlns(:xlink)?="[^"]*")', "", svg, count=4)


# Numbers as people read them. MiB is 2**20 bytes and MB is a million: neither is called the other.
# Memory is counted in the first, what travels in the second, as machines and networks are sold.
MEMORY = ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB"))
TRAFFIC = ((1.0, "B"), (1e3, "kB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB"))
SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_RATES = ((1.0, "bit/s"), (1e3, "kbit/s"), (1e6, "Mbit/s"), (1e9, "Gbit/s"), (1e12, "Tbit/s"))
_COUNTS = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))

Units = Sequence[tuple[float, str]]


def unit_of(values: Iterable[float], units: Units) -> tuple[float, str]:
    """The largest (size, name) that the largest value has at least one of."""
    top = max(values, default=0.0)
    return next((unit for unit in reversed(units) if top >= unit[0]), units[0])


def short(value: float, units: Units) -> str:
    """`1.5 GiB`: three digits and the unit that fits."""
    size, name = unit_of([value], units)
    return f"{_digits(value / size)} {name}".strip()


def rate(bits: float) -> str:
    """`100 Mbit/s`, `1 Gbit/s` of bits a second."""
    return short(bits, _RATES)


def count(value: float) -> str:
    """`1.23M` of 1,234,567; numbers below ten thousand as they are."""
    if value < 1e4:
        return f"{value:,.0f}"
    return short(value, _COUNTS).replace(" ", "")


def _digits(value: float) -> str:
    """Three digits, but never fewer than stand before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def whole_numbers(axis: Any) -> None:
    """Set the ticks of an axis that counts: parts, ranks, epochs."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def powers(axis: Any, low: float, high: float) -> None:
    """Set ticks 1, 2, 5 of each power of ten on a logarithmic axis, written out; low < high."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if high < 5 * low:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], min_n_ticks=2))
    else:
        axis.set_major_locator(LogLocator(10, subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def these(axis: Any, values: Sequence[float], texts: Sequence[str]) -> None:
    """Set ticks at ``values`` alone, with their texts."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(list(values), list(texts))
    axis.set_minor_locator(NullLocator())
