"""What `sar bench` writes: one JSON, one page of Markdown tables, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tables.measured import Row

TITLES = {
    "memory": "Activation memory of the largest rank",
    "speed": "One epoch",
    "bandwidth": "One epoch over links of a limited rate",
    "traffic": "Bytes sent in an epoch",
}


def write(folder: Path, machine: dict[str, Any], about: dict[str, Any], tables: dict) -> None:
    """``bench.json``, ``bench.md`` and a plot of each table that has rows."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "request": about, **tables}
    (folder / "bench.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# Bench", "", f"{machine['cores']} cores, {machine['memory_gib']} GiB, "]
    lines[-1] += ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines += ["", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    for name, title in TITLES.items():
        lines += [f"## {title}", ""]
        lines += (
            markdown(tables[name]) if tables[name] else [tables.get("skipped", {}).get(name, "")]
        )
        lines += [""]
        if tables[name]:
            lines += [f"![{title}]({name}.png)", ""]
            plot(name, tables[name], folder / f"{name}.png")
    (folder / "bench.md").write_text("\n".join(lines))


def markdown(rows: list[Row]) -> list[str]:
    """A table with the rows' keys as its head."""
    columns = list(rows[0])
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(name: str, rows: list[Row], path: Path) -> None:
    """One figure as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    _DRAW[name](axes, rows)
    axes.set_title(TITLES[name])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_memory(axes: Any, rows: list[Row]) -> None:
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        axes.plot([r["ranks"] for r in mine], [r["mb"] for r in mine], "o-", label=name)
    ranks = sorted({row["ranks"] for row in rows})
    axes.plot(ranks, [rows[0]["mb"] / size for size in ranks], "k--", label="DGL / P")
    _label(axes, "ranks", "MB", log=True)


def _draw_speed(axes: Any, rows: list[Row]) -> None:
    names = [f"{row['contender']}, {row['ranks']}" for row in rows]
    places = range(len(rows))
    axes.barh(places, [row["cpu"] for row in rows], 0.8, label="processor, all ranks")
    axes.barh(places, [row["wall_s"] for row in rows], 0.4, label="wall")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    _label(axes, "seconds", "")


def _draw_bandwidth(axes: Any, rows: list[Row]) -> None:
    rates = [row["bits"] / 1e6 for row in rows]
    axes.plot(rates, [row["wall_s"] for row in rows], "o-", label="epoch")
    bound = [max(row["compute_s"], row["wire_s"]) for row in rows]
    axes.plot(rates, bound, "k--", label="max(compute, wire)")
    _label(axes, "Mbit/s of each host", "seconds", log=True)


def _draw_traffic(axes: Any, rows: list[Row]) -> None:
    names = [f"{row['layer']} {row['pass']}" for row in rows]
    axes.barh(range(len(rows)), [row["sent_mb"] for row in rows])
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("MB, all ranks")


def _label(axes: Any, x: str, y: str, log: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.legend()


_DRAW: dict[str, Callable[[Any, list[Row]], None]] = {
    "memory": _draw_memory,
    "speed": _draw_speed,
    "bandwidth": _draw_bandwidth,
    "traffic": _draw_traffic,
}
