"""Random numbers that are a function of a seed and a row's key, and dropout by them, compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar._private import njit
from sar.kernels.device import implements
from sar.kernels.jit import STEP, array, mix, rows_in_parallel
from sar.splitmix import MIX_1, MIX_2

_BLOCK = 1 << 15  # elements of a 16-bit tensor that are widened at a time
_MANTISSA = 53
_STEP, _MIX_1, _MIX_2 = (int(one) - 2**64 for one in (STEP, MIX_1, MIX_2))  # as signed integers


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def keyed_uniform(keys: Tensor, width: int, seed: int) -> Tensor:
    """Uniform numbers in [0, 1), float64 [n, width], a function of seed, key and column only.

    Args:
        keys: int [n], what names each row (:class:`sar.partition.features.Keys`).
        seed: well mixed, as :class:`sar.comm.SeedStream` draws them: seeds that differ by a
            multiple of a constant would give the same numbers to other keys.
    """
    signed = (seed + 2**63) % 2**64 - 2**63
    row = _mix(keys.long() * _STEP + signed)
    column = torch.arange(1, width + 1, device=keys.device, dtype=torch.int64) * _STEP
    bits = _mix(row.unsqueeze(1) + column)
    return _shift(bits, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


@njit(nogil=True, cache=True)
def _drop(out: Any, x: Any, keys: Any, seed: Any, limit: Any, scale: Any, zero: Any) -> None:
    """out[i, c] = x[i, c] times ``scale``, or ``zero`` where the 64 random bits are below limit."""
    for i in range(x.shape[0]):
        row = mix(np.uint64(keys[i]) * STEP + seed)
        for c in range(x.shape[1]):
            bits = mix(row + np.uint64(c + 1) * STEP)
            out[i, c] = x[i, c] * (zero if bits < limit else scale)


@implements("drop", "cpu", torch.float32, torch.float64, torch.bfloat16, torch.float16)
def drop(x: Tensor, keys: Tensor, seed: int, probability: float, scale: float) -> Tensor:
    """``x`` times ``scale``, or 0 where ``keyed_uniform(keys, width, seed) < probability``. ``x``
    is [n, width] on the CPU, contiguous, ``keys`` int32 or int64 [n], and probability < 1."""
    out = torch.empty_like(x)
    is_wide = x.dtype in (torch.float32, torch.float64)
    # u = (bits >> 11) / 2**53 < p is bits < ceil(2**53 p) << 11, without rounding
    limit = np.uint64(math.ceil(probability * 2.0**53) << 11)
    factors = torch.tensor([scale, 0.0], dtype=x.dtype)  # rounded as torch does
    rest = (np.uint64(seed % 2**64), limit, *(factors if is_wide else factors.float()).numpy())
    names = array(keys)

    def run(_: int, first: int, last: int) -> None:
        if is_wide:
            part = slice(first, last)
            _drop(array(out[part]), array(x[part]), names[part], *rest)
            return
        step = max(1, _BLOCK // max(1, x.shape[1]))
        for low in range(first, last, step):
            part = slice(low, min(low + step, last))
            wide = x[part].float()  # products of two 16-bit numbers are exact in float32
            _drop(array(wide), array(wide), names[part], *rest)
            out[part] = wide

    rows_in_parallel(run, len(x), x.numel())
    return out
