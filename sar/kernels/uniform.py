"""Random numbers that are a function of a seed and a row's key, in torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.splitmix import MIX_1, MIX_2, STEP

# As signed 64-bit integers.
_STEP, _MIX_1, _MIX_2 = (one - 2**64 for one in (STEP, MIX_1, MIX_2))
_MANTISSA = 53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def keyed_uniform(keys: Tensor, width: int, seed: int) -> Tensor:
    """float64 [n, width] in [0, 1), a function of seed, key and column only.

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
