"""This checkout beside an earlier one of the same library, taking turns."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.race import race
from benchmarks.registry import Figure, Options, Report, benchmark

MEMORY_EPOCHS = 3
MOST = 1.03  # times the earlier one's
BEFORE, NOW = "earlier", "this one"
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
        task = f"benchmarks.tasks.{task}:Sar"
        start = partial(Cluster, task, ranks, environment=LAUNCH, parts=parts, **arguments)
        pair = {BEFORE: partial(start, first=options.before), NOW: start}
        found = race(pair, options.repeats, memory=MEMORY_EPOCHS)
        title = f"{name}: medians of {options.repeats} turns"
        report.tables.append(found.table(title, ["cpu", "sent", "activation"]))
        memory = found.middle(NOW, "activation") / found.middle(BEFORE, "activation")
        sent = found.ratio(NOW, BEFORE, "sent")
        ratios = {"cpu": found.ratio(NOW, BEFORE), "bytes": sent, "activations": memory}
        report.figures += [
            Figure(f"{name}: {what}, x earlier", value, at_most=MOST)
            for what, value in ratios.items()
        ]
    return report
