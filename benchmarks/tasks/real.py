"""Training of the networks of Kipf and Velickovic on a partition of a citation graph."""

from __future__ import annotations

from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, DROPOUT = 8, 0.6  # of the attention network


class Gcn(nn.Module):
    """Two graph convolutions, with dropout before each."""

    def __init__(self, num_features: int, hidden: int, num_classes: int, dropout: float) -> None:
        super().__init__()
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
        drops = {"feat_drop": DROPOUT, "attn_drop": DROPOUT}
        self.first = dgl.nn.GATConv(num_features, 8, HEADS, activation=F.elu, **drops)
        self.second = dgl.nn.GATConv(8 * HEADS, num_classes, out_heads, **drops)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x).flatten(1)).mean(1)


class Citation:
    """A rank that trains on one data set after the other."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        import sar

        self.sar, self.rank, self.size = sar, rank, size
        self.group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port)

    def load(self, parts: str) -> None:
        """Take this rank's partition of a data set."""
        data = self.sar.load_dgl_partition_data(parts, self.rank, "cpu")
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
        torch.manual_seed(seed * self.size + self.rank)  # ranks drop different entries
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
