"""Layers of PyG on the rows of all sources, as one process computes them; data of several types."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness.graphs import mixed
from harness.parts import Cutter
from harness.pyg import compare, sharded, whole
from harness.rows import whole as rows_of
from torch import Tensor
from torch_geometric import nn

import sar

LAYERS = {
    "SAGE": lambda: nn.SAGEConv(4, 3),
    "SAGE max": lambda: nn.SAGEConv(4, 3, aggr="max"),
    "GAT with loops": lambda: nn.GATConv(4, 3, heads=2),
    "GATv2": lambda: nn.GATv2Conv(4, 3, heads=2, add_self_loops=False),
    "Transformer": lambda: nn.TransformerConv(4, 3, heads=2),
    "GIN": lambda: nn.GINConv(torch.nn.Linear(4, 3)),
    "ResGated": lambda: nn.ResGatedGraphConv(4, 3),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_layers_for_two_sides(name: str, ranks: int, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    arrays, layer = mixed(), LAYERS[name]().double()

    def on_two_sides(layer: Any, x: Tensor, edges: Any, columns: dict) -> Tensor:
        if not hasattr(edges, "graph"):
            return layer((x, x), edges)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return layer((torch.cat([x, sar.halo(edges, x)]), x), sar.local_edges(edges))

    x = rows_of(arrays.total_nodes, (4,), seed=1)
    want = whole(arrays, layer, on_two_sides, x, {})
    path = partitioned(arrays, ranks, "random")
    compare(want, sharded(path, ranks, layer, on_two_sides, x, {}), 1e-11)
