"""A training run as one HTML page: pictures and styles are in it, and it asks nobody for more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
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
# How the page looks, in the colors of either palette, which are variables of these names.
_STYLES = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink)}
body{font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
header,main{max-width:1180px;margin:0 auto;padding:0 24px}
header{padding-top:32px}
h1{font-size:28px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:20px;margin:40px 0 12px}
p{color:var(--quiet);margin:0 0 8px}
main{padding-bottom:64px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:12px;margin:0}
.tiles div{border:1px solid var(--grid);border-radius:8px;padding:12px 16px}
.tiles div{display:flex;flex-direction:column-reverse;justify-content:flex-end}
.tiles dt{color:var(--quiet);font-size:14px}
.tiles dd{margin:0;font-size:22px;font-weight:600;font-variant-numeric:tabular-nums}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,360px),1fr));gap:16px}
.pictures.wide{grid-template-columns:1fr;overflow-x:auto}
.wide svg{min-width:800px}
figure{margin:0}
svg{display:block;width:100%;height:auto}
.table{overflow-x:auto;margin-top:16px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 24px 6px 0;border-bottom:1px solid var(--grid)}
th,td{vertical-align:top;overflow-wrap:anywhere}
th{color:var(--quiet);font-weight:600;font-size:14px;white-space:nowrap}
.bar{display:flex;width:200px;height:12px;margin-top:6px}
.bar i{height:100%}
.key i{display:inline-block;width:12px;height:12px;margin-left:12px}
.compute{background:var(--first)}
.wait{background:var(--second)}
@media print{section{break-inside:avoid}}
"""
_GRAPH = ("input", "num_nodes", "num_edges", "in_feats", "num_classes", "num_ranks")


def write_report(run: Run, path: Path, found: Mapping[str, Any] | None = None) -> None:
    """Write the page.

    Args:
        found: what :func:`sar.partition.summary.summarize` gave of the cut, to be drawn, too.

    Raises ``OSError`` that names ``path``.
    """
    text = page(run, found)
    write_whole(path, lambda file: file.write(text.encode()))


def page(run: Run, found: Mapping[str, Any] | None = None) -> str:
    """The HTML. All texts of the run are escaped; it has no script and no link."""
    name = f"{run.config.get('model', 'model')} on {Path(str(run.config.get('input'))).stem}"
    sections = [
        _section("Summary", _tiles(run)),
        _section("Curves", _pictures(run, CURVE, _CURVES)),
        _section("Memory and traffic", _pictures(run, BARS, _OF_RANKS), _ranks(run)),
        _section("Layers", _layers(run)),
        _section("Graph and cut", *_graph(run, found)),
        _section("Settings", _settings(run)),
        _section("Versions", _table(["package", "version"], run.versions.items())),
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_css()}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = f"<header><h1>{escape(name)}</h1></header><main>{''.join(sections)}</main>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{view}{head}</head><body>{body}</body></html>\n'


def _css() -> str:
    """Both palettes as variables, then the styles."""
    light, dark = (
        "".join(f"--{role}:{color};" for role, color in vars(colors).items())
        for colors in (LIGHT, DARK)
    )
    themes = f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return themes + _STYLES


def _section(heading: str, *parts: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{''.join(parts)}</section>"


def _tiles(run: Run) -> str:
    """The numbers that people look for first."""
    last, number = run.epochs[-1], len(run.epochs)
    tiles = [("epochs", _words(number)), ("last loss", f"{last['loss']:.4g}")]
    if run.best is not None:
        tiles.append(("best epoch", _words(run.epochs[run.best]["epoch"])))
        for split, column in run.scores.items():
            score = column[run.best]
            if score is not None:
                tiles.append((f"{split} {run.metric} there", f"{score:.4f}"))
    peak = max(rank["peak_rss_mb"] for rank in run.ranks) * 2**20
    sent = sum(rank["sent_bytes"] for rank in run.ranks) / number
    tiles += [
        ("an epoch, median", short(run.seconds, SECONDS)),
        ("largest rank", short(peak, MEMORY)),
        ("sent by all ranks in an epoch", short(sent, TRAFFIC)),
    ]
    cells = (f"<div><dt>{escape(word)}</dt><dd>{escape(value)}</dd></div>" for word, value in tiles)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def _pictures(run: Run, size: tuple[float, float], panels: Mapping[str, Panel]) -> str:
    drawn = [_picture(name, partial(_alone, draw, run), size) for name, draw in panels.items()]
    return f'<div class="pictures">{"".join(drawn)}</div>'


def _alone(draw: Panel, run: Run, figure: Any, colors: Palette) -> None:
    draw(figure.add_subplot(), run, colors)


def _picture(name: str, draw: Draw, size: tuple[float, float]) -> str:
    svg = themed(render(draw, size, "svg", name=name).decode(), name)
    named = svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)
    return f"<figure>{named}</figure>"


