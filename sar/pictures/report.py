"""A training run as one HTML page that holds its pictures and styles, and loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sar.files import write_whole
from sar.pictures import cut
from sar.pictures.run import (
    BARS,
    CURVE,
    Run,
    draw_loss,
    draw_memory,
    draw_scores,
    draw_seconds,
    draw_traffic,
)
from sar.pictures.style import (
    DARK,
    LIGHT,
    MEMORY,
    SECONDS,
    TRAFFIC,
    Draw,
    Palette,
    render,
    short,
    themed,
)

Panel = Callable[[Any, Run, Palette], None]
_CURVES: dict[str, Panel] = {"loss": draw_loss, "scores": draw_scores, "seconds": draw_seconds}
_OF_RANKS: dict[str, Panel] = {"memory": draw_memory, "traffic": draw_traffic}
_GRAPH = ("input", "num_nodes", "num_edges", "in_feats", "num_classes", "num_ranks")


def write_report(run: Run, path: Path, found: Mapping[str, Any] | None = None) -> None:
    """Write the page of a run.

    Args:
        found: what :func:`sar.partition.summary.summarize` gave of the cut, to be drawn, too.

    Raises ``OSError`` that names ``path``.
    """
    text = page(run, found)
    write_whole(path, lambda file: file.write(text.encode()))


def page(run: Run, found: Mapping[str, Any] | None = None) -> str:
    """The HTML. All texts of the run are escaped; it has no script and no link."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    made.filters |= {
        "words": _words,
        "seconds": partial(short, units=SECONDS),
        "traffic": partial(short, units=TRAFFIC),
        "memory": lambda mib: short(max(0.0, mib) * 2**20, MEMORY),
    }
    rows = [(name, _words(value)) for name, value in run.config.items()]
    return made.get_template("page.html").render(
        title=f"{run.config.get('model', 'model')} on {Path(str(run.config.get('input'))).stem}",
        run=run,
        light=vars(LIGHT),
        dark=vars(DARK),
        curves=Markup(_pictures(run, CURVE, _CURVES)),
        bars=Markup(_pictures(run, BARS, _OF_RANKS)),
        cut=found and Markup(_picture("cut", partial(cut.draw_cut, found), cut.SIZE)),
        graph=[row for row in rows if row[0] in _GRAPH],
        settings=[row for row in rows if row[0] not in _GRAPH],
        longest=max((row["compute"] + row["wait"] for row in run.layers), default=0.0) or 1.0,
    )


def _pictures(run: Run, size: tuple[float, float], panels: Mapping[str, Panel]) -> str:
    def alone(draw: Panel, figure: Any, colors: Palette) -> None:
        draw(figure.add_subplot(), run, colors)

    return "".join(_picture(name, partial(alone, draw), size) for name, draw in panels.items())


def _picture(name: str, draw: Draw, size: tuple[float, float]) -> str:
    svg = themed(render(draw, size, "svg", name=name).decode(), name)
    named = svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    return f"<figure>{named}</figure>"


def _words(value: Any) -> str:
    """A setting's value in words: whole numbers grouped, dictionaries in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
