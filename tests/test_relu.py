"""Relu in place and its gradient: torch's numbers at any length, with any number of threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sar.kernels import nonzero

NUMBERS = [0.0, -0.0, 1.5, -2.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45]
BLOCK = nonzero._BLOCK


def check(x: Tensor) -> None:
    dy = torch.linspace(1, 2, x.numel(), dtype=x.dtype).view_as(x)
    y, dx = x.clone(), dy.clone()
    nonzero.mask(dx, nonzero.rectify(y))
    same: dict[str, Any] = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(y, x.relu(), **same)
    want = torch.ops.aten.threshold_backward(dy, x, 0)
    torch.testing.assert_close(dx, want, **same)


@given(st.lists(st.sampled_from(NUMBERS), max_size=80), st.sampled_from(nonzero.DTYPES))
@settings(max_examples=100, deadline=None)
def test_every_kind_of_number(numbers: list[float], dtype: torch.dtype) -> None:
    check(torch.tensor(numbers, dtype=dtype))


@pytest.mark.parametrize("dtype", nonzero.DTYPES)
@pytest.mark.parametrize("rest", [-1, 0, 1, 9])
@pytest.mark.parametrize("blocks", [1, 2, 70])
def test_every_length(blocks: int, rest: int, dtype: torch.dtype, threads: int) -> None:
    check(torch.randn(blocks * BLOCK + rest, dtype=dtype))


def test_a_bit_a_number() -> None:
    assert nonzero.rectify(torch.randn(7, 100)).numel() == 88
