"""What an epoch costs where there is nothing to compute: a small graph on many ranks."""

from __future__ import annotations

from itertools import product
from statistics import median

from benchmarks import graphs
from benchmarks.cluster import APART, LAUNCH, Cluster
from benchmarks.contenders import TASKS, Start, ours
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, NODES, EDGES = 8, 1000, 5000
CUT = ("metis", RANKS)
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
    graph = graphs.community(options, [CUT], NODES, EDGES)
    columns = ["rounds", "cpu ms", "of that the main thread", "collectives"]
    report = Report(tables=[Table(f"Medians of {EPOCHS} epochs, costliest rank", columns)])
    for (kind, (rounds, limit)), (way, environment) in product(LIMITS.items(), TRANSPORTS.items()):
        costs = _costs(ours(graph, CUT, environment=environment, rounds=rounds))
        report.tables[0].rows.append([kind + way, *costs])
        figure = Figure(f"{kind}{way}: cpu of a rank's epoch", costs[0], "ms", at_most=limit)
        report.figures.append(figure)
    share = graphs.community(options, [], NODES // RANKS, EDGES // RANKS)
    costs = _costs(lambda: Cluster(f"{TASKS}:Dgl", RANKS, environment=LAUNCH, file=str(share.file)))
    report.tables[0].rows.append(["DGL, an eighth of the graph", *costs])
    return report


def _costs(start: Start) -> list[float]:
    """Milliseconds of the costliest rank's epoch, those of its main thread, collectives."""
    with start() as cluster:
        ranks = cluster.call("small_epochs", number=EPOCHS)
    costs = {key: max(median(rank[key]) for rank in ranks) for key in ranks[0]}
    return [costs["cpu"] * MS, costs["thread"] * MS, int(costs["collectives"])]
