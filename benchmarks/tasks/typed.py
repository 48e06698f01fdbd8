"""Training on real graphs of several types: an R-GCN, on DGL's whole graph or on a partition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

EType = tuple[str, str, str]


def read(file: str | Path) -> Any:
    """The graph of an npz file, relations numbered as DGL numbers them."""
    from sar.partition.sources.npz import read_npz

    graph = read_npz(file)
    graph.edges = dict(sorted(graph.edges.items()))
    return graph


class Relational(nn.Module):
    """Two layers: a mean and a matrix for each relation, and a matrix for the node's own row.

    Nodes of the labeled type start from a projection of their features, all others from learned
    rows.
    """

    WIDTH, EPOCHS = 32, 30

    def __init__(
        self,
        tables: dict[str, nn.Module],
        target: str,
        num_features: int,
        etypes: list[EType],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.tables, self.target = nn.ModuleDict(tables), target
        self.project = nn.Linear(num_features, self.WIDTH)
        self.convs, self.loops = nn.ModuleList(), nn.ModuleList()
        for width in (self.WIDTH, num_classes):
            convs = {
                etype: dgl.nn.GraphConv(self.WIDTH, width, norm="right", bias=False)
                for etype in etypes
            }
            self.convs.append(dgl.nn.HeteroGraphConv(convs, "sum"))
            self.loops.append(nn.Linear(self.WIDTH, width))

    def forward(self, graph: Any, rows: dict[str, Tensor], features: Tensor) -> Tensor:
        h = {t: table(rows[t]) for t, table in self.tables.items()}
        h[self.target] = self.project(features)
        for conv, loop in zip(self.convs, self.loops):
            h = {t: F.elu(x) for t, x in h.items()}
            h = {t: loop(h[t]) + x for t, x in conv(graph, h).items()}
        return h[self.target]


class Whole:
    """The reference: DGL on the whole graph in one process."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import sar

        self.sar, self.rank, self.size = sar, rank, size
        self.group = sar.current_group()

    def load(self, source: str, target: str) -> None:
        """Take a data set: its npz file here, the JSON of its partitions on a rank."""
        import dgl

        arrays = read(source)
        self.target, self.data = target, arrays.node_data[target]
        graph = dgl.heterograph(arrays.edges, num_nodes_dict=arrays.num_nodes)
        self.etypes, self.counts = graph.canonical_etypes, dict(arrays.num_nodes)
        self.graph = graph
        self.rows = {t: torch.arange(count) for t, count in self.counts.items()}

    def table(self, ntype: str, width: int, seed: int) -> nn.Module:
        """Learned rows that start alike in every process."""
        from sar.nn.embedding import initial_rows

        rows = initial_rows(torch.arange(self.counts[ntype]), ntype, width, seed)
        return nn.Embedding.from_pretrained(rows.float(), freeze=False)

    def gather(self, model: nn.Module) -> None:
        """Sum the gradients over all ranks."""

    def model(self, seed: int) -> tuple[nn.Module, tuple]:
        """The model and its inputs beside the graph."""
        torch.manual_seed(seed)  # the same parameters in every process
        labels = self.data["label"]
        if labels.dim() == 2:
            classes = labels.shape[1]
        else:
            classes = int(self.group.all_reduce(labels.max() + 1, "max"))
        others = [t for t in self.counts if t != self.target]
        tables = {t: self.table(t, Relational.WIDTH, seed) for t in others}
        features = self.data["feat"]
        net = Relational(tables, self.target, features.shape[1], self.etypes, classes)
        return net, (self.rows, features)

    def fit(self, seed: int, metric: str) -> dict[str, Any]:
        """Loss of every epoch, and the metric on the test nodes after the last."""
        from sar.train import score

        model, inputs = self.model(seed)
        optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
        labels, train, test = (self.data[k] for k in ("label", "train_mask", "test_mask"))
        labels = labels.float() if labels.dim() == 2 else labels.long()
        losses = []
        for _ in range(model.EPOCHS):
            logits = model(self.graph, *inputs)[train.bool()]
            if labels.dim() == 2:
                values = F.binary_cross_entropy_with_logits(
                    logits, labels[train.bool()], reduction="none"
                )
            else:
                values = F.cross_entropy(logits, labels[train.bool()], reduction="none")
            loss = self.sar.global_mean(values)
            optimizer.zero_grad()
            loss.backward()
            self.gather(model)
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            logits = model(self.graph, *inputs)[test.bool()]
        return {"losses": losses, "score": float(score(metric, logits, labels[test.bool()]))}


class Part(Whole):
    """One partition."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import sar

        sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)
        super().__init__(rank, size, port)

    def load(self, source: str, target: str) -> None:
        data = self.sar.load_dgl_partition_data(source, self.rank, "cpu")
        self.etypes, self.target = data.book.canonical_etypes, target
        names = ("label", "train_mask", "test_mask", "feat")
        stored = {name: f"{target}/{name}" for name in names}
        self.data = {n: data.node_features[k] for n, k in stored.items() if k in data.node_features}
        self.counts = {t: data.num_nodes(t) for t in data.book.ntypes}
        self.graph = self.sar.construct_full_graph(data, self.sar.Policy(rounds=1))
        self.rows = dict.fromkeys(self.counts, self.graph)

    def table(self, ntype: str, width: int, seed: int) -> nn.Module:
        return self.sar.nn.ShardedEmbedding(self.graph, ntype, width, seed=seed)

    def gather(self, model: nn.Module) -> None:
        self.sar.gather_grads(model)
