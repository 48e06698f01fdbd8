"""Random numbers that are a function of a seed and a row's key, not of the order of evaluation."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd import Function

from sar.kernels.keyed import drop
from sar.kernels.registry import has
from sar.kernels.uniform import keyed_uniform


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
        if probability >= 1 or not has("drop", x.device, x.dtype):
            return reference_dropout(x, keys, seed, probability)
        rows = x.detach().contiguous().view(len(x), math.prod(x.shape[1:]))
        return drop(rows, keys, seed, probability, _scale(probability)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (keys,) = ctx.saved_tensors
        return keyed_dropout(grads[0], keys, ctx.seed, ctx.probability), None, None, None
