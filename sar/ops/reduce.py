"""The mean over the rows of all ranks."""

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