def _ranks(run: Run) -> str:
    """The numbers behind the pictures."""
    number = len(run.epochs)
    device = any("peak_device_mb" in rank for rank in run.ranks)
    head = ["rank", "peak memory", "above start", "sent", "received", "not sent again"]
    rows = []
    for rank in run.ranks:
        memory = [rank["peak_rss_mb"], rank["peak_rss_mb"] - rank["baseline_rss_mb"]]
        words = [short(max(0.0, mib) * 2**20, MEMORY) for mib in memory]
        moved = ("sent_bytes", "received_bytes", "avoided_bytes")
        words += [short(rank[name] / number, TRAFFIC) for name in moved]
        if device:
            words.append(short(rank.get("peak_device_mb", 0.0) * 2**20, MEMORY))
        rows.append([rank["rank"], *words])
    return "<p>Bytes of an epoch, the mean.</p>" + _table(head + ["device's peak"] * device, rows)


def _layers(run: Run) -> str:
    """Seconds and bytes an epoch of each layer and pass, with a bar of the seconds."""
    number, ranks = len(run.epochs), len(run.ranks)
    most = max((row["compute"] + row["wait"] for row in run.layers), default=0.0) or 1.0
    rows = []
    for row in run.layers:
        bar = "".join(
            f'<i class="{word}" style="width:{100 * row[word] / most:.1f}%"></i>'
            for word in ("compute", "wait")
        )
        seconds = ("compute", "longest_compute", "wait", "longest_wait")
        words = [short(row[word] / number, SECONDS) for word in seconds]
        words += [short(row["sent"] / number / ranks, TRAFFIC)]
        rows.append([row["layer"] or "(other)", row["pass"], *words])
        rows[-1].append(_Markup(f'<span class="bar">{bar}</span>'))
    head = ["layer", "pass", "compute", "slowest", "wait", "longest", "sent"]
    key = '<i class="compute"></i> compute <i class="wait"></i> wait'
    note = f'<p class="key">An epoch of a rank, the mean: {key}</p>'
    return note + _table([*head, ""], rows)


def _graph(run: Run, found: Mapping[str, Any] | None) -> list[str]:
    known = [(name, run.config[name]) for name in _GRAPH if name in run.config]
    parts = [_table(["graph", ""], [(name, _words(value)) for name, value in known])]
    if found is not None:
        picture = _picture("cut", partial(cut.draw_cut, found), cut.SIZE)
        parts.append(f'<div class="pictures wide">{picture}</div>')
    return parts


def _settings(run: Run) -> str:
    rows = [(name, _words(value)) for name, value in run.config.items() if name not in _GRAPH]
    return _table(["option", "value"], rows)


def _words(value: Any) -> str:
    """A value of a setting: whole numbers grouped, dictionaries in a line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


class _Markup(str):
    """A cell that is HTML already."""


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """Numbers to the right; every cell that is no markup is escaped."""
    titles = "".join(f'<th scope="col">{escape(word)}</th>' for word in head)
    lines = ("".join(_cell(value) for value in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table">{table}</div>'


def _cell(value: Any) -> str:
    text = value if isinstance(value, _Markup) else escape(str(value))
    return f"<td>{text}</td>"
