"""The same training step with PyG's layers, in one process of PyG and on ranks of this library."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as layers

from benchmarks.graphs import read_graph
from benchmarks.tasks.models import CLASSES, HEADS, HIDDEN, LAYERS
from benchmarks.tasks.training import Sar, Task


class Stack(nn.Module):
    """Three unmodified layers of PyG, sage (of means), gcn or gat: those of the stack of DGL's."""

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__()
        self.is_gat = kind == "gat"
        *hidden, last = zip([num_features, *[HIDDEN] * (LAYERS - 1)], [*[HIDDEN] * 2, CLASSES])
        if self.is_gat:
            found = [layers.GATConv(width, HIDDEN // HEADS, HEADS) for width, _ in hidden]
            found.append(layers.GATConv(*last, HEADS, concat=False))
        else:
            layer = {"sage": layers.SAGEConv, "gcn": layers.GCNConv}[kind]
            found = [layer(*size) for size in (*hidden, last)]
        self.layers = nn.ModuleList(found)

    def forward(self, edges: Any, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = layer(x, edges)
            x = F.elu(x) if self.is_gat else F.relu(x)
        return last(x, edges)


class Pyg(Task):
    """The whole graph in one process, PyG alone.

    Args:
        edges: ``"edge_index"`` or ``"csr"`` (torch's sparse matrix).
    """

    def __init__(self, file: str, kind: str, edges: str) -> None:
        self.kind, data = kind, read_graph(file)
        self.features, self.labels = data["feat"], data["label"]
        self.train = data["train_mask"].nonzero().squeeze(1)
        self.graph = _edges(edges, data["src"].long(), data["dst"].long(), len(data["feat"]))
        del data
        self.start()

    def make(self, num_features: int) -> nn.Module:
        return Stack(self.kind, num_features)


def _edges(kind: str, src: Tensor, dst: Tensor, num_nodes: int) -> Tensor:
    if kind == "edge_index":
        return torch.stack([src, dst])
    order = torch.argsort(dst, stable=True)
    starts = F.pad(torch.bincount(dst, minlength=num_nodes).cumsum(0), (1, 0))
    return torch.sparse_csr_tensor(starts, src[order], torch.ones(len(src)))


class SarPyg(Sar):
    """One partition, this library, with PyG's layers."""

    def start(self) -> None:
        from sar import registry

        (self.graph,) = registry.front_end("pyg").arguments(["edge_index"], self.whole, None)
        if self.kind != "sage":  # as for the graph itself, which is there before the first epoch
            self.graph.graph.with_own_loops()
        super().start()

    def make(self, num_features: int) -> nn.Module:
        return Stack(self.kind, num_features)
