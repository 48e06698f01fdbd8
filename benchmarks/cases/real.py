"""Accuracy on the citation graphs, and the loss curve of one rank against that of several."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

if TYPE_CHECKING:
    from sar.partition.arrays import GraphArrays

RANKS, SEEDS, EPOCHS = 4, range(5), 200
CURVES = 1e-4
HEADS, DROPOUT = 8, 0.6  # of the attention network
TASK = "benchmarks.cases.real:Citation"
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


# ---------------------------------------------------------------- in the measured processes


class Gcn(nn.Module):
    """Two graph convolutions, with dropout before each."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        import dgl.nn

        self.first = dgl.nn.GraphConv(num_features, hidden)
        self.second = dgl.nn.GraphConv(hidden, num_classes)
        self.dropout = dropout

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.relu(self.first(graph, x))
        return self.second(graph, F.dropout(x, self.dropout, self.training))


class Gat(nn.Module):
    """Unmodified ``dgl.nn.GATConv`` layers; dropout on their inputs and on the attention."""

    def __init__(self, num_features: int, num_classes: int, out_heads: int) -> None:
        super().__init__()
        import dgl.nn

        drops = {"feat_drop": DROPOUT, "attn_drop": DROPOUT}
        self.first = dgl.nn.GATConv(num_features, 8, HEADS, activation=F.elu, **drops)
        self.second = dgl.nn.GATConv(8 * HEADS, num_classes, out_heads, **drops)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x).flatten(1)).mean(1)


class Citation:
    """A rank that trains on one data set after the other."""

    def __init__(self) -> None:
        import sar

        self.sar, self.group = sar, sar.initialize_comms()

    def load(self, parts: str) -> None:
        """Take this rank's partition of a data set."""
        data = self.sar.load_dgl_partition_data(parts, self.group.rank, "cpu")
        self.graph = self.sar.construct_full_graph(data)
        names = ("feat", "label", "train_mask", "test_mask")
        self.features, self.labels, train, test = (data.node_features[f"_N/{n}"] for n in names)
        self.train, self.test = train.bool(), test.bool()
        self.classes = int(self.group.all_reduce(self.labels.max() + 1, "max"))

    def fit(
        self,
        seed: int,
        kind: str,
        epochs: int,
        rate: float,
        decay: float,
        dropout: float = 0.5,
        out_heads: int = 1,
    ) -> dict[str, Any]:
        """Loss of every epoch and test accuracy after the last, both of the whole graph."""
        self.sar.manual_seed(seed)
        width = self.features.shape[1]
        if kind == "gat":
            model = self.sar.convert_dropout(Gat(width, self.classes, out_heads))
        else:
            model = Gcn(width, 16, self.classes, dropout)
        self.sar.sync_params(model)
        torch.manual_seed(seed * self.group.size + self.group.rank)  # ranks drop different entries
        optimizer = torch.optim.Adam(model.parameters(), rate, weight_decay=decay)
        losses = [self.epoch(model, optimizer) for _ in range(epochs)]
        with torch.no_grad():
            model.eval()
            right = model(self.graph, self.features).argmax(1) == self.labels
        accuracy = self.sar.global_mean(right.double(), self.test)
        return {"losses": losses, "accuracy": accuracy.item()}

    def epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        logits = model(self.graph, self.features)
        values = F.cross_entropy(logits, self.labels, reduction="none")
        loss = self.sar.global_mean(values, self.train)
        optimizer.zero_grad()
        loss.backward()
        self.sar.gather_grads(model)
        optimizer.step()
        return loss.item()
