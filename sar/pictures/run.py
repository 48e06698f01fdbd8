"""A training run: the JSON of `sar train`, checked and named, and pictures of it."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sar.pictures.style import (
    MEMORY,
    SECONDS,
    TRAFFIC,
    Palette,
    key_above,
    label_ends,
    short,
    title,
    unit_of,
    whole_numbers,
)
from sar.words import SPLITS

SIZE = (13.0, 8.0)  # inches
CURVE, BARS = (4.6, 3.2), (6.4, 3.5)  # of one panel alone
_DOTS = 20  # epochs up to which each is a dot
_SLOW = 3.0  # times the median: epochs above are told in words
_NEEDED = ("epochs", "ranks", "layers", "config")
_NUMBERS = {  # that each row has
    "epochs": ("epoch", "loss", "seconds"),
    "ranks": ("rank", "peak_rss_mb", "baseline_rss_mb", "sent_bytes", "received_bytes"),
    "layers": ("compute", "wait", "longest_compute", "longest_wait", "sent"),
}


@dataclass(frozen=True)
class Run:
    """What `sar train --json` wrote.

    Attributes:
        epochs: a record of each epoch, ranks: of each rank, layers: of each layer and pass.
        config: the options. versions: of the software.
        metric: name of what ``scores`` holds.
        scores: by split, for each epoch; ``None`` where it was not evaluated. Splits that never
            were are left out.
        timed_epochs: how many epochs the sums of ``layers`` are of.
        began, command, total: when it began, what was typed, seconds of all; empty where unknown.
    """

    epochs: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    config: dict[str, Any]
    versions: dict[str, str]
    metric: str
    scores: dict[str, list[float | None]]
    timed_epochs: int
    began: str
    command: str
    total: float | None

    def column(self, name: str) -> list[float]:
        """A value of each epoch, by its name."""
        return [record[name] for record in self.epochs]

    @property
    def best(self) -> int | None:
        """Place in ``epochs`` of the best score, by validation where there is one."""
        for split in ("val", "test", "train"):
            known = [(s, -at) for at, s in enumerate(self.scores.get(split, [])) if s is not None]
            if known:
                return -max(known)[1]
        return None

    @property
    def seconds(self) -> float:
        """Median seconds of an epoch."""
        return statistics.median(self.column("seconds"))


def read_run(result: Any) -> Run:
    """Check the JSON of a run and name its parts.

    Raises ``ValueError`` for what `sar train --json` did not write, and for a run without an epoch.
    """
    missing = [key for key in _NEEDED if key not in result] if isinstance(result, Mapping) else None
    if missing is None or missing:
        what = type(result).__name__ if missing is None else f"no {', '.join(missing)}"
        raise ValueError(f"run: got {what}, expected the JSON of sar train --json")
    if not isinstance(result["config"], dict):
        raise ValueError("run: got no options in config, expected the JSON of sar train --json")
    for table in _NUMBERS:
        _check_rows(table, result[table])
    epochs = result["epochs"]
    if not epochs or not result["ranks"]:
        raise ValueError("run: got no epoch or no rank, expected one or more to draw")
    scores: dict[str, list[float | None]] = {}
    for split in SPLITS:
        key = next((name for name in epochs[0] if name.startswith(f"{split}_")), None)
        column = [record.get(key) for record in epochs]
        if any(score is not None for score in column):
            scores[split] = column
    metric = result.get("metric") or result["config"].get("metric") or "score"
    timed, total = (_number(result.get(name)) for name in ("timed_epochs", "seconds"))
    began, command = (str(result.get(name) or "") for name in ("began", "command"))
    return Run(
        epochs, result["ranks"], result["layers"], result["config"], result.get("versions", {}),
        metric, scores, max(1, int(timed or len(epochs))), began.replace("T", " "), command, total,
    )  # fmt: skip


def _number(value: Any) -> float | None:
    known = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return value if known else None


def _check_rows(table: str, rows: Any) -> None:
    """Raise ``ValueError`` unless each row of a table has its numbers."""
    for row in rows if isinstance(rows, list) else [None]:
        known = row if isinstance(row, Mapping) else {}
        for name in _NUMBERS[table]:
            if _number(known.get(name)) is None:
                raise ValueError(
                    f"run: {table}: got no number for {name!r}, expected the JSON of sar train "
                    "--json"
                )


def draw_run(run: Run, figure: Any, colors: Palette) -> None:
    """Draw all panels of a run in one figure."""
    cells = figure.add_gridspec(2, 6, hspace=0.08)
    for column, draw in enumerate((draw_loss, draw_scores, draw_seconds)):
        draw(figure.add_subplot(cells[0, 2 * column : 2 * column + 2]), run, colors)
    draw_memory(figure.add_subplot(cells[1, :3]), run, colors)
    draw_traffic(figure.add_subplot(cells[1, 3:]), run, colors)


def draw_loss(axes: Any, run: Run, colors: Palette) -> None:
    steps, loss = run.column("epoch"), run.column("loss")
    axes.plot(steps, loss, _dots(steps), color=colors.first)
    axes.set_ylim(min(0.0, *loss), 1.08 * max(0.0, *loss) or 1.0)
    title(axes, "Training loss", f"last: {loss[-1]:.4g}")
    _epochs(axes, steps)


def draw_scores(axes: Any, run: Run, colors: Palette) -> None:
    """The metric of each split, with a ring around the best epoch."""
    steps, ends = run.column("epoch"), []
    for split, color in zip(SPLITS, colors.data):
        column = run.scores.get(split, [])
        known = [(step, score) for step, score in zip(steps, column) if score is not None]
        if known:
            axes.plot(*zip(*known), _dots(known), color=color)
            ends.append((known[-1][1], f"{split} {known[-1][1]:.3f}", color))
    best = _best(axes, run, colors)
    title(axes, run.metric[:1].upper() + run.metric[1:], best or "was not evaluated")
    _epochs(axes, steps)
    if not ends:
        return
    if max(score for score, _, _ in ends) <= 1:
        axes.set_ylim(top=min(1.02, axes.get_ylim()[1]))
    label_ends(axes, ends)


def _best(axes: Any, run: Run, colors: Palette) -> str:
    """Draw a ring at the best epoch and a line down to it; returns its text."""
    if run.best is None:
        return ""
    split = "val" if "val" in run.scores else next(iter(run.scores))
    epoch, score = run.epochs[run.best]["epoch"], run.scores[split][run.best]
    axes.axvline(epoch, color=colors.quiet, linestyle=":", linewidth=1.2)
    axes.plot([epoch], [score], "o", markersize=9, markerfacecolor="none", color=colors.ink)
    return f"best: epoch {epoch}, {split} {score:.4f}"


def draw_seconds(axes: Any, run: Run, colors: Palette) -> None:
    """Seconds of each epoch; those that would flatten the others are told in words."""
    steps, seconds = run.column("epoch"), run.column("seconds")
    middle = statistics.median(seconds)
    size, name = unit_of([middle], SECONDS)
    slow = [(s, step) for s, step in zip(seconds, steps) if s > _SLOW * middle]
    shown = [s / size if s <= _SLOW * middle else math.nan for s in seconds]
    axes.plot(steps, shown, _dots(steps), color=colors.first)
    axes.set_ylim(0, 1.25 * max(s for s in shown if s == s))
    axes.set_ylabel(name)
    title(axes, "Time of an epoch", _told(slow))
    _epochs(axes, steps)
    label_ends(axes, [(middle / size, f"median\n{short(middle, SECONDS)}", colors.first)])


def _told(slow: Sequence[tuple[float, float]]) -> str:
    """A text for the (seconds, epoch) that are too high for the picture."""
    if not slow:
        return ""
    most, epoch = max(slow)
    more = f", and {len(slow) - 1} more" if len(slow) > 1 else ""
    return f"above: epoch {epoch}, {short(most, SECONDS)}{more}"


def draw_memory(axes: Any, run: Run, colors: Palette) -> None:
    """Memory of each rank at its peak: what the libraries take, and what the run took above it."""
    start = [2**20 * rank["baseline_rss_mb"] for rank in run.ranks]
    peak = [max(low, 2**20 * rank["peak_rss_mb"]) for low, rank in zip(start, run.ranks)]
    size, unit = unit_of(peak, MEMORY)
    ranks = [rank["rank"] for rank in run.ranks]
    floor, top = [low / size for low in start], [high / size for high in peak]
    above = [high - low for low, high in zip(floor, top)]
    axes.bar(ranks, floor, 0.72, label="process with its libraries", color=colors.pale)
    bars = axes.bar(ranks, above, 0.72, bottom=floor, label="what the run took", color=colors.first)
    _write_over(axes, bars, top)
    title(axes, "Memory of each rank at its peak")
    _finish_bars(axes, unit, ranks, max(top))


def draw_traffic(axes: Any, run: Run, colors: Palette) -> None:
    moved = {
        word: [rank[f"{word}_bytes"] / len(run.epochs) for rank in run.ranks]
        for word in ("sent", "received")
    }
    most = max(map(max, moved.values()))
    size, unit = unit_of([most], TRAFFIC)
    ranks = [rank["rank"] for rank in run.ranks]
    for place, (word, values) in enumerate(moved.items()):
        where = [rank - 0.2 + 0.4 * place for rank in ranks]
        heights = [value / size for value in values]
        bars = axes.bar(where, heights, 0.37, label=word, color=colors.data[place])
        if len(ranks) <= 6:
            _write_over(axes, bars, heights)
    title(axes, "Traffic of each rank in an epoch")
    _finish_bars(axes, unit, ranks, most / size)


def _write_over(axes: Any, bars: Any, values: Sequence[float]) -> None:
    if len(values) <= 12:
        texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        axes.bar_label(bars, texts, padding=2, fontsize=10)


def _finish_bars(axes: Any, unit: str, ranks: Sequence[int], top: float) -> None:
    axes.set_ylim(0, 1.12 * top or 1.0)
    axes.set_xlim(min(ranks) - 0.6, max(ranks) + 0.6)
    axes.set(xlabel="rank", ylabel=unit)
    whole_numbers(axes.xaxis)
    axes.tick_params(axis="x", length=0)
    key_above(axes)


def _epochs(axes: Any, steps: Sequence[float]) -> None:
    axes.set_xlabel("epoch")
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    whole_numbers(axes.xaxis)


def _dots(points: Sequence[Any]) -> str:
    return "o-" if len(points) <= _DOTS else "-"
