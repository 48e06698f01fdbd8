"""PyG's layers hold no row of an edge, send what they have to, and are recorded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.parts import Cutter
from harness.threads import run_threads
from harness.watch import Largest
from torch import Tensor

import sar
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

nn = pytest.importorskip("torch_geometric.nn")
pytestmark = pytest.mark.timeout(60)
NODES, EDGES, WIDTH = 200, 40_000, 8
DEGREES = torch.zeros(300, dtype=torch.long).index_fill_(0, torch.tensor([200]), NODES)


class Own(nn.MessagePassing):
    """A layer of one's own: a function of both ends and of the edge."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.linear = torch.nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor, edge_index: Any, weight: Any) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x_i, x_j - x_i], -1))) * weight.view(-1, 1)


def plain(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index)


def weighted(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index, data.weight)


def typed(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index, data.type)


# By name: the layer, its call, and how many numbers of each edge there may be, as its column has.
LAYERS: dict[str, tuple[Callable[[], Any], Callable, int]] = {
    "GCN": (lambda: nn.GCNConv(WIDTH, 5), plain, 0),
    "GCN of weights": (lambda: nn.GCNConv(WIDTH, 5), weighted, 1),
    "GAT": (lambda: nn.GATConv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "GATv2": (lambda: nn.GATv2Conv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "Transformer": (lambda: nn.TransformerConv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "SAGE": (lambda: nn.SAGEConv(WIDTH, 5), plain, 0),
    "SAGE of extremes": (lambda: nn.SAGEConv(WIDTH, 5, aggr="max"), plain, 0),
    "PNA": (
        lambda: nn.PNAConv(WIDTH, 4, ["mean", "max", "min", "std"], ["amplification"], DEGREES),
        plain,
        0,
    ),
    "RGCN": (lambda: nn.RGCNConv(WIDTH, 5, 3), typed, 1),
    "FastRGCN": (lambda: nn.FastRGCNConv(WIDTH, 5, 3), typed, 1),
    "one's own": (Own, weighted, 1),
}  # fmt: skip


def dense() -> GraphArrays:
    """Few nodes, so that a tensor of all edges would stand out."""
    drawn = torch.Generator().manual_seed(0)
    src, dst = torch.randint(NODES, (2, EDGES), generator=drawn)
    columns = {
        "weight": torch.rand(EDGES, generator=drawn),
        "type": torch.randint(3, (EDGES,), generator=drawn),
    }
    x = {"feat": torch.randn(NODES, WIDTH, generator=drawn)}
    return GraphArrays(
        "dense", {NTYPE_HOMO: NODES}, {ETYPE_HOMO: (src, dst)}, {NTYPE_HOMO: x},
        {ETYPE_HOMO: columns},
    ).with_orig_ids()  # fmt: skip


def passes(make: Callable, call: Callable, data: Any, count: int) -> list[int]:
    """The most numbers that any operation gave out in each of some passes of a layer."""
    torch.manual_seed(0)
    layer, found = make(), []
    data.x = data.x.clone().requires_grad_()
    for _ in range(count):
        with Largest() as watch:
            call(layer, data).square().sum().backward()
        found.append(watch.elements)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_no_tensor_has_a_row_for_every_edge(name: str, partitioned: Cutter) -> None:
    make, call, each = LAYERS[name]
    path = partitioned(dense(), 2, "random")

    def run(group: Any) -> tuple[int, int]:
        policy = sar.Policy(block_bytes=1 << 15)
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path), policy)
        return passes(make, call, data, 2)[-1], data.edge_index.size(1)

    for found, edges in run_threads(2, run):
        assert found < (each or 0.9) * (edges + NODES) + 1, (found, edges)
