"""Tensors as arrays: the same memory, which torch goes on to call its own."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from sar.kernels.jit import array

SOME = torch.arange(24.0).view(4, 6)
TENSORS = {
    "contiguous": SOME.clone(),
    "columns": SOME.clone()[:, 1::2],
    "turned": SOME.clone().t(),
    "part": SOME.clone()[1:3],
    "one number": torch.tensor(3.0),
    "no rows": torch.empty(0, 5),
    "asks for a gradient": torch.ones(3, requires_grad=True),
    **{str(kind): torch.ones(3, dtype=kind) for kind in (torch.float64, torch.uint8, torch.bool)},
    **{str(kind): torch.ones(3, dtype=kind) for kind in (torch.int8, torch.int16, torch.int32)},
    "int64": torch.arange(3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_an_array_is_the_tensors_memory(tensor: Tensor) -> None:
    made, want = array(tensor), tensor.detach().numpy()
    assert np.array_equal(made, want)
    assert (made.dtype, made.shape, made.strides) == (want.dtype, want.shape, want.strides)
    if made.size:
        made[...] = 7
        assert bool((tensor == 7).all() if tensor.dtype != torch.bool else tensor.all())


def test_the_memory_lives_as_long_as_the_array() -> None:
    made = array(torch.full((1000,), 5.0))
    gc.collect()
    others = [torch.zeros(1000) for _ in range(20)]
    assert (made == 5).all() and len(others) == 20
