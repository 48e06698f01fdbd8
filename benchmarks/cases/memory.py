"""Activation memory per rank on a random cut, the worst case for a halo."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.contenders import dgl, ours
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
    cuts = [("random", ranks) for ranks in options.ranks]
    graph = graphs.rmat(options, cuts)
    with dgl(graph)() as whole:
        single = whole.call("memory", epochs=1)[0]  # more would fragment its heap: a looser bound
    table = Table(
        "Activation memory in MB: peak anonymous memory above that before the first epoch. "
        "'kernel' is the range that the kernel's own peak leaves.",
        ["contender", "largest", "smallest", "kernel", "one round", "rank's base", "sent / epoch"],
    )
    table.rows.append(["DGL, one process", *_columns([single]), None, single["baseline"] / MB, 0.0])
    report = Report(tables=[table])
    for cut in cuts:
        with ours(graph, cut)() as cluster:
            measured = cluster.call("memory", epochs=EPOCHS)
            one_round = max(cluster.call("round_bytes"))
            sent = sum(epoch["sent"] for epoch in cluster.call("epoch"))
        base = max(one["baseline"] for one in measured) / MB
        columns = [*_columns(measured), one_round / MB, base, sent / MB]
        table.rows.append([f"sar, {cut[1]} ranks, strict", *columns])
        bound = SLACK * single["activation"] / cut[1] + 2 * one_round
        largest = max(one["activation"] for one in measured)
        name = f"activation memory, P={cut[1]}, largest rank"
        report.figures.append(Figure(name, largest / MB, "MB", at_most=bound / MB))
    return report


def _columns(measured: list[dict[str, int]]) -> list[float | str]:
    largest = max(measured, key=lambda one: one["activation"])
    smallest = min(one["activation"] for one in measured)
    kernel = f"{largest['low'] / MB:.0f}-{largest['high'] / MB:.0f}"
    return [largest["activation"] / MB, smallest / MB, kernel]
