"""Reductions over the rows of all ranks: a mean, and batch normalization.

Both move a few numbers per feature, never a row. Note [Blocks]: rows are read in blocks that fit
the cache, so accumulating in float64 needs no float64 copy of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.ops.first_order import first_order
from sar.ops.overwrite import may_overwrite
from sar.ops.reuse import is_made_here
from sar.ops.saving import once, valued

_BLOCK_ELEMENTS = 1 << 17


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for the 16-bit types, else the type itself: what arithmetic is done in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def mean_of_rows(values: Tensor, group: Group, error: Exception | None = None) -> Tensor:
    """The mean over all ranks' ``values``; collective.

    Args:
        values: any shape, also without elements; float. Equal dtypes on all ranks.
        error: this rank's reason to give up, raised on every rank.

    Returns:
        A scalar, equal on every rank, float32 for the 16-bit types, else of ``values``' type.

    Raises ``ValueError`` on every rank when no rank has an element.
    """
    return _GlobalMean.apply(values, group, error)


class _GlobalMean(torch.autograd.Function):
    """Ledger (n values on this rank, N on all):

    ========  =====  =============  ======================================
    tensor    shape  owner          kept for backward
    ========  =====  =============  ======================================
    values    [n]    this rank      no, only its shape and dtype
    mean      []     every rank     no
    1/N       []     every rank     a Python float
    ========  =====  =============  ======================================

    forward:   mean = (sum over ranks of sum_i values_i) / N        one all_reduce of 3 float64
    backward:  dvalues_i = dmean / N                                nothing is sent
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group, error: Exception | None) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64)
        if error is None:
            totals[0] = values.detach().sum(dtype=torch.float64)
            totals[1] = values.numel()
        totals[2] = error is not None
        total, count, failed = group.all_reduce(totals).tolist()
        if failed:
            group.agree(error)
        if not count:
            raise ValueError("global_mean: no rank has a value to average; is the mask empty?")
        ctx.shape, ctx.dtype, ctx.scale = values.shape, values.dtype, 1.0 / count
        return torch.tensor(total / count, dtype=wide_dtype(values.dtype), device=values.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad * ctx.scale).to(ctx.dtype).expand(ctx.shape), None, None


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
    mean, m2, count = once(lambda: merged_moments(x.detach(), group))
    if count < 2:
        raise ValueError(f"batch norm: got {count} row(s) on all ranks, expected at least 2")
    rstd = (m2 / count + eps).rsqrt()
    saved = _Normalize.apply(x, weight, bias, mean, rstd, count, group, relu)
    y = valued(saved, lambda: _normalized_rows(x.detach(), mean, rstd, weight, bias, relu))
    return y, mean, m2, count


class _Normalize(torch.autograd.Function):
    """Ledger (n rows on this rank, N on all, F features):

    =============  =======  ===========  =====================================================
    tensor         shape    owner        kept for backward
    =============  =======  ===========  =====================================================
    x              [n, F]   this rank    yes; the caller's own activation, not a copy
    y, dy, dx      [n, F]   this rank    no; dx is where x was, by Note [Overwritten]
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
        ctx.may_overwrite = is_made_here(x)
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        out = x if ctx.may_overwrite and may_overwrite(x, dy) else None

        def incoming(rows: slice) -> Tensor:
            if not ctx.relu:
                return dy[rows]
            y = _normalized(x[rows], mean, rstd, weight, bias).to(x.dtype)
            return dy[rows].masked_fill(y <= 0, 0)

        sums = _gradient_sums(incoming, x, mean, rstd)
        local = sums.to(dy.dtype if weight is None else weight.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            shares = ctx.group.all_reduce(sums.clone()) / ctx.count  # `local` may alias sums
            dx = _input_gradient(incoming, x, mean, rstd, weight, shares, out).detach()
        dweight = local[1] if ctx.needs_input_grad[1] else None
        dbias = local[0] if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None, None, None


def _normalized_rows(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    relu: bool,
) -> Tensor:
    """[n, F] y, of the type of ``x``."""
    y = torch.empty_like(x)
    for rows in _blocks(x):
        block = _normalized(x[rows], mean, rstd, weight, bias)
        y[rows] = block.relu_() if relu else block
    return y


def _normalized(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """A block of y before any relu, in the wide dtype."""
    scale = rstd if weight is None else rstd * weight.double()
    block = _centered(x, mean) * scale.to(wide_dtype(x.dtype))
    return block if bias is None else block + bias.to(block.dtype)


def _gradient_sums(
    incoming: Callable[[slice], Tensor], x: Tensor, mean: Tensor, rstd: Tensor
) -> Tensor:
    """float64 [2, F]: sums of dy and of dy times normalized x over this rank's rows."""
    sums = torch.zeros(2, x.shape[1], dtype=torch.float64, device=x.device)
    for rows in _blocks(x):
        block = incoming(rows).double()
        sums[0] += block.sum(0)
        sums[1] += (block * (x[rows].double() - mean)).sum(0)
    sums[1] *= rstd
    return sums


