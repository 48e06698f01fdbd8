"""What `sar bench` writes: one JSON, one page of Markdown tables, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.race import MB
from benchmarks.tables.measured import Row
from sar.pictures import Palette, save
from sar.pictures.plan import lines, log_log
from sar.pictures.style import TRAFFIC, key_above, label_ends, rate, these, title

TITLES = {
    "memory": "Activation memory of the largest rank",
    "speed": "One epoch",
    "bandwidth": "One epoch over links of a limited rate",
    "traffic": "Bytes sent in an epoch",
}


def write(
    folder: Path, machine: dict[str, Any], about: dict[str, Any], tables: dict, dark: bool = False
) -> None:
    """``bench.json``, ``bench.md`` and a plot of each table that has rows."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "request": about, **tables}
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    text = ["# Bench", "", f"{machine['cores']} cores, {machine['memory_gib']} GiB, "]
    text[-1] += ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text += ["", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for name, heading in TITLES.items():
        text += [f"## {heading}", ""]
        text += (
            markdown(tables[name]) if tables[name] else [tables.get("skipped", {}).get(name, "")]
        )
        text += [""]
        if tables[name]:
            text += [f"![{heading}]({name}.png)", ""]
            plot(name, tables[name], folder / f"{name}.png", dark)
    (folder / "bench.md").write_text("\n".join(text))


def markdown(rows: list[Row]) -> list[str]:
    """A table with the rows' keys as its head."""
    columns = list(rows[0])
    text = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        text.append("| " + " | ".join(cells) + " |")
    return text


def plot(name: str, rows: list[Row], path: Path, dark: bool = False) -> None:
    """One figure, PNG or SVG by ``path``'s suffix."""
    bars = len(rows) if name in ("speed", "traffic") else 0
    save(path, partial(_draw, name, rows), (8.0, max(4.5, 1.6 + 0.4 * bars)), dark)


def _draw(name: str, rows: list[Row], figure: Any, colors: Palette) -> None:
    _DRAW[name](figure.add_subplot(), rows, colors)


def _draw_memory(axes: Any, rows: list[Row], colors: Palette) -> None:
    alone, *others = rows
    points: dict[str, list[tuple[int, float]]] = {}
    for row in others:
        points.setdefault(row["contender"], []).append((row["ranks"], MB * row["mb"]))
    ranks = sorted({row["ranks"] for row in rows})
    points["DGL / ranks"] = [(size, MB * alone["mb"] / size) for size in ranks]
    title(axes, TITLES["memory"], "DGL / ranks: an even share of what DGL takes in one process")
    axes.set_ylabel(lines(axes, points, TRAFFIC, colors))


def _draw_speed(axes: Any, rows: list[Row], colors: Palette) -> None:
    names = [f"{row['contender']}, {_ranks(row['ranks'])}" for row in rows]
    for key, word, place, color in (
        ("cpu", "processor, all ranks", -0.2, colors.first),
        ("wall_s", "wall clock", 0.2, colors.second),
    ):
        where = [at + place for at in range(len(rows))]
        bars = axes.barh(where, [row[key] for row in rows], 0.38, label=word, color=color)
        axes.bar_label(bars, [f"{row[key]:.3g}" for row in rows], padding=3)
    title(axes, TITLES["speed"])
    _finish_bars(axes, names, "seconds")
    key_above(axes)


def _draw_bandwidth(axes: Any, rows: list[Row], colors: Palette) -> None:
    rows = sorted(rows, key=lambda row: row["bits"])
    rates = [row["bits"] for row in rows]
    seconds = [row["wall_s"] for row in rows]
    bound = [max(row["compute_s"], row["wire_s"]) for row in rows]
    axes.plot(rates, seconds, "o-", color=colors.first)
    axes.plot(rates, bound, "s--", color=colors.second)
    title(axes, TITLES["bandwidth"], "bound: the longer of compute and wire")
    log_log(axes, rates, min(bound + seconds), max(bound + seconds))
    these(axes.xaxis, rates, [rate(bits) for bits in rates])
    axes.set(xlabel="link of each host", ylabel="seconds")
    ends = [(seconds[-1], "epoch", colors.first), (bound[-1], "bound", colors.second)]
    label_ends(axes, ends)


def _draw_traffic(axes: Any, rows: list[Row], colors: Palette) -> None:
    names = [f"{row['layer']} {row['pass']}".strip() for row in rows]
    bars = axes.barh(range(len(rows)), [row["sent_mb"] for row in rows], 0.7, color=colors.first)
    axes.bar_label(bars, [f"{row['sent_mb']:.3g}" for row in rows], padding=3)
    title(axes, TITLES["traffic"], "by layer and pass, all ranks together")
    _finish_bars(axes, names, "MB")


def _finish_bars(axes: Any, names: list[str], unit: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.grid(True, axis="x")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.1)
    axes.set_xlabel(unit)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


_DRAW: dict[str, Callable[[Any, list[Row], Palette], None]] = {
    "memory": _draw_memory,
    "speed": _draw_speed,
    "bandwidth": _draw_bandwidth,
    "traffic": _draw_traffic,
}
