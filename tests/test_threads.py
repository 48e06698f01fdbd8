"""Many numbers, and several threads of compiled loops: those of DGL and of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness import assert_close, run_threads
from harness.graphs import homogeneous, to_dgl
from harness.parts import Cutter
from harness.rows import Part, results, whole
from torch import Tensor, nn
from torch.nn import functional as F

import sar

NODES, WIDTH = 70, 6
ZERO = {"allow_zero_in_degree": True}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sums": lambda: dgl.nn.GraphConv(WIDTH, 5, **ZERO),
    "means": lambda: dgl.nn.SAGEConv(WIDTH, 5, "mean", activation=F.relu),
    "maxima": lambda: dgl.nn.SAGEConv(WIDTH, 5, "pool"),
    "gat": lambda: dgl.nn.GATConv(WIDTH, 5, 3, **ZERO),
    "gatv2": lambda: dgl.nn.GATv2Conv(WIDTH, 5, 3, **ZERO),
    "dot": lambda: dgl.nn.DotGatConv(WIDTH, 5, 3, **ZERO),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_on_many_edges(
    kind: str, dtype: torch.dtype, threads: int, partitioned: Cutter
) -> None:
    """Nodes with many edges and with none."""
    ends = torch.randint(NODES - 5, (2, 20_000), generator=torch.Generator().manual_seed(0))
    arrays = homogeneous("many", NODES, *ends)
    torch.manual_seed(0)
    twin, layer, path = to_dgl(arrays), LAYERS[kind]().to(dtype), partitioned(arrays, 2)
    rows, exact = whole(NODES, (WIDTH,), 1).to(dtype), copy.deepcopy(layer).double()
    factor = whole(NODES, tuple(layer(twin, rows).shape[1:]), 2).to(dtype)
    want = results(twin, exact, rows.double(), factor.double())

    def case(group: Any) -> None:
        torch.set_num_threads(threads)
        part, mine = Part(group, path), copy.deepcopy(layer)
        for name, got in results(part.graph, mine, rows[part.nodes], factor[part.nodes]).items():
            own = name in ("out", "x")
            got = got if own else group.all_reduce(got.clone())
            expected = want[name][part.nodes] if own else want[name]
            assert_close(got, expected, name, dtype, at_least=2e-5 * (dtype == torch.float32))

    run_threads(2, case)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "columns": lambda x: torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]],
    "turned": lambda x: x.t().contiguous().t(),
    "one row": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("of_gradients", LAYOUTS)
@pytest.mark.parametrize("layout", ["contiguous", "columns", "turned"])
def test_batch_norm_of_many_rows(layout: str, of_gradients: str, threads: int) -> None:
    rng = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 1500, 512, generator=rng)
    exact = nn.BatchNorm1d(512).double()
    wide = x.double().requires_grad_()
    dy = LAYOUTS[of_gradients](dy)
    exact(wide).backward(dy.double())

    def case(group: Any) -> None:
        torch.set_num_threads(threads)
        norm = sar.convert_batch_norm(nn.BatchNorm1d(512))
        mine = LAYOUTS[layout](x).detach().requires_grad_()
        out = norm(mine)
        out.backward(dy)
        for name, got, want in (
            ("rows", out, exact(wide)),
            ("gradient", mine.grad, wide.grad),
            ("weight", norm.weight.grad, exact.weight.grad),
            ("bias", norm.bias.grad, exact.bias.grad),
        ):
            assert_close(got, want, name, torch.float32, max(1.0, float(want.abs().max())))

    run_threads(1, case)
