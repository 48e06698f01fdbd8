"""Rows of other ranks as a tensor of their own, with gradients that go home to their owners."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.kernels import add_rows, wide_dtype
from sar.ops.message_blocks import flat_rows
from sar.ops.saving import first_order
from sar.stream import GradientMessages, GradientReturn, HaloPlan, build_halo_plan, fetch

TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def halo_rows(plan: HaloPlan, x: Tensor, policy: Policy) -> Tensor:
    """The rows that ``plan`` receives, [halo, ...] by owner and row, of ``x`` [num_rows, ...];
    collective, as is its backward pass."""
    return from_wire(_HaloRows.apply(to_wire(x), plan, policy), x)


def rows_of_owners(x: Tensor, owner: Tensor, row: Tensor, policy: Policy, group: Any) -> Tensor:
    """Row ``row`` of the ``x`` [num_rows, ...] of rank ``owner``, int64 [n] each: [n, ...].

    The pairs are distinct and ascending. Collective, as is its backward pass.
    """
    is_own = owner == group.rank
    wanted = [row[(owner == rank) & ~is_own] for rank in range(group.size)]
    plan = build_halo_plan(group, wanted, len(x)).to(x.device)
    halo, own = halo_rows(plan, x, policy), x.index_select(0, row[is_own].to(x.device))
    first = sum(plan.recv_counts[: group.rank])
    return torch.cat([halo[:first], own, halo[first:]])


def to_wire(x: Tensor) -> Tensor:
    """``x`` as contiguous [rows, width], of bytes unless its numbers can be trained."""
    flat = flat_rows(x).contiguous()
    if x.dtype in TRAINED:
        return flat
    return flat.view(-1).view(torch.uint8).view(len(flat), flat.shape[1] * x.element_size())


def from_wire(rows: Tensor, like: Tensor) -> Tensor:
    """Rows as of :func:`to_wire` in the dtype and with the trailing shape of ``like``."""
    num_rows = len(rows)
    if like.dtype not in TRAINED:  # such a view has no gradient
        rows = rows.view(-1).view(like.dtype)
    return rows.view(num_rows, *like.shape[1:])


def fetch_halo(plan: HaloPlan, rows: Tensor, num_rounds: int, halo: Tensor) -> None:
    """Fill ``halo`` [halo, width], by owner and row, from ``rows`` [num_rows, width] of all."""
    starts = [*accumulate(plan.recv_counts, initial=0)]
    for step, came in fetch(plan, rows, plan.rounds(num_rounds)):
        for peer, part in zip(step.sources, came.split(list(step.recv_rows)), strict=True):
            halo[starts[peer] : starts[peer] + len(part)] = part


def return_halo(plan: HaloPlan, grads: Tensor, num_rounds: int, own: Tensor) -> Tensor:
    """Send gradients ``grads`` [halo, width] home: ``own`` [num_rows, width] with those that came
    added, in place."""
    starts = [*accumulate(plan.recv_counts, initial=0)]
    messages = GradientMessages(plan, grads.shape[1], grads.dtype, add_rows)
    home = GradientReturn(messages, lambda: own)
    for step, buffer in home.each(plan.rounds(num_rounds)):
        for peer, part in zip(step.sources, buffer.split(list(step.recv_rows)), strict=True):
            part.copy_(grads[starts[peer] : starts[peer] + len(part)])
    return home.finish()


class _HaloRows(Function):
    """halo_k = x_j, where row j of its owner is the k-th that this rank receives.

    ======  ==================  =================================
    tensor  shape               owner and lifetime
    ======  ==================  =================================
    x       [num_rows, width]   this rank; not saved
    halo    [halo, width]       peers' rows, held by the caller
    dx      [num_rows, width]   this rank
    ======  ==================  =================================

    dx_j = sum over ranks of dhalo_k, sent home in as many rounds as the rows came in.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: HaloPlan, policy: Policy) -> Tensor:
        ctx.plan = plan
        ctx.num_rounds = plan.num_rounds(policy, max(1, x.shape[1] * wide_dtype(x.dtype).itemsize))
        halo = x.new_empty((sum(plan.recv_counts), x.shape[1]))
        fetch_halo(plan, x, ctx.num_rounds, halo)
        return halo

    @staticmethod
    @first_order
    def backward(ctx: Any, dhalo: Tensor) -> tuple[Tensor, None, None]:
        grads = dhalo.to(wide_dtype(dhalo.dtype))
        own = grads.new_zeros((ctx.plan.num_rows, grads.shape[1]))
        return return_halo(ctx.plan, grads, ctx.num_rounds, own).to(dhalo.dtype), None, None