def _input_gradient(
    incoming: Callable[[slice], Tensor],
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    shares: Tensor,
    out: Tensor | None,
) -> Tensor:
    """[n, F] gradient of x, in ``out``; ``shares`` are the sums over all ranks divided by the row
    count."""
    wide = wide_dtype(x.dtype)
    scale = (rstd if weight is None else rstd * weight.double()).to(wide)
    slope, offset = (shares[1] * rstd).to(wide), shares[0].to(wide)
    dx = torch.empty_like(x) if out is None else out
    for rows in _blocks(x):
        z_part = _centered(x[rows], mean) * slope
        dx[rows] = (incoming(rows).to(wide) - offset - z_part) * scale
    return dx


def _centered(x: Tensor, mean: Tensor) -> Tensor:
    """``x - mean`` in float32 or wider, exact also where the mean dwarfs the deviation.

    The float64 mean is split in the part that float32 holds and the rest: the first subtraction
    is then (nearly) exact and the second restores what rounding the mean would have lost.
    """
    wide = wide_dtype(x.dtype)
    high = mean.to(wide)
    return (x.to(wide) - high) - (mean - high.double()).to(wide)


def merged_moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor, int]:
    """Mean, sum of squared deviations (float64 [F]) and number of the rows of all ranks.

    One all_gather of 2F + 1 numbers; merged in rank order, so every rank gets the same bits.
    """
    mean, m2, count = _local_moments(x)
    packed = torch.cat([mean, m2, mean.new_tensor([float(count)])])
    width = x.shape[1]
    mean, m2, count = mean.new_zeros(width), mean.new_zeros(width), 0
    for part in group.all_gather(packed):
        mean, m2, count = _merge((mean, m2, count), (part[:width], part[width:-1], int(part[-1])))
    return mean, m2, count


def _local_moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    zeros = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
    moments = (zeros, zeros, 0)
    for rows in _blocks(x):
        block = x[rows].double()
        mean = block.mean(0)
        moments = _merge(moments, (mean, (block - mean).square_().sum(0), len(block)))
    return moments


def _merge(
    a: tuple[Tensor, Tensor, int], b: tuple[Tensor, Tensor, int]
) -> tuple[Tensor, Tensor, int]:
    """(mean, sum of squared deviations, count) of two sets of rows together."""
    if not a[2] or not b[2]:
        return a if a[2] else b
    count = a[2] + b[2]
    delta = b[0] - a[0]
    mean = a[0] + delta * (b[2] / count)
    m2 = a[1] + b[1] + delta.square() * (a[2] * b[2] / count)
    return mean, m2, count


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of rows of [n, F]; see Note [Blocks]."""
    step = max(1, _BLOCK_ELEMENTS // max(1, x.shape[1]))
    for start in range(0, len(x), step):
        yield slice(start, start + step)
