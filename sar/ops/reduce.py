"""The sum and the mean over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.kernels import wide_dtype
from sar.ops.first_order import first_order


def mean_of_rows(values: Tensor, group: Group, error: Exception | None = None) -> Tensor:
    """The mean over all ranks' ``values``; collective.

    Args:
        values: any shape, also without elements; float. Equal dtypes on all ranks.
        error: this rank's reason to give up, raised on every rank.

    Returns:
        A scalar, equal on every rank, float32 for the 16-bit types, else of ``values``' type.

    Raises ``ValueError`` on every rank when no rank has an element.
    """
    return _OverRanks.apply(values, group, error, True)


def sum_of_rows(values: Tensor, group: Group, error: Exception | None = None) -> Tensor:
    """The sum over all ranks' ``values``, as :func:`mean_of_rows`; 0 without elements."""
    return _OverRanks.apply(values, group, error, False)


class _OverRanks(torch.autograd.Function):
    """Ledger (n values on this rank, N on all; the divisor D is N for a mean, 1 for a sum):

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
        ctx: Any, values: Tensor, group: Group, error: Exception | None, is_mean: bool
    ) -> Tensor:
        totals = torch.zeros(3, dtype=torch.float64)
        if error is None:
            totals[0] = values.detach().sum(dtype=torch.float64)
            totals[1] = values.numel()
        totals[2] = error is not None
        total, count, failed = group.all_reduce(totals).tolist()
        if failed:
            group.agree(error)
        if is_mean and not count:
            raise ValueError("global_mean: no rank has a value to average; is the mask empty?")
        divisor = count if is_mean else 1.0
        ctx.shape, ctx.dtype, ctx.scale, ctx.group = values.shape, values.dtype, 1 / divisor, group
        return torch.tensor(total / divisor, dtype=wide_dtype(values.dtype), device=values.device)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.group.losses += 1
        return (grad * ctx.scale).to(ctx.dtype).expand(ctx.shape), None, None, None
