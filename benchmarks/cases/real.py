"""Accuracy on the citation graphs, and the loss curve of one rank against that of several."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

import torch

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.partition.arrays import GraphArrays

RANKS, SEEDS, EPOCHS, DROPOUT = 4, range(5), 200, 0.5
FLOORS = {"cora": 0.805, "citeseer": 0.69, "pubmed": 0.785}
CURVES = 1e-4
TASK = "benchmarks.tasks.real:Citation"


@benchmark("real", "core")
def real(options: Options) -> Report:
    """Test accuracy of a GCN on Cora, Citeseer and Pubmed on 4 ranks; loss curves of 1 and 4.

    Two layers, row-normalized features, self loops added, public split, accuracy after the last of
    200 epochs, seeds 0 to 4. The curves are compared without dropout.
    """
    folder = options.data
    if folder is None or not all((folder / f"{name}.npz").is_file() for name in FLOORS):
        return Report(skipped="pass --data or set SAR_DATA: cora.npz, citeseer.npz, pubmed.npz")
    table = Table("Accuracies by seed", ["data set", *(f"seed {seed}" for seed in SEEDS), "stdev"])
    report = Report(tables=[table])
    with Cluster(TASK, environment=LAUNCH) as one, Cluster(TASK, RANKS, environment=LAUNCH) as many:
        for name, floor in FLOORS.items():
            graph = prepare_citation(options, folder / f"{name}.npz")
            one.call("load", parts=str(graph.parts["random", 1]))
            many.call("load", parts=str(graph.parts["metis", RANKS]))
            accuracies = [_fit(many, seed, DROPOUT)[0] for seed in SEEDS]
            table.rows.append([name, *accuracies, stdev(accuracies)])
            report.figures.append(
                Figure(f"{name}: mean test accuracy", mean(accuracies), at_least=floor)
            )
            curves = [_fit(cluster, 0, 0.0)[1] for cluster in (one, many)]
            apart = max(abs(a - b) for a, b in zip(*curves))
            report.figures.append(
                Figure(f"{name}: loss curves of 1 and {RANKS} ranks", apart, at_most=CURVES)
            )
    return report


def _fit(cluster: Cluster, seed: int, dropout: float) -> tuple[float, list[float]]:
    """Accuracy and losses, which all ranks know."""
    result = cluster.call("fit", seed=seed, dropout=dropout, epochs=EPOCHS)[0]
    return result["accuracy"], result["losses"]


def prepare_citation(options: Options, file: Path, normalize: bool = True) -> graphs.Prepared:
    """A citation graph whole and cut for the ranks; ``normalize``: feature rows sum to 1."""
    cuts = [("random", 1), ("metis", RANKS), ("random", RANKS)]
    name = f"real-{file.stem}" if normalize else f"real-{file.stem}-as-it-is"
    return graphs.prepare(options, name, lambda: _read(file, normalize), cuts)


def _read(file: Path, normalize: bool) -> GraphArrays:
    """The graph with self loops."""
    from sar.partition.sources.npz import read_npz

    graph = read_npz(file)
    ((etype, (src, dst)),) = graph.edges.items()
    (data,) = graph.node_data.values()
    loops = torch.arange(graph.total_nodes)
    graph.edges[etype] = (torch.cat([src, loops]), torch.cat([dst, loops]))
    if normalize:
        data["feat"] = data["feat"] / data["feat"].sum(1, keepdim=True).clamp(min=1e-12)
    return graph
