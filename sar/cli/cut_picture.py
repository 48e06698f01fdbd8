"""A picture of a cut: sizes of the parts beside their mean, and rows between pairs of parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sar.cli.outputs import check_file
from sar.errors import MissingDependencyError
from sar.files import write_whole

SUFFIXES = (".png", ".svg")
_SIZES = {
    "num_nodes": "nodes",
    "num_edges": "edges",
    "halo_nodes": "halo nodes",
    "boundary_nodes": "boundary nodes",
    "train_nodes": "training nodes",
}
_WRITTEN_OUT = 10  # parts up to which the heat map has numbers


def check_picture(path: Path, option: str) -> None:
    """Raise before the work what would stop :func:`draw` after it.

    Raises ``ValueError`` naming ``option`` for a name or folder that cannot be written,
    ``MissingDependencyError`` without matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"{option}: got {str(path)!r}, expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    check_file(path, option)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{option} draws with matplotlib: pip install matplotlib"
        ) from error


def draw(found: dict, path: Path) -> None:
    """Bars of each size and a map of rows, as PNG or SVG by ``path``'s suffix.

    Args:
        found: what :func:`sar.partition.summary.summarize` or ``CutQuality.to_dict`` gave.

    Raises ``OSError`` that names ``path``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    sizes = {key: title for key, title in _SIZES.items() if found[key] is not None}
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    cells = figure.add_gridspec(len(sizes), 2, width_ratios=(1, 1))
    for row, (key, title) in enumerate(sizes.items()):
        last = row == len(sizes) - 1
        axes = figure.add_subplot(cells[row, 0])
        _draw_bars(axes, title, [part[key] for part in found["parts"]], last)
    _draw_map(figure, figure.add_subplot(cells[:, 1]), np.array(found["rows"]["halo"]))
    share = 100 * found["cut_edges"] / max(1, found["num_edges"])
    figure.suptitle(
        f"{found['graph_name']}, {found['num_parts']} parts, {share:.1f} % of edges cut"
    )
    form = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if form == "svg" else None  # the same picture in the same bytes
    with matplotlib.rc_context({"svg.hashsalt": "sar"}):
        write_whole(
            path, lambda file: figure.savefig(file, format=form, dpi=120, metadata=metadata)
        )


def _draw_bars(axes: Any, title: str, counts: list[int], last: bool) -> None:
    """One bar a part, as multiples of the mean."""
    mean = sum(counts) / len(counts)
    heights = [count / mean if mean else 0.0 for count in counts]
    axes.bar(range(len(counts)), heights, width=0.8, color="tab:blue")
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.set_ylim(0, 1.1 * max(1.2, *heights))
    axes.set_xlim(-0.6, len(counts) - 0.4)
    axes.set_title(
        f"{title}: mean {mean:,.0f}, largest / mean {max(heights):.3f}", loc="left", fontsize=9
    )
    axes.locator_params(axis="y", nbins=4)
    _whole_numbers(axes.xaxis)
    axes.tick_params(labelbottom=last)
    if last:
        axes.set_xlabel("part (dashed: the mean)")


def _draw_map(figure: Any, axes: Any, rows: np.ndarray) -> None:
    """Rows [P, P] from the part below to the part at the side."""
    shown = np.ma.masked_array(rows, mask=np.eye(len(rows), dtype=bool))
    top = max(1, int(rows.max()))
    image = axes.imshow(shown, cmap="viridis", vmin=0, vmax=top)
    axes.set_title("halo rows between parts", loc="left", fontsize=9)
    axes.set(xlabel="from part", ylabel="to part")
    _whole_numbers(axes.xaxis)
    _whole_numbers(axes.yaxis)
    figure.colorbar(image, ax=axes, shrink=0.8, format=lambda value, _: _short(value))
    if len(rows) <= _WRITTEN_OUT:
        for (to, source), count in np.ndenumerate(rows):
            if to != source:
                color = "black" if count > 0.6 * top else "white"
                text = _short(count)
                axes.text(source, to, text, ha="center", va="center", color=color, fontsize=9)


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _short(count: float) -> str:
    """`1.23M` of 1,234,567; numbers below ten thousand as they are."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= max(unit, 1e4):
            return f"{count / unit:.3g}{name}"
    return f"{count:,.0f}"
