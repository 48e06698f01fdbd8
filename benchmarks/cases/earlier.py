"""This checkout beside an earlier one of the same library, taking turns."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

TASKS = "benchmarks.tasks"
WARM_UP, MEMORY_EPOCHS = 2, 3
MOST = 1.03  # times the earlier one's
GAT = {"kind": "gat"}
STEPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "SAGE, P=4, one-shot": ("sage", 4, {"rounds": 1}),
    "SAGE, P=4, strict": ("sage", 4, {"rounds": None}),
    "GAT, P=1": ("attention", 1, {"rounds": None, **GAT}),
    "GAT, P=4": ("attention", 4, {"rounds": None, **GAT}),
    "SAGE, P=8, keep": ("sage", 8, {"rounds": None}),
    "SAGE, P=8, recompute, donate": (
        "sage", 8, {"rounds": None, "activations": "recompute", "donate": True},
    ),
    "GAT, P=8, keep": ("attention", 8, {"rounds": None, **GAT}),
    "GAT, P=8, recompute": ("attention", 8, {"rounds": None, "activations": "recompute", **GAT}),
}  # fmt: skip


@benchmark("earlier", "versus")
def earlier(options: Options) -> Report:
    """CPU seconds, bytes, activation memory: at most 1.03 x those of an earlier checkout."""
    if options.before is None:
        return Report(skipped="pass --before with an earlier checkout of this library")
    report = Report()
    for name, (task, ranks, arguments) in STEPS.items():
        cut = ("random", 1) if ranks == 1 else ("metis", ranks)
        parts = str(graphs.rmat(options, [cut]).parts[cut])
        start = partial(
            Cluster, f"{TASKS}.{task}:Sar", ranks, environment=LAUNCH, parts=parts, **arguments
        )
        with ExitStack() as stack:
            pair = [stack.enter_context(start(first=one)) for one in (options.before, None)]
            _compare(name, pair, options.repeats, report)
    return report


def _compare(name: str, pair: list[Cluster], repeats: int, report: Report) -> None:
    """The earlier one and this one; each turn's second epoch counts, as in `speed`."""
    memory = [
        max(one["activation"] for one in cluster.call("memory", epochs=MEMORY_EPOCHS))
        for cluster in pair
    ]
    for cluster in pair:
        for _ in range(WARM_UP):
            cluster.call("epoch")
    turns = []
    for turn in range(repeats):
        found = {}
        for place in (0, 1) if turn % 2 else (1, 0):
            pair[place].call("epoch")
            epochs = pair[place].call("epoch")
            found[place] = {key: sum(one[key] for one in epochs) for key in ("cpu", "sent")}
        turns.append((found[0], found[1]))
    columns = ["", "cpu s", "sent MB", "activation MB"]
    table = Table(f"{name}: medians of {repeats} turns", columns)
    for place, who in enumerate(("earlier", "this one")):
        cpu, sent = (median(turn[place][key] for turn in turns) for key in ("cpu", "sent"))
        table.rows.append([who, cpu, sent / 1e6, memory[place] / 1e6])
    report.tables.append(table)
    ratios = {
        "cpu": median(now["cpu"] / before["cpu"] for before, now in turns),
        "bytes": median(now["sent"] / max(before["sent"], 1) for before, now in turns),
        "activations": memory[1] / memory[0],
    }
    report.figures += [
        Figure(f"{name}: {what}, x earlier", value, at_most=MOST) for what, value in ratios.items()
    ]
