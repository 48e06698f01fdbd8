"""Layers on blocks of the rows that are wanted, against DGL on the whole graph."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, results, whole
from sar.comm import Group
from sar.graph.layer_blocks import plan_blocks


class Layers(nn.Module):
    """Graph layers with a graph each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, graphs: list[Any], x: Tensor) -> Tensor:
        for graph, layer in zip(graphs, self.layers, strict=True):
            x = layer(graph, x)
        return x


def compare_blocks(
    layers: list[nn.Module], width: int, every: int, size: int, partitioned: Cutter
) -> None:
    """Rows of one node in ``every``, and gradients, are those that the whole graph gives.

    Args:
        layers: two, of which the first takes rows of ``width``.
    """
    model, arrays = Layers(layers).double(), mixed()
    path, total = partitioned(arrays, size, "random"), arrays.total_nodes
    wanted = (torch.arange(total) % every == 3).double()
    rows, graphs = whole(total, (width,), seed=1), [to_dgl(arrays)] * len(layers)
    with torch.no_grad():
        like = model(graphs, rows)
    factor = whole(total, tuple(like.shape[1:]), seed=2) * wanted[:, None]
    want = results(graphs, copy.deepcopy(model), rows, factor)

    def case(group: Group) -> None:
        part, mine = Part(group, path), copy.deepcopy(model)
        seeds = wanted[part.nodes].nonzero().view(-1)
        blocks = plan_blocks(part.graph, seeds, len(layers)).build()
        read, computed = part.nodes[blocks[0]._store.src_rows["_N"]], part.nodes[seeds]
        got = results(blocks, mine, rows[read], factor[computed])
        torch.testing.assert_close(got.pop("out"), want["out"][computed])
        torch.testing.assert_close(got.pop("x"), want["x"][read])
        for name, share in got.items():
            torch.testing.assert_close(group.all_reduce(share.clone()), want[name])

    run_threads(size, case)
