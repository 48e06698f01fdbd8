"""Scores of rows without the product that they are sums of: DGL's numbers, who ever reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor, nn
from torch.autograd import gradcheck

import sar
from sar.ops import head_sums, linear_sum
from sar.ops.arriving import note_linear
from sar.ops.head_sums import HeadSums, Product, can_wait, is_sum_of_last
from sar.ops.linear_sum import LinearSums

ROWS, HEADS, WIDTH = 7, 3, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of these tests counts as DGL's."""
    monkeypatch.setattr(linear_sum, "_by_code_of_dgl", lambda frame: True)


@pytest.mark.parametrize("shape", [(1, HEADS, WIDTH), (HEADS, WIDTH)], ids=str)
@pytest.mark.parametrize("size", [0, 1, ROWS])
def test_gradients(size: int, shape: tuple[int, ...]) -> None:
    rows = drawn(size, HEADS, WIDTH).requires_grad_()
    vector = nn.Parameter(drawn(*shape, seed=1))
    assert gradcheck(HeadSums.apply, (rows, vector))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("features", [HEADS * WIDTH, HEADS * WIDTH + 1])
def test_rows_of_a_linear_layer_are_computed_again(features: int, with_bias: bool) -> None:
    """Unless what the layer read is wider; with its weights as they were."""
    x, weight = drawn(ROWS, features), nn.Parameter(drawn(HEADS * WIDTH, features, seed=1))
    bias = nn.Parameter(drawn(HEADS * WIDTH, seed=2)) if with_bias else None
    vector = nn.Parameter(drawn(1, HEADS, WIDTH, seed=3))
    rows = F.linear(x, weight, bias)
    note_linear(rows, x, weight, bias)
    sums: Any = HeadSums.apply(rows.view(ROWS, HEADS, WIDTH), vector)
    assert (sums.grad_fn.weights is None) is (features > HEADS * WIDTH)
    leaves = [p for p in (weight, bias, vector) if p is not None]
    plain = (F.linear(x, weight, bias).view(ROWS, HEADS, WIDTH) * vector).sum(-1)
    want = torch.autograd.grad(plain.sin().sum(), leaves)
    loss = sums.sin().sum()
    with torch.no_grad():
        weight.add_(1)
        if bias is not None:
            bias.mul_(2)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), want, rtol=1e-12, atol=1e-12)


USES: dict[str, tuple[Callable[[Tensor, Tensor], Any], bool]] = {
    "sum": (lambda rows, a: (rows * a).sum(-1), True),
    "sum of an axis by its name": (lambda rows, a: (rows * a).sum(dim=2), True),
    "kept axis": (lambda rows, a: (rows * a).sum(-1, keepdim=True), False),
    "another axis": (lambda rows, a: (rows * a).sum(1), False),
    "all": (lambda rows, a: (rows * a).sum(), False),
    "another dtype": (lambda rows, a: (rows * a).sum(dim=-1, dtype=torch.float32), False),
    "product": (lambda rows, a: rows * a, False),
    "more of it": (lambda rows, a: (rows * a).exp().sum(-1), False),
    "written into": (lambda rows, a: (rows * a).add_(1).sum(-1), False),
}


def both_uses(rows: Tensor, a: Tensor) -> Tensor:
    product = rows * a
    return product.sum(-1) + (product * product).sum(-1)


@pytest.mark.parametrize("name", [*USES, "both"])
def test_products_are_there_for_whoever_reads_them(name: str, anywhere: None) -> None:
    use, fused = USES.get(name, (both_uses, True))
    leaves = []
    for mode in (None, LinearSums()):
        x = drawn(ROWS, HEADS, WIDTH).requires_grad_()
        vector = nn.Parameter(drawn(1, HEADS, WIDTH, seed=1))
        rows = x.sin()
        if mode is None:
            out = use(rows, vector)
        else:
            with mode:
                out = use(rows, vector)
        node: Any = out.grad_fn
        if mode is not None and name != "both":
            assert (type(node).__name__ == "HeadSumsBackward") is fused
        out.double().square().sum().backward()
        leaves.append([out.detach(), x.grad, vector.grad])
    torch.testing.assert_close(leaves[1], leaves[0], rtol=1e-12, atol=1e-12)


def test_who_else_multiplies_gets_products() -> None:
    """Code outside of DGL's layers, and operands of other kinds."""
    rows, vector = drawn(ROWS, HEADS, WIDTH), nn.Parameter(drawn(1, HEADS, WIDTH))
    with LinearSums() as mode:
        (rows * vector).sum(-1)
        assert not mode._late
    assert can_wait(rows, vector)
    for other in (drawn(1, HEADS, WIDTH), nn.Parameter(drawn(1, 1, WIDTH)), 2.0):
        assert not can_wait(rows, other)
    assert not can_wait(rows[0], vector) and not can_wait(rows.half(), vector)
    assert not can_wait(rows.transpose(1, 2), nn.Parameter(drawn(1, WIDTH, HEADS)))
    assert not is_sum_of_last((rows,), {"dim": -1, "keepdim": True})
    with torch.autocast("cpu"):
        assert not can_wait(rows, vector)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_layer_of_dgl_makes_no_product(
    mode: Callable[[], Any], partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[Product] = []
    summed: list[Product] = []
    monkeypatch.setattr(Product, "compute", lambda self: computed.append(self))
    sums = Product.sums
    monkeypatch.setattr(Product, "sums", lambda self: summed.append(self) or sums(self))
    layer = dgl.nn.GATConv(6, 4, 2, allow_zero_in_degree=True)
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        with mode():
            layer(sar.construct_full_graph(data), data.node_features["_N/feat"].float())

    run_threads(2, case)
    assert len(summed) == 4 and not computed


def test_gradients_that_attention_passes_on_are_not_computed_again(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_sums, "add_projected_grads", None)  # what would compute them
    data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
    layer = dgl.nn.GATConv(6, 4, 2, allow_zero_in_degree=True)
    out = layer(sar.construct_full_graph(data), data.node_features["_N/feat"].float())
    out.sum().backward()
    assert layer.attn_l.grad is not None and layer.attn_r.grad is not None
