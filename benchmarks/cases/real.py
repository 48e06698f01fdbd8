"""Accuracy on the citation graphs, and the loss curve of one rank against that of several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.partition.arrays import GraphArrays

RANKS, SEEDS, EPOCHS = 4, range(5), 200
CURVES = 1e-4
TASK = "benchmarks.tasks.real:Citation"
Recipe = dict[str, Any]
_GCN = {"kind": "gcn", "rate": 0.01, "decay": 5e-4, "epochs": EPOCHS}
GCN: dict[str, tuple[float, Recipe]] = {  # least accuracy
    "cora": (0.805, _GCN), "citeseer": (0.69, _GCN), "pubmed": (0.785, _GCN),
}  # fmt: skip
GAT: dict[str, tuple[float, Recipe]] = {
    "cora": (0.815, {**_GCN, "kind": "gat", "rate": 0.005}),
    "pubmed": (0.77, {**_GCN, "kind": "gat", "decay": 1e-3, "out_heads": 8}),
}


@benchmark("real", "core")
def real(options: Options) -> Report:
    """Test accuracy of a GCN on Cora, Citeseer and Pubmed on 4 ranks; loss curves of 1 and 4.

    Two layers, row-normalized features, self loops added, public split, accuracy after the last of
    200 epochs, seeds 0 to 4. The curves are compared without dropout.
    """
    return _accuracies(options, GCN, {"epochs": EPOCHS, "dropout": 0.0})


@benchmark("gat", "edges")
def gat(options: Options) -> Report:
    """Test accuracy of a GAT on Cora and Pubmed on 4 ranks; loss curves of 1 and 4.

    The paper's two layers (8 heads of 8, dropout 0.6 on features and attention, elu), features and
    splits as in `real`. The curves are those of 50 epochs, dropout included: its masks do not
    depend on the cut.
    """
    return _accuracies(options, GAT, {"epochs": 50})


def _accuracies(
    options: Options, recipes: dict[str, tuple[float, Recipe]], curve: Recipe
) -> Report:
    folder = options.data
    if folder is None or not all((folder / f"{name}.npz").is_file() for name in recipes):
        files = ", ".join(f"{name}.npz" for name in recipes)
        return Report(skipped=f"pass --data or set SAR_DATA: {files}")
    table = Table("Accuracies by seed", ["data set", *(f"seed {seed}" for seed in SEEDS), "stdev"])
    report = Report(tables=[table])
    with Cluster(TASK, environment=LAUNCH) as one, Cluster(TASK, RANKS, environment=LAUNCH) as many:
        for name, (floor, recipe) in recipes.items():
            graph = _prepare(options, folder / f"{name}.npz")
            one.call("load", parts=str(graph.parts["random", 1]))
            many.call("load", parts=str(graph.parts["metis", RANKS]))
            found = [many.call("fit", seed=seed, **recipe)[0]["accuracy"] for seed in SEEDS]
            table.rows.append([name, *found, stdev(found)])
            same = {"seed": 0, **recipe, **curve}
            curves = [cluster.call("fit", **same)[0]["losses"] for cluster in (one, many)]
            apart = max(abs(a - b) for a, b in zip(*curves))
            words = f"{name}: loss curves of 1 and {RANKS} ranks"
            report.figures += [
                Figure(f"{name}: mean test accuracy", mean(found), at_least=floor),
                Figure(words, apart, at_most=CURVES),
            ]
    return report


def _prepare(options: Options, file: Path) -> graphs.Prepared:
    """A citation graph whole and cut for the ranks."""
    cuts = [("random", 1), ("metis", RANKS)]
    return graphs.prepare(options, f"real-{file.stem}", partial(_read, file), cuts)


def _read(file: Path) -> GraphArrays:
    """The graph with self loops; feature rows sum to 1."""
    from sar.partition.sources.npz import read_npz

    graph = read_npz(file)
    ((etype, (src, dst)),) = graph.edges.items()
    (data,) = graph.node_data.values()
    loops = torch.arange(graph.total_nodes)
    graph.edges[etype] = (torch.cat([src, loops]), torch.cat([dst, loops]))
    data["feat"] = data["feat"] / data["feat"].sum(1, keepdim=True).clamp(min=1e-12)
    return graph
