"""One row for all rows of all ranks: sums, means, extremes and the best k, with exact gradients.

Note [Replicated results]
The result is the same on every rank. Each rank goes on with its own copy, so its gradient there is
a share, as every gradient is until :func:`sar.nn.gather_grads` has summed it: the backward pass
adds the shares of all ranks and hands each row its gradient. The shares add up to the gradient
when the loss that is made of P equal copies counts 1/P on each rank, as :func:`sar.nn.global_mean`
weights it. Backward is collective.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.comm import Group
from sar.kernels import wide_dtype
from sar.ops.saving import first_order


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Sum [...] of the rows of ``x`` [n, ...] of all ranks; collective, in backward too."""
    return _SumOverRanks.apply(x, group)


def extreme_over_ranks(x: Tensor, group: Group, *, largest: bool) -> Tensor:
    """Largest or smallest value [...] of each column over all ranks; infinite without rows.

    ``x`` is floating point [n, ...]. The gradient goes to the first row, in the order of ranks,
    that holds the value. Collective, in backward too.
    """
    if largest:
        return _LargestOverRanks.apply(x, group)
    return -_LargestOverRanks.apply(-x, group)


def top_over_ranks(x: Tensor, keys: Tensor, k: int, group: Group) -> tuple[Tensor, Tensor]:
    """The rows with the ``k`` largest keys over all ranks, in descending order of their keys.

    Of ``x`` floating point [n, width] and ``keys`` [n]: [k, width], 0 where there are fewer rows,
    and int64 [k] positions, counted over the ranks one after another. Collective, in backward too.
    """
    keys = keys.detach().to(wide_dtype(keys.dtype))
    own_keys, rows = keys.sort(descending=True, stable=True)
    padded = keys.new_full((k,), -math.inf)
    padded[: len(rows)] = own_keys[:k]
    candidates = torch.cat(group.all_gather(padded))
    counts = torch.cat(group.all_gather(rows.new_tensor([len(rows)])))
    real = torch.arange(k, device=x.device) < counts.unsqueeze(1)  # others fill up
    order = torch.argsort(candidates, descending=True, stable=True)
    best = order[torch.argsort((~real.view(-1)[order]).long(), stable=True)][:k]
    slots = ((best // k == group.rank) & real.view(-1)[best]).nonzero().view(-1)
    mine = rows[best[slots] % k]
    picked = x.new_zeros(k, x.shape[1]).index_copy(0, slots, x[mine])
    first = counts[: group.rank].sum()
    position = rows.new_zeros(k).index_copy_(0, slots, mine + first)
    return sum_over_ranks(picked.unsqueeze(0), group), group.all_reduce(position)


class _SumOverRanks(Function):
    """out = sum over ranks and rows of x. See Note [Replicated results].

    ========  ===========  ============  ===============================
    tensor    shape        owner         kept for backward
    ========  ===========  ============  ===============================
    x         [n, ...]     this rank     no, only its shape and dtype
    out       [...]        every rank    no
    ========  ===========  ============  ===============================

    forward: one all_reduce of out in float64; backward: dx_i = sum over ranks of dout, one too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.shape, ctx.dtype, ctx.group = x.shape, x.dtype, group
        wide = torch.float64 if x.is_floating_point() else torch.int64
        return group.all_reduce(x.sum(0, dtype=wide)).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        total = ctx.group.all_reduce(dout.to(torch.float64, copy=True).contiguous())
        return total.to(ctx.dtype).expand(ctx.shape), None


class _LargestOverRanks(Function):
    """out = max over ranks and rows of x. See Note [Replicated results].

    ========  ===========  ============  ==================================================
    tensor    shape        owner         kept for backward
    ========  ===========  ============  ==================================================
    x         [n, ...]     this rank     no, only its shape
    row       [...] int64  this rank     yes: which own row is the largest, -1 for another's
    out       [...]        every rank    no
    ========  ===========  ============  ==================================================

    forward: one all_gather of the ranks' largest; backward: one all_reduce of dout, then
    dx_(row) = sum over ranks of dout.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if len(x):
            own, row = x.max(0)
        else:
            own = x.new_full(x.shape[1:], -math.inf)
            row = torch.zeros(x.shape[1:], dtype=torch.int64, device=x.device)
        wide = own.to(wide_dtype(own.dtype)).contiguous()
        out, winner = torch.stack(group.all_gather(wide)).max(0)
        ctx.save_for_backward(torch.where(winner == group.rank, row, -1) if len(x) else row - 1)
        ctx.shape, ctx.group = x.shape, group
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        total = ctx.group.all_reduce(dout.to(torch.float64, copy=True).contiguous()).to(dout.dtype)
        dx = total.new_zeros(ctx.shape)
        if len(dx):
            dx.scatter_(0, row.clamp(min=0).unsqueeze(0), total.where(row >= 0, 0).unsqueeze(0))
        return dx, None


def mean_of_rows(
    values: Tensor,
    group: Group,
    error: Exception | None = None,
    divisor: float | None = None,
    what: str = "global_mean",
) -> Tensor:
    """The mean over all ranks' ``values``, any shape, float32 for 16-bit types; collective.

    Args:
        error: this rank's reason to give up, raised on every rank.
        divisor: this rank's share of what the sum is divided by; the number of elements without it.

    Raises ``ValueError`` on every rank when no rank has an element, or divisors add up to 0.
    """
    if divisor is None and error is None:
        divisor = float(values.numel())
    return _ScalarOverRanks.apply(values, group, error, divisor or 0.0, what)


def sum_of_rows(values: Tensor, group: Group, error: Exception | None = None) -> Tensor:
    """The sum over all ranks' ``values``, as :func:`mean_of_rows`; 0 without elements."""
    return _ScalarOverRanks.apply(values, group, error, None, "")


class _ScalarOverRanks(Function):
    """Ledger (n values on this rank, N on all; the divisor D is N for a mean
    unless it is given, 1 for a sum):

    ========  =====  =============  ======================================
    tensor    shape  owner          kept for backward
    ========  =====  =============  ======================================
    values    [n]    this rank      no, only its shape and dtype
    result    []     every rank     no
    1/D       []     every rank     a Python float
    ========  =====  =============  ======================================

    forward:   result = (sum over ranks of sum_i values_i) / D      one all_reduce of 3 float64
    backward:  dvalues_i = dresult / D                              nothing is sent

    Backward counts itself in ``group.losses``: a loss of all ranks was differentiated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        group: Group,
        error: Exception | None,
        share: float | None,
        what: str,
    ) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64)
        if error is None:
            totals[0] = values.detach().sum(dtype=torch.float64)
            totals[1] = share or 0.0
        totals[2] = error is not None
        total, count, failed = group.all_reduce(totals).tolist()
        if failed:
            group.agree(error)
        if share is not None and not count:
            raise ValueError(f"{what}: no rank has a value to average; is the mask empty?")
        divisor = 1.0 if share is None else count
        ctx.shape, ctx.dtype, ctx.scale, ctx.group = values.shape, values.dtype, 1 / divisor, group
        return torch.tensor(total / divisor, dtype=wide_dtype(values.dtype), device=values.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ctx.group.losses += 1
        return (grad * ctx.scale).to(ctx.dtype).expand(ctx.shape), None, None, None, None
