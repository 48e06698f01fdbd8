"""The sum and the mean over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.kernels import wide_dtype
from sar.ops.first_order import first_order


def mean_of_rows(
    values: Tensor,
    group: Group,
    error: Exception | None = None,
    divisor: float | None = None,
    what: str = "global_mean",
) -> Tensor:
    """The mean over all ranks' ``values``; collective.

    Args:
        values: any shape, also without elements; float. Equal dtypes on all ranks.
        error: this rank's reason to give up, raised on every rank.
        divisor: this rank's share of what the sum is divided by; the number of elements without it.
        what: the call, for the message.

    Returns:
        A scalar, equal on every rank, float32 for the 16-bit types, else of ``values``' type.

    Raises ``ValueError`` on every rank when no rank has an element, or divisors add up to 0.
    """
    if divisor is None and error is None:
        divisor = float(values.numel())
    return _OverRanks.apply(values, group, error, divisor or 0.0, what)


def sum_of_rows(values: Tensor, group: Group, error: Exception | None = None) -> Tensor:
    """The sum over all ranks' ``values``, as :func:`mean_of_rows`; 0 without elements."""
    return _OverRanks.apply(values, group, error, None, "")


class _OverRanks(torch.autograd.Function):
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
