"""Torch functions of recomputed layers in less memory: torch's numbers, and nothing of others is
written into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import sar
from sar.ops.frugal import Frugal

SPECIAL = torch.tensor([-0.0, 0.0, 1.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("relu", [F.relu, torch.relu, Tensor.relu, nn.ReLU()])
def test_relu_of_special_numbers(dtype: torch.dtype, relu: Callable[[Tensor], Tensor]) -> None:
    found = []
    for mode in (Frugal(), torch.enable_grad()):
        x = SPECIAL.to(dtype).repeat(9).view(8, 9).requires_grad_()
        with mode:
            out = relu(x * 1)
        (out * torch.arange(1, 73).view(8, 9)).sum().backward()
        found.append((out, x.grad))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def test_relu_takes_the_place_of_a_temporary_alone() -> None:
    linear, x, held = nn.Linear(3, 3), torch.randn(5, 3), []

    def same(out: Tensor) -> bool:
        return out._version > 0

    with Frugal():
        alone = [same(F.relu(linear(x)))]
        named = linear(x)
        alone.append(same(F.relu(named)))
        listed = [linear(x)]
        alone.append(same(F.relu(listed[0])))
        alone.append(same(F.relu(linear(x).sin())))
        alone.append(same(F.relu(linear(x)[1:])))
        alone.append(same(nn.ReLU()(linear(x))))
        handle = linear.register_forward_hook(lambda part, args, out: held.append(out))
        alone.append(same(F.relu(linear(x))))
        handle.remove()
    assert alone == [True] + [False] * 6
    assert all(torch.equal(out, linear(x)) for out in [named, *listed, *held])


IN_PLACE: list[Callable[[Tensor], Tensor]] = [
    lambda x: F.relu(x, inplace=True),
    nn.ReLU(inplace=True),
    torch.relu_,
    Tensor.relu_,
    lambda x: F.relu(x, True),
    lambda x: F.relu(x[:2], inplace=True),
    lambda x: F.relu_(x.t()),
]


@pytest.mark.parametrize("make", [lambda x: x * 1, lambda x: (x * 1).t() * 1], ids=["", "strides"])
@pytest.mark.parametrize("relu", IN_PLACE)
def test_relu_in_place(relu: Callable[[Tensor], Tensor], make: Callable[[Tensor], Tensor]) -> None:
    """Torch's numbers, written where the caller says, whoever else has that memory."""
    found = []
    for mode in (Frugal(), torch.enable_grad()):
        x = SPECIAL[:6].repeat(4).view(6, 4).roll(1, 0).contiguous().requires_grad_()
        with mode:
            h = make(x)
            place, out = h.data_ptr(), relu(h)
            assert out.data_ptr() == place
        factor = torch.arange(1, 1 + h.numel()).view(h.shape)
        (h * factor).sum().backward()
        found.append((h.detach(), x.grad))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_relu_in_place_saves_no_rows() -> None:
    x, nodes = torch.randn(5, 3, requires_grad=True), []
    with Frugal():
        for relu in IN_PLACE[:4]:
            nodes.append(type(relu(x * 1).grad_fn).__name__)
        leaf = torch.randn(5, 3, requires_grad=True)
        with pytest.raises(RuntimeError, match="leaf"):
            F.relu(leaf, inplace=True)
        saved = (x * 1).sigmoid()
        F.relu(saved, inplace=True)
    assert nodes == ["_ReluBackward"] * 4
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_the_gradient_of_relu_lies_where_the_one_that_came_did() -> None:
    x, places = torch.randn(6, 4, requires_grad=True), []
    with Frugal():
        h = x * 1
        out = F.relu(h)
    for tensor in (out, h):
        tensor.register_hook(lambda grad: places.append(grad.data_ptr()))
    (out * 2).sum().backward()
    assert places[0] == places[1]


def test_a_gradient_that_others_have_is_not_written_into() -> None:
    """A user's own, one that a hook keeps, one that flows to two places."""
    x, given, kept = torch.randn(6, 4, requires_grad=True), torch.ones(6, 4), []
    with Frugal():
        F.relu(x * 1).backward(given)
        assert torch.equal(given, torch.ones(6, 4))
        out = F.relu(x * 1)
        out.register_hook(kept.append)
        (out * 2).sum().backward()
        assert torch.equal(kept[0], torch.full((6, 4), 2.0))
        x.grad = None
        (F.relu(x * 1) + F.relu(x * -1) + x).mul(3).sum().backward()
        assert torch.equal(x.grad, 3 * x.sign() + 3)
        out = F.relu(x * 1)
        dout, dx = torch.autograd.grad((out * 2).sum(), [out, x])
    assert torch.equal(dout, torch.full((6, 4), 2.0)) and torch.equal(dx, 2.0 * (x > 0))


class Arrays(Function):
    """Hands out memory of numpy's, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrays: list[np.ndarray]) -> Tensor:
        ctx.arrays = arrays
        return torch.from_numpy(arrays[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return torch.from_numpy(ctx.arrays[1]), None


def test_memory_of_others_is_not_written_into() -> None:
    arrays = [np.full((5, 8), number, dtype=np.float32) for number in (3, -1)]
    x = torch.ones(5, 8, requires_grad=True)
    with Frugal():
        Arrays.apply(F.relu(x - 2), arrays).sum().backward()
    assert (arrays[0] == 3).all() and (arrays[1] == -1).all()


def test_second_gradients_of_relu() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    x, found = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), []
    for setting in ("keep", "recompute"):
        sar.set_activations([net], setting)
        out = net(x).square().sum()
        (dx,) = torch.autograd.grad(out, x, create_graph=True)
        found.append(torch.autograd.grad(out + dx.square().sum(), list(net.parameters())))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
