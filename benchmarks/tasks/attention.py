"""Training steps of layers that compute on edges, and the attention operation alone."""

from __future__ import annotations

from typing import Any

import dgl.function as fn
import torch
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn

from benchmarks.tasks import sage
from benchmarks.tasks.sage import HIDDEN
from benchmarks.tasks.stack import HEADS, Stack


class Operation(nn.Module):
    """Scores of both ends, softmax and the weighted sum, as GATConv writes them; no dense layer."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(num_nodes, HEADS, HIDDEN // HEADS))
        self.left = nn.Parameter(torch.randn(num_nodes, HEADS, 1))
        self.right = nn.Parameter(torch.randn(num_nodes, HEADS, 1))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata.update({"ft": self.rows, "el": self.left})
            graph.dstdata["er"] = self.right
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            graph.edata["a"] = edge_softmax(graph, F.leaky_relu(graph.edata.pop("e"), 0.2))
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "ft"))
            return graph.dstdata["ft"]


class _Chosen:
    """Trains the model that was named; the operation alone is run forward and backward."""

    kind: str
    features: Tensor
    graph: Any
    model: nn.Module
    row_numbers = HIDDEN + HEADS

    def make_model(self, num_features: int) -> nn.Module:
        if self.kind == "operation":
            return Operation(self.graph.num_nodes())
        return Stack(self.kind, num_features)

    def step(self) -> float:
        if self.kind != "operation":
            return super().step()  # type: ignore[misc]
        self.model.zero_grad()
        out = self.model(self.graph, self.features)
        out.backward(self.model.rows.detach())
        return float(out.detach()[0].sum())


class Dgl(_Chosen, sage.Dgl):
    """The whole graph in one process, DGL alone."""

    def __init__(self, rank: int, size: int, port: int, kind: str, file: str) -> None:
        self.kind = kind
        super().__init__(rank, size, port, file)


class Sar(_Chosen, sage.Sar):
    """One partition, this library."""

    def __init__(self, rank: int, size: int, port: int, kind: str, **arguments: Any) -> None:
        self.kind = kind
        super().__init__(rank, size, port, **arguments)

    def make_structure(self) -> None:
        if self.kind == "weighted":
            super().make_structure()
        self.graph.create_formats_()  # as for DGL

    def plan(self) -> Any:
        """Every row as it is: no rank can compute partial sums for another's softmax."""
        return self.graph._relation(None).plan
