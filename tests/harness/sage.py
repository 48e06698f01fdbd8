"""GraphSAGE's layer of means on some ranks, against DGL on the whole graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dgl.nn
import torch
from torch import Tensor, nn

import sar
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, assert_share, results, whole
from sar.comm import Group

WIDTH = 4
SIZE = 3


def sage(width: int = WIDTH, before: int = WIDTH, kind: str = "mean", **options: Any) -> nn.Module:
    return dgl.nn.SAGEConv(before, width, kind, **options)


def fused_ones(model: nn.Module, **options: bool) -> nn.Module:
    """It raises where a layer is not fused."""
    return sar.optimize(model, strict=True, **options)


def compare(
    layer: nn.Module,
    partitioned: Cutter,
    size: int = SIZE,
    run: Callable[..., Any] = run_threads,
    method: str = "random",
    on_rank: Callable[[int, nn.Module], Any] = lambda rank, layer: None,
    width: int = WIDTH,
    **policy: Any,
) -> None:
    """``layer`` on some ranks is DGL's on the whole graph, with and without gradients."""
    arrays, layer = mixed(), layer.double()
    rows = whole(arrays.total_nodes, (width,), seed=1)
    with torch.no_grad():
        like = layer(to_dgl(arrays), rows)
    factor = whole(arrays.total_nodes, tuple(like.shape[1:]), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(layer), rows, factor)
    path = partitioned(arrays, size, method)

    def case(group: Group) -> None:
        part, mine = Part(group, path, sar.Policy(**policy)), copy.deepcopy(layer)
        on_rank(group.rank, mine)
        for _ in range(2):
            mine.zero_grad()
            got = results(part.graph, mine, rows[part.nodes], factor[part.nodes])
            assert_share(group, got, want, part.nodes)
            with torch.no_grad():
                again = mine(part.graph, rows[part.nodes])
            torch.testing.assert_close(again, want["out"][part.nodes], rtol=1e-11, atol=1e-11)

    run(size, case)


class Then(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        super().__init__()
        self.steps = steps
        self.parts = nn.ModuleList(step for step in steps if isinstance(step, nn.Module))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(graph, x) if type(step).__name__.endswith("Conv") else step(x)
        return x

    def __deepcopy__(self, memo: dict) -> Then:
        return type(self)(*(copy.deepcopy(step, memo) for step in self.steps))
