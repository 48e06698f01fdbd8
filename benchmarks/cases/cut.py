"""What cutting takes and how good it is, by method, and what balance is worth in training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import graphs
from benchmarks.cluster import ONE_THREAD, Cluster
from benchmarks.contenders import ours
from benchmarks.race import MB, race
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.cutting import save_edges

if TYPE_CHECKING:
    from sar.partition.arrays import GraphArrays

PARTS = 8
SCALE = 17  # of the R-MAT graph
EDGES_A_NODE = 15  # of the community graph
METHODS: dict[str, tuple[str, list[str]]] = {
    "metis": ("metis", ["nodes"]),  # as DGL's `partition_graph` calls it
    "coarsen": ("coarsen", ["nodes"]),
    "coarsen, balanced": ("coarsen", ["edges", "halo"]),
}
SAME_CUT, EVEN = 1.02, 1.06
DGLS, BALANCED = "metis+nodes", "coarsen+edges+halo"
WORTH = 1.15


@benchmark("cut", "partition")
def cut(options: Options) -> Report:
    """Processor seconds, memory and quality of METIS, coarsen, coarsen balanced; 8 parts.

    A community graph (--nodes, 15 edges each), R-MAT, and cnr2000 where --data has cnr2000.npz.
    Every cut is a process of its own; its children's seconds and memory count as well.
    """
    columns = ["graph", "method", "cpu s", "peak MB", "cut", "nodes", "edges", "halo", "halo rows"]
    title = f"Cut share, the rest max / mean of {PARTS} parts; beyond the cut of a small graph"
    report = Report(tables=[Table(title, columns)])
    for name, make in _graphs(options).items():
        folder = graphs.edges_folder(options, name)
        if not folder.is_dir():
            save_edges(make(), folder)
        found = {shown: _cut(folder, *method) for shown, method in METHODS.items()}
        for shown, one in found.items():
            sizes = [one["cpu"], one["peak"] / MB, *(one[key] for key in columns[4:8])]
            report.tables[0].rows.append([name, shown, *sizes, one["rows"]])
        report.figures += _figures(name, found)
    return report


def _cut(folder: Path, method: str, balance: list[str]) -> dict[str, float]:
    task = "benchmarks.tasks.cutting:Cutting"
    beside = {**ONE_THREAD, "TMPDIR": str(folder)}  # scratch files of the cut
    with Cluster(task, environment=beside, folder=str(folder)) as cluster:
        return cluster.call("run", name=method, balance=balance, num_parts=PARTS)[0]


def _figures(name: str, found: dict[str, dict[str, float]]) -> list[Figure]:
    metis, coarsen, balanced = (found[shown] for shown in METHODS)
    bound = SAME_CUT if name.startswith("community") else None
    ratio = {key: coarsen[key] / metis[key] for key in ("cut", "cpu", "peak")}
    return [
        Figure(f"{name}: cut, coarsen / metis", ratio["cut"], at_most=bound),
        Figure(f"{name}: cpu, coarsen / metis", ratio["cpu"]),
        Figure(f"{name}: memory, coarsen / metis", ratio["peak"]),
        Figure(f"{name}: edges, max / mean, balanced", balanced["edges"], at_most=EVEN),
    ]


def _graphs(options: Options) -> dict[str, Callable[[], GraphArrays]]:
    from sar.partition.sources.generate import community_graph, rmat_graph
    from sar.partition.sources.npz import read_npz

    nodes, samples = options.nodes, 2_000_000 * 2**SCALE // 2**17
    known: dict[str, Callable[[], GraphArrays]] = {
        f"community-{nodes}": partial(
            community_graph, nodes, EDGES_A_NODE * nodes, features=1, homophily=0.8
        ),
        f"rmat-{SCALE}": partial(rmat_graph, SCALE, samples, features=1),
    }
    file = options.data and options.data / "cnr2000.npz"
    if file and file.is_file():
        known["cnr2000"] = partial(read_npz, file)
    return known


@benchmark("balance-training", "partition")
def balance_training(options: Options) -> Report:
    """The busiest of 8 ranks that train a GAT: DGL's METIS / coarsen balanced; R-MAT.

    Both train an epoch in turn; a ratio is the median of the turns' ratios.
    """
    prepared = graphs.rmat(options, [(DGLS, PARTS), (BALANCED, PARTS)], SCALE)
    known = {name: ours(prepared, (name, PARTS), "gat") for name in (DGLS, BALANCED)}
    found = race(known, options.repeats)
    columns = ["cut", "busiest rank's cpu s", "mean of ranks"]
    table = Table(f"One epoch of {PARTS} ranks, medians of {options.repeats} turns", columns)
    keys = ("busiest cpu", "mean cpu")
    table.rows = [[name, *(found.middle(name, key) for key in keys)] for name in known]
    ratio = found.ratio(DGLS, BALANCED, "busiest cpu")
    figure = Figure("busiest rank's cpu, metis / coarsen balanced", ratio, at_least=WORTH)
    return Report([figure], [table])
