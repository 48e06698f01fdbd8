"""A picture of predictions: memory of a rank and time of an epoch against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sar.pictures.style import (
    MEMORY,
    SECONDS,
    Palette,
    label_ends,
    powers,
    short,
    these,
    title,
    unit_of,
)

SIZE = (13.0, 5.4)  # inches
_LINES = ("-", "--", "-.", ":")

Points = Mapping[str, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Plan:
    """Predictions to draw.

    Attributes:
        name: of graph and model. note: what the dotted line is.
        memory: by setting, (ranks, bytes of the largest rank). seconds: the same of an epoch.
        asked: the number of ranks that is planned. limit: bytes that a rank has, or ``None``.
    """

    name: str
    note: str
    memory: Points
    seconds: Points
    asked: int
    limit: float | None = None


def draw_plan(plan: Plan, figure: Any, colors: Palette) -> None:
    """Draw two panels, memory and time, with a line for each setting."""
    left, right = figure.subplots(1, 2)
    title(left, "Memory of the largest rank", plan.note)
    left.set_ylabel(lines(left, plan.memory, MEMORY, colors, plan.limit))
    title(right, "Time of an epoch", plan.note)
    right.set_ylabel(lines(right, plan.seconds, SECONDS, colors))
    for axes in (left, right):
        axes.axvline(plan.asked, color=colors.quiet, linestyle=":", linewidth=1.4, zorder=0)
    figure.suptitle(plan.name, x=0.01, ha="left", fontsize=14, fontweight="bold")


def lines(
    axes: Any, points: Points, units: Any, colors: Palette, limit: float | None = None
) -> str:
    """Lines against ranks, both scales logarithmic, each named at its end; returns the unit."""
    values = [value for line in points.values() for _, value in line]
    values += [] if limit is None else [limit]
    size, unit = unit_of(values, units)
    ends = []
    for place, (name, line) in enumerate(points.items()):
        color, style = colors.data[place % 4], _LINES[place % 4]
        heights = [value / size for _, value in line]
        axes.plot([number for number, _ in line], heights, "o", linestyle=style, color=color)
        ends.append((heights[-1], name, color))
    if limit is not None:
        axes.axhline(limit / size, color=colors.ink, linewidth=1.2)
        ends.append((limit / size, f"a rank has {short(limit, units)}", colors.ink))
    ranks = sorted({number for line in points.values() for number, _ in line})
    log_log(axes, ranks, min(values) / size, max(values) / size)
    label_ends(axes, ends)
    return unit


def log_log(axes: Any, ranks: Sequence[int], low: float, high: float) -> None:
    """Both scales logarithmic, with a tick for each number of ranks."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(low / 1.25, high * 1.25)
    axes.set_xlim(ranks[0] / 1.15, ranks[-1] * 1.15)
    powers(axes.yaxis, low, high)
    these(axes.xaxis, ranks, [str(number) for number in ranks])
    axes.set_xlabel("ranks")
