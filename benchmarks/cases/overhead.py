"""What an epoch costs where there is nothing to compute: a small graph on many ranks."""

from __future__ import annotations

from itertools import product
from statistics import median

from benchmarks import graphs
from benchmarks.cluster import APART, LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, NODES, EDGES = 8, 1000, 5000
EPOCHS = 30
MS = 1e3
LIMITS = {"one-shot": (1, 20.0), "strict rounds": (None, 40.0)}  # rounds, milliseconds a rank
TRANSPORTS = {"": LAUNCH, ", sockets": APART}


@benchmark("overhead", "limits")
def overhead(options: Options) -> Report:
    """Processor time of a rank's epoch on a graph of 1,000 nodes: 3-layer SAGE, 8 ranks, METIS.

    The median of the epochs of the costliest rank; its gloo threads count. Rows go through the
    host's memory, and through sockets as between hosts. Beside them DGL on as many graphs of an
    eighth of the size, side by side: what the model alone takes here.
    """
    graph = graphs.community(options, [("metis", RANKS)], NODES, EDGES)
    columns = ["rounds", "cpu ms", "of that the main thread", "collectives"]
    report = Report(tables=[Table(f"Medians of {EPOCHS} epochs, costliest rank", columns)])
    for (kind, (rounds, limit)), (way, environment) in product(LIMITS.items(), TRANSPORTS.items()):
        name = kind + way
        with Cluster(
            "benchmarks.tasks.overhead:Overhead",
            RANKS,
            environment=environment,
            parts=str(graph.parts["metis", RANKS]),
            rounds=rounds,
        ) as cluster:
            costs = _costs(cluster)
        report.tables[0].rows.append([name, *costs])
        figure = Figure(f"{name}: cpu of a rank's epoch", costs[0], "ms", at_most=limit)
        report.figures.append(figure)
    share = graphs.community(options, [], NODES // RANKS, EDGES // RANKS)
    task = "benchmarks.tasks.overhead:Share"
    with Cluster(task, RANKS, environment=LAUNCH, file=str(share.file)) as cluster:
        report.tables[0].rows.append(["DGL, an eighth of the graph", *_costs(cluster)])
    return report


def _costs(cluster: Cluster) -> list[float]:
    """Milliseconds of the costliest rank's epoch, those of its main thread, collectives."""
    ranks = cluster.call("epochs", number=EPOCHS)
    costs = {key: max(median(rank[key]) for rank in ranks) for key in ranks[0]}
    return [costs["cpu"] * MS, costs["thread"] * MS, int(costs["collectives"])]
