"""float32 gradients of attention whose scores are large: digits that they lose must not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.compare import TOLERANCE, relative_error
from harness.graphs import looped, to_dgl
from harness.parts import Cutter, joined
from torch import Tensor, nn

import sar

HEADS, WIDTH = 3, 16
AS_GOOD = 3  # times the distance of DGL's float32 from exact numbers: both are rounding


def gat(factor: float) -> nn.Module:
    conv = dgl.nn.GATConv(6, WIDTH, HEADS)
    conv.attn_l.data *= factor
    conv.attn_r.data *= factor
    return conv


def gatv2(factor: float) -> nn.Module:
    conv = dgl.nn.GATv2Conv(6, WIDTH, HEADS)
    conv.attn.data *= factor
    return conv


def dot(factor: float) -> nn.Module:
    """Keys and queries are the same rows."""
    conv = dgl.nn.DotGatConv(6, WIDTH, HEADS)
    conv.fc.weight.data *= factor**0.5
    return conv


LAYERS: dict[str, Callable[[float], nn.Module]] = {"gat": gat, "gatv2": gatv2, "dot": dot}


def trained(conv: nn.Module, graph: Any, x: Tensor, dout: Tensor) -> list[Tensor]:
    """Output, gradient of the rows, gradients of the parameters on this rank."""
    x = x.clone().requires_grad_()
    out = conv(graph, x)
    (out * dout).sum().backward()
    return [out.detach(), x.grad, *[p.grad for p in conv.parameters() if p.grad is not None]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("factor", [30.0, 100.0])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_as_good_as_dgls(
    name: str, factor: float, size: int, partitioned: Cutter
) -> None:
    """Equal to DGL's float32; where that is far from float64 itself, no farther than it is."""
    path, whole = partitioned(looped(), size, "random"), to_dgl(looped())
    x, total = whole.ndata["feat"], whole.num_nodes()
    dout = torch.randn(total, HEADS, WIDTH, generator=torch.Generator().manual_seed(3))

    def model(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(5)
        return LAYERS[name](factor).to(dtype)

    exact = trained(model(torch.float64), whole, x.double(), dout.double())
    theirs = trained(model(torch.float32), whole, x, dout)
    convs = [model(torch.float32) for _ in range(size)]

    def case(group: Any) -> tuple[Tensor, list[Tensor]]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        ids = next(rows for key, rows in data.node_features.items() if "orig" in key)
        graph = sar.construct_full_graph(data)
        return ids, trained(convs[group.rank], graph, x[ids], dout[ids])

    ranks = run_threads(size, case)
    ids = [rank[0] for rank in ranks]
    for index, (single, want) in enumerate(zip(theirs, exact, strict=True)):
        parts = [rank[1][index] for rank in ranks]
        got = joined(parts, ids, total) if index < 2 else torch.stack(parts).sum(0)
        allowed = max(TOLERANCE[torch.float32], AS_GOOD * relative_error(single, want))
        assert relative_error(got, single) <= TOLERANCE[torch.float32] or (
            relative_error(got, want) <= allowed
        ), f"tensor {index}"
