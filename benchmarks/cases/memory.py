"""Activation memory per rank on a random cut, the worst case for a halo."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

SLACK = 1.15
EPOCHS = 3


@benchmark("memory", "core")
def memory(options: Options) -> Report:
    """Activation memory per rank falls with the number of ranks: R-MAT, random cut, SAGE.

    The bound is 1.15 x (single-process DGL with the default allocator) / P + two rounds. A round
    counts the bytes that the busiest rank sends and receives in it at the widest layer.
    """
    graph = graphs.rmat(options, [("random", ranks) for ranks in options.ranks])
    with Cluster("benchmarks.tasks.sage:Dgl", environment=ONE_THREAD, file=str(graph.file)) as dgl:
        single = dgl.call("memory", epochs=1)[0]  # more would fragment its heap: a looser bound
    table = Table(
        "Activation memory in MB: peak anonymous memory above that before the first epoch. "
        "'kernel' is the range that the kernel's own peak leaves.",
        ["contender", "largest", "smallest", "kernel", "one round", "rank's base", "sent / epoch"],
    )
    table.rows.append(["DGL, one process", *_columns([single]), None, single["baseline"] / MB, 0.0])
    report = Report(tables=[table])
    for ranks in options.ranks:
        measured, one_round, sent = _measure(str(graph.parts["random", ranks]), ranks)
        base = max(one["baseline"] for one in measured) / MB
        columns = [*_columns(measured), one_round / MB, base, sent / MB]
        table.rows.append([f"sar, {ranks} ranks, strict", *columns])
        bound = SLACK * single["activation"] / ranks + 2 * one_round
        largest = max(one["activation"] for one in measured)
        name = f"activation memory, P={ranks}, largest rank"
        report.figures.append(Figure(name, largest / MB, "MB", at_most=bound / MB))
    return report


def _measure(parts: str, ranks: int) -> tuple[list[dict[str, int]], int, int]:
    """Per rank the memory, then the bytes of the busiest round and those sent in one epoch."""
    task = "benchmarks.tasks.sage:Sar"
    with Cluster(task, ranks, environment=LAUNCH, parts=parts, rounds=None) as cluster:
        measured = cluster.call("memory", epochs=EPOCHS)
        one_round = max(cluster.call("round_bytes"))
        sent = sum(epoch["sent"] for epoch in cluster.call("epoch"))
    return measured, one_round, sent


def _columns(measured: list[dict[str, int]]) -> list[float | str]:
    largest = max(measured, key=lambda one: one["activation"])
    smallest = min(one["activation"] for one in measured)
    kernel = f"{largest['low'] / MB:.0f}-{largest['high'] / MB:.0f}"
    return [largest["activation"] / MB, smallest / MB, kernel]
