"""Statistics over the rows of all ranks, under the original's names."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.comm import current_group
from sar.errors import NotSupportedError
from sar.ops.batch_norm import merged_moments


def mean_op(x: Tensor) -> Tensor:
    """[F] column means of ``x`` ([N, F] per rank, float) over the rows of all ranks; collective.

    For features, not activations: raises ``NotSupportedError`` when ``x`` asks for a gradient.
    """
    mean, _, _ = _moments("mean_op", x)
    return mean.to(x.dtype)


def var_op(x: Tensor) -> Tensor:
    """[F] column means of ``x * x`` over the rows of all ranks, which is not the variance.

    As :func:`mean_op` otherwise; ``var_op(x) - mean_op(x) ** 2`` is the variance.
    """
    mean, m2, count = _moments("var_op", x)
    return (m2 / max(1, count) + mean.square()).to(x.dtype)


def _moments(name: str, x: Tensor) -> tuple[Tensor, Tensor, int]:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotSupportedError(
            f"{name}: x asks for a gradient; normalize activations with sar.DistributedBN1D"
        )
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected [N, F]")
    return merged_moments(x.detach(), current_group())


class MeanOp:
    """``MeanOp.apply`` is :func:`mean_op`."""

    apply = staticmethod(mean_op)


class VarOp:
    """``VarOp.apply`` is :func:`var_op`."""

    apply = staticmethod(var_op)
