"""Layers that compute on edges: processor seconds and memory against single-process DGL."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from benchmarks import graphs
from benchmarks.cases.memory import MB
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster, launch_environment
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.softmax import streamed_bytes

TASKS = "benchmarks.tasks.attention"
RANKS, MEMORY_RANKS = 4, 8
OWN_CUT = ("random", 1)
TWO_THREADS = {**LAUNCH, "OMP_NUM_THREADS": "2"}
TINY = 12
SMALL = 15  # DGL holds 2 GB a tensor of GATv2 on the large graph
SAME_LOSS = 1e-4


@benchmark("attention", "edges")
def attention(options: Options) -> Report:
    """The attention operation alone, 4 x 64, forward and backward: 5 x faster than DGL."""
    prepared = graphs.rmat(options, [OWN_CUT])
    return _race(options, prepared, "operation", {"one rank": (1, 5.0)}, compare_loss=False)


@benchmark("gat-speed", "edges")
def gat_speed(options: Options) -> Report:
    """A training step of a 3-layer GAT on 1 rank (DGL / 3) and 4 ranks (DGL / 2.8); two threads."""
    prepared = graphs.rmat(options, [OWN_CUT, ("metis", RANKS)])
    bounds = {"one rank": (1, 3.0), f"{RANKS} ranks": (RANKS, 2.8)}
    return _race(options, prepared, "gat", bounds, two_threads=True)


@benchmark("gatv2-speed", "edges")
def gatv2_speed(options: Options) -> Report:
    """A training step of a 3-layer GATv2 on 1 rank: at most DGL / 2.5; a quarter of the graph."""
    prepared = graphs.rmat(options, [OWN_CUT], SMALL)
    return _race(options, prepared, "gatv2", {"one rank": (1, 2.5)})


@benchmark("weighted-speed", "edges")
def weighted_speed(options: Options) -> Report:
    """A training step of a 3-layer GraphConv with edge weights on 1 rank: at most DGL / 2.5."""
    prepared = graphs.rmat(options, [OWN_CUT])
    return _race(options, prepared, "weighted", {"one rank": (1, 2.5)})


@benchmark("gat-memory", "edges")
def gat_memory(options: Options) -> Report:
    """Activation memory of a GAT on 8 ranks: at most 0.95 x DGL's / 8 + two rounds; METIS."""
    prepared = graphs.rmat(options, [("metis", MEMORY_RANKS)])
    whole = {"kind": "gat", "file": str(prepared.file)}
    with Cluster(f"{TASKS}:Dgl", environment=ONE_THREAD, **whole) as dgl:
        single = dgl.call("memory", epochs=1)[0]["activation"]
    parts = str(prepared.parts["metis", MEMORY_RANKS])
    shared: dict[str, Any] = {"kind": "gat", "parts": parts, "rounds": None}
    with Cluster(f"{TASKS}:Sar", MEMORY_RANKS, environment=launch_environment(), **shared) as ranks:
        largest = max(one["activation"] for one in ranks.call("memory", epochs=2))
        one_round = max(ranks.call("round_bytes"))
    bound = 0.95 * single / MEMORY_RANKS + 2 * one_round
    table = Table("Activation memory in MB", ["DGL, one process", "largest rank", "one round"])
    table.rows.append([single / MB, largest / MB, one_round / MB])
    name = f"GAT, activation memory, P={MEMORY_RANKS}, largest rank, system"
    return Report([Figure(name, largest / MB, "MB", at_most=bound / MB)], [table])


