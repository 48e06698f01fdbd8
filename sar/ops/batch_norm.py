"""Batch normalization over the rows of all ranks, which moves a few numbers per feature."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.kernels.norm import (
    Moments,
    Norm,
    gradient_sums,
    input_gradient,
    merge,
    moments,
    normalize,
)
from sar.ops.saving import compute_once, first_order, valued


def normalize_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    group: Group,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Batch normalization of ``x`` with the mean and variance of all ranks' rows; collective.

    Args:
        x: [n, F], n may be 0. float; 16-bit types are computed in float32.
        weight, bias: [F] or ``None``. Their gradients are this rank's share.
        relu: set what is negative to 0 in the same pass; nothing more is saved for it.

    Returns:
        ``(y, mean, m2, count)``: [n, F] of ``x``'s type; float64 [F] mean and sum of squared
        deviations over the rows of all ranks; the number of these rows.

    Raises ``ValueError`` on every rank when all ranks together have fewer than two rows.
    Source: Ioffe and Szegedy, arXiv 1502.03167; Chan, Golub and LeVeque 1979 for the merge.
    """
    mean, m2, count = compute_once(lambda: merged_moments(x.detach(), group))
    if count < 2:
        raise ValueError(f"batch norm: got {count} row(s) on all ranks, expected at least 2")
    rstd = (m2 / count + eps).rsqrt()
    saved = _Normalize.apply(x, weight, bias, mean, rstd, count, group, relu)
    y = valued(saved, lambda: normalize(x.detach(), _norm(mean, rstd, weight, bias, relu)))
    return y, mean, m2, count


class _Normalize(torch.autograd.Function):
    """Ledger (n rows on this rank, N on all, F features):

    =============  =======  ===========  =====================================================
    tensor         shape    owner        kept for backward
    =============  =======  ===========  =====================================================
    x              [n, F]   this rank    yes; the caller's own activation, not a copy
    y, dy, dx      [n, F]   this rank    no
    mean, rstd     [F]      every rank   yes, float64
    weight, bias   [F]      every rank   yes; dweight, dbias are this rank's share
    s0, s1         [F]      every rank   no, float64, made in backward
    =============  =======  ===========  =====================================================

    with z = (x - mean) * rstd
    forward:   y = z * weight + bias, max(y, 0) with relu           nothing is sent; returned is x,
               y is computed when all is saved, see Note [Saved first]
    backward:  dbias = sum_i dy_i,  dweight = sum_i dy_i * z_i      over this rank's rows
               s0, s1 = dbias, dweight summed over ranks            one all_reduce of 2F float64
               dx = (dy - s0 / N - z * s1 / N) * rstd * weight
    with relu, dy is 0 where y, computed again block by block, is not positive
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        count: int,
        group: Group,
        relu: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.count, ctx.group, ctx.relu = count, group, relu
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        norm = _norm(mean, rstd, weight, bias, ctx.relu)
        sums = gradient_sums(x, dy, norm)
        sums[1] *= rstd
        local = sums.to(dy.dtype if weight is None else weight.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            shares = ctx.group.all_reduce(sums.clone()) / ctx.count  # `local` may alias sums
            dx = x.new_empty(x.shape)
            input_gradient(x, dy, norm, shares[1] * rstd, shares[0], dx)
        dweight = local[1] if ctx.needs_input_grad[1] else None
        dbias = local[0] if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None, None, None


def _norm(
    mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Norm:
    scale = rstd if weight is None else rstd * weight.detach().double()
    shift = torch.zeros_like(mean) if bias is None else bias.detach().double()
    return Norm(mean, scale, shift, relu)


def merged_moments(x: Tensor, group: Group) -> Moments:
    """Mean, sum of squared deviations (float64 [F]) and number of the rows of all ranks. One
    all_gather of 2F + 1 numbers; merged in rank order, so every rank gets the same bits."""
    mean, m2, count = moments(x)
    packed = torch.cat([mean, m2, mean.new_tensor([float(count)])])
    width = x.shape[1]
    merged = mean.new_zeros(width), mean.new_zeros(width), 0
    for part in group.all_gather(packed):
        merged = merge(merged, (part[:width], part[width:-1], int(part[-1])))
    return merged
