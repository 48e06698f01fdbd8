"""This checkout beside an earlier one of the same library, taking turns."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks import graphs
from benchmarks.contenders import ours
from benchmarks.race import race
from benchmarks.registry import Figure, Options, Report, benchmark

MEMORY_EPOCHS = 3
MOST = 1.03  # times the earlier one's
BEFORE, NOW = "earlier", "this one"
RECOMPUTE = {"activations": "recompute"}
STEPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "SAGE, P=4, one-shot": ("sage", 4, {"rounds": 1}),
    "SAGE, P=4, strict": ("sage", 4, {}),
    "GAT, P=1": ("gat", 1, {}),
    "GAT, P=4": ("gat", 4, {}),
    "SAGE, P=8, keep": ("sage", 8, {}),
    "SAGE, P=8, recompute, donate": ("sage", 8, {**RECOMPUTE, "donate": True}),
    "GAT, P=8, keep": ("gat", 8, {}),
    "GAT, P=8, recompute": ("gat", 8, RECOMPUTE),
}


@benchmark("earlier", "versus")
def earlier(options: Options) -> Report:
    """CPU seconds, bytes, activation memory: at most 1.03 x those of an earlier checkout."""
    if options.before is None:
        return Report(skipped="pass --before with an earlier checkout of this library")
    report = Report()
    for name, (kind, ranks, given) in STEPS.items():
        cut = ("random", 1) if ranks == 1 else ("metis", ranks)
        start = ours(graphs.rmat(options, [cut]), cut, kind, **given)
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
