"""Tensors as arrays: the same memory, which torch goes on to call its own."""

from __future__ import annotations

import gc

import numpy as np
import torch

from sar.kernels.jit import array

SOME = torch.arange(24.0).view(4, 6)
KINDS = (torch.float64, torch.uint8, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64)


def test_an_array_is_the_tensors_memory() -> None:
    views = [SOME.clone(), SOME.clone()[:, 1::2], SOME.clone().t(), SOME.clone()[1:3]]
    others = [torch.tensor(3.0), torch.empty(0, 5), torch.ones(3, requires_grad=True)]
    for tensor in (*views, *others, *(torch.ones(3, dtype=kind) for kind in KINDS)):
        made, want = array(tensor), tensor.detach().numpy()
        assert (made.dtype, made.shape, made.strides) == (want.dtype, want.shape, want.strides)
        assert np.array_equal(made, want)
        made[...] = 7
        assert bool((tensor == 7).all() if tensor.dtype != torch.bool else tensor.all())


def test_the_memory_lives_as_long_as_the_array() -> None:
    made = array(torch.full((1000,), 5.0))
    gc.collect()
    others = [torch.zeros(1000) for _ in range(20)]
    assert (made == 5).all() and len(others) == 20
