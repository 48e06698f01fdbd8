"""Processor seconds per epoch, taking turns with DGL and, if asked, with IntelLabs SAR."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

MB = 1e6
RANKS = 4
LIMIT = 0.95
SAME_LOSS = 1e-4
Epochs = list[dict[str, float]]

DGL, DGL_TUNED = "DGL", "DGL, ranks' environment"
ONE_SHOT, STRICT = "sar, one-shot", "sar, strict"
ORIGINAL = "IntelLabs SAR"


@benchmark("speed", "core")
def speed(options: Options) -> Report:
    """Processor seconds per epoch of all ranks against one DGL process: R-MAT, METIS, SAGE.

    All contenders stay alive and train one epoch each in turn, so that a busy machine slows all of
    them; a ratio is the median of the turns' ratios. The first epoch of each warms up and gives
    its activation memory.
    """
    graph = graphs.rmat(options, [("metis", RANKS)])
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(start()) for name, start in contenders(graph, options).items()
        }
        memory = {name: cluster.call("memory", epochs=1) for name, cluster in clusters.items()}
        turns: dict[str, Epochs] = {name: [] for name in clusters}
        for turn in range(options.repeats):
            order = list(clusters) if turn % 2 else list(reversed(clusters))
            for name in order:
                turns[name].append(_merge(clusters[name].call("epoch")))
    activation = {name: max(one["activation"] for one in ranks) for name, ranks in memory.items()}
    return _report(turns, activation)


def contenders(graph: graphs.Prepared, options: Options) -> dict[str, Callable[[], Cluster]]:
    """What starts each of them, by name; every one starts its training with the same model."""
    tasks, parts = "benchmarks.tasks.sage", str(graph.parts["metis", RANKS])
    ranks = partial(Cluster, f"{tasks}:Sar", RANKS, environment=LAUNCH, parts=parts)
    whole = partial(Cluster, f"{tasks}:Dgl", file=str(graph.file))
    known: dict[str, Callable[[], Cluster]] = {
        DGL: partial(whole, environment=ONE_THREAD),
        DGL_TUNED: partial(whole, environment=LAUNCH),
        ONE_SHOT: partial(ranks, rounds=1),
        STRICT: partial(ranks, rounds=None),
    }
    if options.sar_path is not None:
        known[ORIGINAL] = partial(
            Cluster,
            f"{tasks}:Original",
            RANKS,
            environment=LAUNCH,
            first=options.sar_path,
            parts=parts,
            checkout=str(options.sar_path),
        )
    return known


def _merge(ranks: Epochs) -> dict[str, float]:
    """One epoch of all ranks: sums, except for the wall clock, of which the longest counts."""
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {**total, "wall": max(rank["wall"] for rank in ranks)}


def _report(turns: dict[str, Epochs], activation: dict[str, int]) -> Report:
    table = Table(
        f"One epoch, medians of {len(turns[DGL])} turns; {RANKS} ranks, one thread each. "
        "cpu = user + system seconds of all ranks; x DGL = median of the turns' ratios.",
        ["contender", "cpu s", "x DGL", "user s", "system s", "faults", "wall s", "sent MB"]
        + ["activation MB"],
    )
    for name, epochs in turns.items():
        middle = {key: median(epoch[key] for epoch in epochs) for key in epochs[0]}
        table.rows.append(
            [name, middle["cpu"], _ratio(turns, name), middle["user"], middle["system"]]
            + [int(middle["faults"]), middle["wall"], middle["sent"] / MB, activation[name] / MB]
        )
    report = Report(tables=[table])
    for name in (ONE_SHOT, STRICT):
        ratio = _ratio(turns, name)
        report.figures.append(Figure(f"{name}: cpu / DGL's", ratio, at_most=LIMIT))
    for name in (ONE_SHOT, STRICT):
        tuned = _ratio(turns, name, DGL_TUNED)
        report.figures.append(Figure(f"{name}: cpu / DGL's in the ranks' environment", tuned))
    for name in turns:
        if name != DGL:  # who computes something else is not worth comparing
            apart = _loss_error(turns, name)
            report.figures.append(Figure(f"{name}: loss / DGL's - 1", apart, at_most=SAME_LOSS))
    return report


def _ratio(turns: dict[str, Epochs], name: str, base: str = DGL) -> float:
    pairs = zip(turns[name], turns[base])
    return median(mine["cpu"] / theirs["cpu"] for mine, theirs in pairs)


def _loss_error(turns: dict[str, Epochs], name: str) -> float:
    pairs = zip(turns[name], turns[DGL])
    return max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs)