@benchmark("softmax-bytes", "edges")
def softmax_bytes(options: Options) -> Report:
    """Bytes of layers that no kernel takes, 4 ranks: three streams of their rows, METIS."""
    from sar.comm import ThreadGroup

    prepared = graphs.rmat(options, [("metis", RANKS)], TINY)
    table = Table("Forward and backward, all ranks", ["layer", "sent MB", "three streams", "cpu s"])
    report = Report(tables=[table])
    for kind in ("agnn", "edgegat", "hgt"):
        parts = str(prepared.parts["metis", RANKS])
        ranks = ThreadGroup.run(RANKS, partial(streamed_bytes, kind, parts))
        sent, bound, cpu = (sum(column) for column in zip(*ranks))
        table.rows.append([kind, sent / MB, bound / MB, cpu])
        report.figures.append(Figure(f"{kind}: sent / three streams", sent / bound, at_most=1.02))
    return report


def _race(
    options: Options,
    prepared: graphs.Prepared,
    kind: str,
    bounds: dict[str, tuple[int, float]],
    *,
    two_threads: bool = False,
    compare_loss: bool = True,
) -> Report:
    """Contenders train an epoch each in turn; a ratio is the median of the turns' ratios.

    Args:
        bounds: name of a contender -> its ranks, how many times faster than DGL it has to be.
    """
    with ExitStack() as stack:
        whole = partial(Cluster, f"{TASKS}:Dgl", kind=kind, file=str(prepared.file))
        clusters = {"DGL": stack.enter_context(whole(environment=ONE_THREAD))}
        for name, (ranks, _) in bounds.items():
            clusters[name] = stack.enter_context(_ranks(prepared, kind, ranks, LAUNCH))
            if two_threads and ranks == 1:  # right after it: the machine's speed changes
                cluster = _ranks(prepared, kind, 1, TWO_THREADS)
                clusters["two threads"] = stack.enter_context(cluster)
        turns = [
            {name: _turn(cluster) for name, cluster in clusters.items()}
            for _ in range(options.repeats)
        ]
    return _report(kind, turns, bounds, two_threads, compare_loss)


def _ranks(prepared: graphs.Prepared, kind: str, ranks: int, environment: dict) -> Cluster:
    cut = OWN_CUT if ranks == 1 else ("metis", ranks)
    arguments = {"kind": kind, "parts": str(prepared.parts[cut]), "rounds": None}
    return Cluster(f"{TASKS}:Sar", ranks, environment=environment, **arguments)


def _turn(cluster: Cluster) -> dict[str, float]:
    """One epoch of all ranks, after another: some systems take pages from those that sleep."""
    cluster.call("epoch")
    ranks = cluster.call("epoch")
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {**total, "wall": max(rank["wall"] for rank in ranks)}


def _report(
    kind: str,
    turns: list[dict[str, dict[str, float]]],
    bounds: dict[str, tuple[int, float]],
    two_threads: bool,
    compare_loss: bool,
) -> Report:
    columns = ["contender", "cpu s", "x faster than DGL", "wall s", "sent MB"]
    table = Table(f"{kind}: one step, medians of {len(turns)} turns", columns)
    for name in turns[0]:
        middle = {key: median(turn[name][key] for turn in turns) for key in ("cpu", "wall", "sent")}
        faster = median(turn["DGL"]["cpu"] / turn[name]["cpu"] for turn in turns)
        table.rows.append([name, middle["cpu"], faster, middle["wall"], middle["sent"] / MB])
    report = Report(tables=[table])
    for name, (_, least) in bounds.items():
        faster = median(turn["DGL"]["cpu"] / turn[name]["cpu"] for turn in turns)
        report.figures.append(Figure(f"{kind}, {name}: DGL's cpu / cpu", faster, at_least=least))
        if compare_loss:
            apart = max(abs(turn[name]["loss"] / turn["DGL"]["loss"] - 1) for turn in turns)
            report.figures.append(Figure(f"{kind}, {name}: loss", apart, at_most=SAME_LOSS))
    if two_threads:
        ratio = median(turn["one rank"]["wall"] / turn["two threads"]["wall"] for turn in turns)
        report.figures.append(Figure(f"{kind}: wall, 1 / 2 threads", ratio, at_least=1.6))
    return report
