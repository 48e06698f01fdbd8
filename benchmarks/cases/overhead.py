"""What an epoch costs where there is nothing to compute: a small graph on many ranks."""

from __future__ import annotations

from statistics import median

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, NODES, EDGES = 8, 1000, 5000
EPOCHS = 30
MS = 1e3
LIMITS = {"one-shot": (1, 20.0), "strict rounds": (None, 40.0)}  # rounds, milliseconds a rank


@benchmark("overhead", "limits")
def overhead(options: Options) -> Report:
    """Processor time of a rank's epoch on a graph of 1,000 nodes: 3-layer SAGE, 8 ranks, METIS.

    The median of the epochs of the costliest rank; its gloo threads count.
    """
    graph = graphs.community(options, [("metis", RANKS)], NODES, EDGES)
    columns = ["rounds", "cpu ms", "of that the main thread", "collectives"]
    report = Report(tables=[Table(f"Medians of {EPOCHS} epochs, costliest rank", columns)])
    for name, (rounds, limit) in LIMITS.items():
        with Cluster(
            "benchmarks.tasks.overhead:Overhead",
            RANKS,
            environment=LAUNCH,
            parts=str(graph.parts["metis", RANKS]),
            rounds=rounds,
        ) as cluster:
            ranks = cluster.call("epochs", number=EPOCHS)
        costs = {key: max(median(rank[key]) for rank in ranks) for key in ranks[0]}
        row = [name, costs["cpu"] * MS, costs["thread"] * MS, int(costs["collectives"])]
        report.tables[0].rows.append(row)
        figure = Figure(f"{name}: cpu of a rank's epoch", costs["cpu"] * MS, "ms", at_most=limit)
        report.figures.append(figure)
    return report
