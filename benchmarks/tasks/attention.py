"""Training steps of layers that compute on edges, and the attention operation alone."""

from __future__ import annotations

from typing import Any

import dgl.function as fn
import dgl.nn
import torch
import torch.nn.functional as F
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn

from benchmarks.tasks import sage
from benchmarks.tasks.sage import CLASSES, HIDDEN, LAYERS
from sar import Policy
from sar.comm import LocalGroup
from sar.kernels.attention import Scores
from sar.kernels.attention_loops import ADDITIVE, MIXED
from sar.ops.attention import Attention, attention
from sar.ops.relation import build_relation

HEADS = 4


class Stack(nn.Module):
    """Three unmodified ``dgl.nn`` layers; heads are concatenated, those of the last averaged."""

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__()
        self.kind = kind
        widths = [num_features, *[HIDDEN] * (LAYERS - 1)]
        if kind == "weighted":
            pairs = zip(widths, [*widths[1:], CLASSES])
            convs = [dgl.nn.GraphConv(a, b, norm="none") for a, b in pairs]
        else:
            layer = {"gat": dgl.nn.GATConv, "gatv2": dgl.nn.GATv2Conv}[kind]
            convs = [layer(width, HIDDEN // HEADS, HEADS) for width in widths[:-1]]
            convs.append(layer(widths[-1], CLASSES, HEADS))
        self.convs = nn.ModuleList(convs)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if self.kind == "weighted":
            weights = x.new_full((graph.num_edges(),), 0.03)
            for conv in self.convs[:-1]:
                x = F.relu(conv(graph, x, edge_weight=weights))
            return self.convs[-1](graph, x, edge_weight=weights)
        for conv in self.convs[:-1]:
            x = F.elu(conv(graph, x).flatten(1))
        return self.convs[-1](graph, x).mean(1)


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

    def start(self) -> None:
        compile_kernels()
        self.graph.create_formats_()  # as for DGL
        super().start()


def compile_kernels() -> None:
    """Load the machine code, which is neither activation memory nor time of an epoch."""
    ring = torch.arange(8, dtype=torch.int32)
    sizes, keys = ([0, len(ring)], len(ring), len(ring)), lambda: ring.long()
    relation = build_relation(LocalGroup(), ring, ring.flip(0), ring, *sizes, keys)
    for kind, width in ((ADDITIVE, 2), (MIXED, 8)):
        value = torch.ones(len(ring), 8, requires_grad=True)
        ends = torch.ones(len(ring), width, requires_grad=True)
        spec = Attention(relation, Policy(), Scores(kind, 2, 4))
        attention(spec, value, ends, ends, torch.ones(8)).sum().backward()
