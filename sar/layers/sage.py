"""GraphSAGE's layer of means (arXiv 1706.02216) as one function of autograd.

z = x W_own^T + b + mean(x) W^T.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.saving import first_order, owns_saved
from sar.ops.sums import Sums, mean_scale, sums_over


def sage_mean(
    relation: Relation, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
    policy: Policy, *, sum_first: bool | None = None, donate: bool = False,
) -> Tensor:  # fmt: skip
    """O x @ own^T + bias + mean @ weight^T: mean_i is that of the rows x_j over edges (j -> i).

    Collective, as is its backward pass; ranks that compute the same by
    :func:`sar.ops.aggregate.aggregate` and torch exchange the same messages. Own rows are
    multiplied while rows for the mean travel; in backward the gradients of rows go home before what
    can be computed beside them is.

    Args:
        x: [num_src, width_in] contiguous owned source rows; O x, the first num_dst of them, are the
            destinations.
        own, weight: [width, width_in] of the dtype of ``x``, float32 or float64.
        bias: [width] or none.
        sum_first: rows are summed before they are multiplied by ``weight``; by default unless that
            makes them narrower.
        donate: backward writes dx over ``x``, unless it keeps the graph.

    Returns:
        [num_dst, width], which nobody else has or saved.
    """
    relation.group.meter.tell("fused")
    is_narrow = weight.shape[1] > weight.shape[0] if sum_first is None else not sum_first
    function: type[Function] = _NarrowMeanLayer if is_narrow else _MeanLayer
    width, trained = None, x.requires_grad
    if is_narrow:
        width = len(weight)
        trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)

    def scale() -> Tensor:
        return mean_scale(relation, x.dtype)

    means = sums_over(relation, x, policy, "mean", scale, width=width, trained=trained)
    return function.apply(x, own, weight, bias, means, donate)


class _MeanLayer(Function):
    """z = O x own^T + b + (S A x) weight^T.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if it is donated
    own       [width, width_in]      replicated; saved (a parameter)
    weight    [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    S         [num_dst]              this rank; 1 / in-degree; held
    mean      [num_dst, width_in]    this rank; saved. Becomes dmean in the last backward pass
    halo      [<= round, width_in]   peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    dx        [num_src, width_in]    this rank; the tensor that gradients come home to
    ========  =====================  =====================================================

    Forward: own rows are multiplied while the rounds travel. Backward with D = dz, in this order:
    dweight = D^T mean; dmean = D weight, where the mean was; dx = A^T S dmean, on its way home
    while the others are computed; down = D^T O x, before the own part of dx takes its place; db =
    the sum of the rows of D; dx += O^T D own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
        means: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        mean, finish = means.begin(x)
        z = F.linear(x[: len(mean)], own, bias)
        finish()
        ctx.save_for_backward(x, own, weight, mean)
        ctx.means, ctx.donate, ctx.owns = means, donate, owns_saved()
        ctx.sends_gradients = ctx.needs_input_grad[0]
        return z.addmm_(mean, weight.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight, mean = ctx.saved_tensors
        asks_x, asks_own, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        is_last = ctx.owns and frees_graph()
        dz, down = dz.contiguous(), None
        dweight = dz.t() @ mean if asks_weight else None
        if not asks_x:
            down = dz.t() @ x[: len(dz)] if asks_own else None
            return None, down, dweight, dz.sum(0) if asks_bias else None, None, None
        dmean = torch.mm(dz, weight, out=mean if is_last else None)

        def place() -> Tensor | None:  # called when the first rounds travel
            nonlocal down
            down = dz.t() @ x[: len(dz)] if asks_own else None
            return x.detach() if ctx.donate and is_last else None

        home = ctx.means.home(dmean, place)
        dbias = dz.sum(0) if asks_bias else None
        home.own()[: len(dz)].addmm_(dz, own)  # by torch, which counts it as a write into x
        return home.finish(), down, dweight, dbias, None, None


class _NarrowMeanLayer(Function):
    """z = O x own^T + b + S A y with y = x weight^T, which is narrower than x.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if it is donated
    own       [width, width_in]      replicated; saved (a parameter)
    weight    [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    S         [num_dst]              this rank; 1 / in-degree; held
    y, dy     [num_src, width]       this rank; in one pass each
    halo      [<= round, width]      peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    ========  =====================  =====================================================

    Forward: own rows are multiplied while the rounds travel. Backward with D = dz, in this order:
    dy = A^T S D, on its way home while the next two are computed; down = D^T O x; db = the sum of
    the rows of D; dweight = dy^T x; dx = dy weight, where x was; dx += O^T D own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
        means: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        mean, finish = means.begin(x @ weight.t())
        z = F.linear(x[: len(mean)], own, bias)
        finish()
        ctx.save_for_backward(x, own, weight)
        ctx.means, ctx.donate, ctx.owns = means, donate, owns_saved()
        ctx.sends_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        return z.add_(mean)

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight = ctx.saved_tensors
        asks_x, asks_own, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        dz, dweight, dx = dz.contiguous(), None, None
        home = ctx.means.home(dz) if asks_x or asks_weight else None
        down = dz.t() @ x[: len(dz)] if asks_own else None
        dbias = dz.sum(0) if asks_bias else None
        dy = None if home is None else home.finish()
        if dy is not None and asks_weight:
            dweight = dy.t() @ x
        if dy is not None and asks_x:
            donate = ctx.donate and ctx.owns and frees_graph()
            dx = torch.mm(dy, weight, out=x.detach() if donate else None)
            dx[: len(dz)].addmm_(dz, own)
        return dx, down, dweight, dbias, None, None
