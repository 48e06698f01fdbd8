"""Processor seconds per epoch, taking turns with DGL and, if asked, with IntelLabs SAR."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

from benchmarks import graphs
from benchmarks.cases.memory import SLACK
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster, launch_environment
from benchmarks.registry import Figure, Options, Report, Table, benchmark

MB = 1e6
LIMIT = 0.85  # share of DGL's processor seconds
OURS = "sar, one-shot", "sar, strict", "sar, one-shot, tbb", "sar, strict, tbb"
WARM_UP = 2  # epochs after the one that gives the memory
SAME_LOSS = 1e-4
Epochs = list[dict[str, float]]

DGL, DGL_TUNED, DGL_TBB = "DGL", "DGL, ranks' environment", "DGL, tbb"
ONE_SHOT, STRICT, ONE_SHOT_TBB, STRICT_TBB = OURS
ORIGINAL = "IntelLabs SAR"


@benchmark("speed", "core")
def speed_4(options: Options) -> Report:
    """Processor seconds per epoch of 4 ranks against one DGL process: R-MAT, METIS, SAGE."""
    return speed(options, 4)


@benchmark("speed-8", "limits")
def speed_8(options: Options) -> Report:
    """The same on 8 ranks."""
    return speed(options, 8)


def speed(options: Options, ranks: int) -> Report:
    """All contenders stay alive and train one epoch each in turn, so that a busy machine slows all
    of them; a ratio is the median of the turns' ratios. The first epochs of each warm up and give
    its activation memory. A turn is two epochs, of which the second counts: a virtual machine that
    reports free pages gives the memory of those who wait to its host, and the first epoch pays for
    getting it back, which training without pauses never does.
    """
    graph = graphs.rmat(options, [("metis", ranks)])
    with ExitStack() as stack:
        clusters = {
            name: stack.enter_context(start())
            for name, start in contenders(graph, ranks, options).items()
        }
        memory = {name: cluster.call("memory", epochs=1) for name, cluster in clusters.items()}
        rounds = {
            name: max(cluster.call("round_bytes"))
            for name, cluster in clusters.items()
            if name in OURS
        }
        for cluster in clusters.values():
            for _ in range(WARM_UP):
                cluster.call("epoch")
        turns: dict[str, Epochs] = {name: [] for name in clusters}
        for turn in range(options.repeats):
            order = list(clusters) if turn % 2 else list(reversed(clusters))
            for name in order:
                clusters[name].call("epoch")
                turns[name].append(_merge(clusters[name].call("epoch")))
    activation = {name: max(one["activation"] for one in all_) for name, all_ in memory.items()}
    report = _report(turns, activation, ranks)
    for name, one_round in rounds.items():
        bound = SLACK * activation[DGL] / ranks + 2 * one_round
        held = Figure(f"{name}: activations", activation[name] / MB, "MB", at_most=bound / MB)
        report.figures.append(held)
    return report


def contenders(
    graph: graphs.Prepared, size: int, options: Options
) -> dict[str, Callable[[], Cluster]]:
    """What starts each of them, by name; every one starts its training with the same model."""
    tasks, parts = "benchmarks.tasks.sage", str(graph.parts["metis", size])
    ranks = partial(Cluster, f"{tasks}:Sar", size, parts=parts)
    tbb = launch_environment("tbb")
    whole = partial(Cluster, f"{tasks}:Dgl", file=str(graph.file))
    known: dict[str, Callable[[], Cluster]] = {
        DGL: partial(whole, environment=ONE_THREAD),
        DGL_TUNED: partial(whole, environment=LAUNCH),
        DGL_TBB: partial(whole, environment=tbb),
        ONE_SHOT: partial(ranks, environment=LAUNCH, rounds=1),
        STRICT: partial(ranks, environment=LAUNCH, rounds=None),
        ONE_SHOT_TBB: partial(ranks, environment=tbb, rounds=1),
        STRICT_TBB: partial(ranks, environment=tbb, rounds=None),
    }
    if options.sar_path is not None:
        known[ORIGINAL] = partial(
            Cluster,
            f"{tasks}:Original",
            size,
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


def _report(turns: dict[str, Epochs], activation: dict[str, int], ranks: int) -> Report:
    table = Table(
        f"One epoch, medians of {len(turns[DGL])} turns; {ranks} ranks, one thread each. "
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
    for name in OURS:
        ratio = _ratio(turns, name)
        report.figures.append(Figure(f"{name}: cpu / DGL's", ratio, at_most=LIMIT))
    for name in OURS:
        tuned = _ratio(turns, name, DGL_TBB if "tbb" in name else DGL_TUNED)
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
