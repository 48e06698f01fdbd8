"""Traffic avoided without changing a number: a kept input layer, and only the rows of the loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from sar.config import CONSTANT_INPUTS

MB = 1e6
RANKS = 4
FEW = 60  # one training node in so many: 1 % of all nodes
SAME_LOSS = 1e-5
Arguments = dict[str, Any]
Epochs = list[dict[str, float]]
KEPT: list[dict[str, Arguments]] = [
    {
        f"{model}, {mode}": {"model": model, "constant_inputs": mode}
        for mode in CONSTANT_INPUTS[::-1]
    }
    for model in ("sage", "gcn", "gat")
]
LABELS: dict[str, Arguments] = {
    "1 % labels, whole graph": {"constant_inputs": "memory", "every": FEW},
    "1 % labels, blocks": {"constant_inputs": "memory", "every": FEW, "blocks": True},
}


@benchmark("inputs", "limits")
def inputs(options: Options) -> Report:
    """Bytes and processor seconds with and without a kept input layer and blocks: R-MAT, METIS.

    SAGE, GCN and GAT; SAGE on blocks. Two epochs fill what is kept; the contenders then train in
    turns.
    """
    graph = graphs.rmat(options, [("metis", RANKS)])
    task, parts = "benchmarks.tasks.inputs:Inputs", str(graph.parts["metis", RANKS])
    start = partial(Cluster, task, RANKS, environment=LAUNCH, parts=parts)
    table = Table(
        f"One epoch, medians of {options.repeats} turns; {RANKS} ranks, one-shot.",
        ["contender", "sent MB", "cpu s", "activation MB"],
    )
    report = Report(tables=[table])
    for contenders in (*KEPT, LABELS):
        turns, memory, saved = _turns(start, contenders, options.repeats)
        for name, epochs in turns.items():
            middle = {key: median(epoch[key] for epoch in epochs) for key in epochs[0]}
            table.rows.append([name, middle["sent"] / MB, middle["cpu"], memory[name] / MB])
        report.figures += _figures(turns)
        if saved:
            report.figures.append(Figure("blocks: saved of rows, edges and traffic", saved))
    return report


def _turns(
    start: Callable[..., Cluster], contenders: dict[str, Arguments], repeats: int
) -> tuple[dict[str, Epochs], dict[str, float], float]:
    """Epochs by contender, the largest rank's activation memory, and what blocks save."""
    turns: dict[str, Epochs] = {name: [] for name in contenders}
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(start(**arguments)) for name, arguments in contenders.items()
        }
        ranks = {name: one.call("memory", epochs=2) for name, one in clusters.items()}
        saved = max(one.call("saved_work")[0] for one in clusters.values())
        for _ in range(repeats):
            for name, one in clusters.items():
                turns[name].append(_merge(one.call("epoch")))
    return turns, {n: max(one["activation"] for one in r) for n, r in ranks.items()}, saved


def _figures(turns: dict[str, Epochs]) -> list[Figure]:
    """Of each contender against the first."""
    (base, reference), *others = turns.items()
    figures = []
    for name, epochs in others:
        pairs = list(zip(epochs, reference))
        for key in ("sent", "cpu"):
            ratio = median(mine[key] / theirs[key] for mine, theirs in pairs)
            figures.append(Figure(f"{name}: {key} / {base}", ratio))
        apart = max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs)
        figures.append(Figure(f"{name}: loss / {base} - 1", apart, at_most=SAME_LOSS))
    return figures


def _merge(ranks: Epochs) -> dict[str, float]:
    return {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
