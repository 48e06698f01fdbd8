"""Random numbers that are a function of a seed and a row's key, not of the order of evaluation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_MANTISSA = 53
_COMPILED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        keys: int [n], what names each row (:class:`sar.partition.keys.Keys`).
        seed: well mixed, as :class:`sar.comm.SeedStream` draws them: seeds that differ by a
            multiple of a constant would give the same numbers to other keys.
    """
    signed = (seed + 2**63) % 2**64 - 2**63
    row = _mix(keys.long() * _STEP + signed)
    column = torch.arange(1, width + 1, device=keys.device, dtype=torch.int64) * _STEP
    bits = _mix(row.unsqueeze(1) + column)
    return _shift(bits, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def keyed_dropout(x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
    """``x`` [n, ...] with elements zeroed with ``probability``, the rest scaled by its inverse.

    Row i, column c (counted over all dimensions but the first) is kept where
    ``keyed_uniform(keys, width, seed)[i, c] >= probability``.
    """
    return _KeyedDropout.apply(x, keys, seed, probability)


def reference_dropout(x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
    """What :func:`keyed_dropout` computes, by :func:`keyed_uniform`."""
    width = math.prod(x.shape[1:])
    keep = keyed_uniform(keys, width, seed).view(x.shape) >= probability
    return x * (keep.to(x.dtype) * _scale(probability))


def _scale(probability: float) -> float:
    return 0.0 if probability >= 1 else 1 / (1 - probability)


class _KeyedDropout(Function):
    """y_ic = x_ic m_ic / (1 - p), m_ic = [u(key_i, c) >= p]; backward the same of dy.

    ======  ===================  =========================================================
    tensor  shape                owner and lifetime
    ======  ===================  =========================================================
    x, y    [n, ...]             this rank; not saved
    keys    [n] integer          this rank; saved (an input): the mask is computed again
    m       [n, ...]             this rank; exists for one element at a time (compiled)
    ======  ===================  =========================================================
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.seed, ctx.probability = seed, probability
        if x.device.type != "cpu" or x.dtype not in _COMPILED or probability >= 1:
            return reference_dropout(x, keys, seed, probability)
        from sar.kernels.keyed import drop  # importing numba takes a while

        rows = x.detach().contiguous().view(len(x), math.prod(x.shape[1:]))
        return drop(rows, keys, seed, probability, _scale(probability)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (keys,) = ctx.saved_tensors
        return keyed_dropout(grads[0], keys, ctx.seed, ctx.probability), None, None, None
