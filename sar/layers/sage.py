"""GraphSAGE's layer of means (arXiv 1706.02216) as one autograd function:
z = x W_own^T + b + mean(x) W^T."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.comm import Group
from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.saving import compute_once, first_order, is_recomputed, owns_saved
from sar.ops.sums import Sums, mean_scale, sums_over


def sage_mean(
    relation: Relation, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
    policy: Policy, *, op: str = "mean", sum_first: bool | None = None, donate: bool = False,
) -> Tensor:  # fmt: skip
    """O x @ own^T + bias + mean @ weight^T: mean_i is that of the rows x_j over edges (j -> i).

    Collective, as is its backward. Other ranks may use :func:`sar.ops.aggregate.aggregate` and
    torch instead: messages agree. Own rows are multiplied while rows for the mean travel; backward
    sends the gradients of rows home first, and computes the others meanwhile.

    Args:
        x: [num_src, width_in] contiguous owned source rows; O x, the first num_dst of them, are the
            destinations.
        own, weight: [width, width_in] of the dtype of ``x``, float32 or float64.
        bias: [width] or none.
        op: ``"sum"`` has sums in place of means.
        sum_first: rows are summed before they are multiplied by ``weight``; by default unless that
            makes them narrower.
        donate: backward writes dx over ``x``, unless it keeps the graph.

    Returns [num_dst, width], which nobody else has or saved.
    """
    if relation.group.meter.notes is not None:
        relation.group.meter.tell("fused")
    is_narrow = weight.shape[1] > weight.shape[0] if sum_first is None else not sum_first
    function: type[Function] = ProductFirst if is_narrow else SumFirst
    name = op
    if not is_narrow and saves_no_sums(relation, x, weight):
        function, name = SumUnsaved, f"{op} before a product"
    width = len(weight) if is_narrow else None
    asks = x.requires_grad or (is_narrow and weight.requires_grad)
    trained = asks and torch.is_grad_enabled()

    def scale() -> Tensor | None:
        return mean_scale(relation, x.dtype) if op == "mean" else None

    means = sums_over(relation, x, policy, name, scale, width=width, trained=trained)
    return function.apply(x, own, weight, bias, None, means, donate)


def all_by_columns(group: Group, policy: Policy, x: Any, fused: bool) -> bool:
    """Whether all ranks multiply means by columns (:mod:`sar.layers.sage_columns`), as a recomputed
    layer can; collective there. ``fused``: this rank computes the layer as a whole."""
    if not is_recomputed():
        return False
    mine = fused and policy.zeros == "send" and x.requires_grad

    def agreed() -> bool:
        if group.size == 1:
            return mine
        return bool(group.all_reduce(torch.tensor(int(mine)), "min"))

    return compute_once(agreed)


class SumFirst(Function):
    """z = O x own^T + b + (S A M x) W^T: rows are summed before they are multiplied.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input) where there is own. Becomes
                                     dx if it is donated
    own       [width, width_in]      replicated; saved (a parameter); or none: no O x
    W         [width, width_in]      replicated; saved (a parameter); or none, which is 1
    b         [width] or none        replicated
    M, S      [num_src], [num_dst]   this rank; kept by the relation; or none, which are 1; no M
                                     where there is own
    s         [num_dst, width_in]    this rank; S A M x, saved. Becomes ds in the last backward
                                     pass; where there is no W it is z, and not saved
    halo      [<= round, width_in]   peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    dx        [num_src, width_in]    this rank; the tensor that gradients come home to
    ========  =====================  =====================================================

    Forward: own rows are multiplied while the rounds travel. Backward with D = dz, in this order:
    dW = D^T s; ds = D W, where s was; dx = A^T S ds, on its way home while the others are computed;
    down = D^T O x, before the own part of dx takes its place; db = the sum of the rows of D; dx +=
    O^T D own, or dx = M dx.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        factor: Tensor | None, sums: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        s, finish = sums.begin(scaled(x, factor))
        z = None if own is None else F.linear(sums.here(x)[: len(s)], own, bias)
        finish()
        kept = None if own is None else x, own, weight, None if weight is None else s
        ctx.save_for_backward(*kept)
        ctx.factor, ctx.sums, ctx.donate, ctx.owns = factor, sums, donate, owns_saved()
        ctx.sends_gradients = ctx.needs_input_grad[0]
        if weight is None:
            return s if bias is None else s.add_(bias)
        return F.linear(s, weight, bias) if z is None else z.addmm_(s, weight.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight, s = ctx.saved_tensors
        asks_x, asks_own, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        is_last, down, dweight = ctx.owns and frees_graph(), None, None
        ds = dz = dz.contiguous()
        if asks_weight:
            dweight = dz.t() @ s
        if asks_x and weight is not None:
            ds = torch.mm(dz, weight, out=s if is_last else None)

        def place() -> Tensor | None:  # called when the first rounds travel
            nonlocal down
            down = dz.t() @ x[: len(dz)] if asks_own else None
            return x.detach() if x is not None and ctx.donate and is_last else None

        if not asks_x:
            place()
            return None, down, dweight, dz.sum(0) if asks_bias else None, None, None, None
        home = ctx.sums.home(ds, place)
        dbias = dz.sum(0) if asks_bias else None
        if own is not None:  # by torch, which counts it as a write into x
            home.own()[: len(dz)].addmm_(dz, own)
        dx = home.finish()
        if ctx.factor is not None:
            dx.mul_(ctx.factor.unsqueeze(1))
        return dx, down, dweight, dbias, None, None, None


class ProductFirst(Function):
    """z = O x own^T + b + S A y with y = M (x W^T), which is narrower than x.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if it is donated
    own       [width, width_in]      replicated; saved (a parameter); or none: no O x
    W         [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    M, S      [num_src], [num_dst]   this rank; kept by the relation; or none, which are 1
    y, dy     [num_src, width]       this rank; in one pass each
    halo      [<= round, width]      peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    ========  =====================  =====================================================

    M, which is by row, is applied to the narrow rows. Forward: own rows are multiplied while the
    rounds travel. Backward with D = dz, in this order: dy = A^T S D, on its way home while the next
    two are computed, then times M; down = D^T O x; db = the sum of the rows of D; dW = dy^T x;
    dx = dy W, where x was; dx += O^T D own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, weight: Tensor, bias: Tensor | None,
        factor: Tensor | None, sums: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        y, z = [x @ weight.t()], None
        rows = sums.num_dst_in_turns
        if own is not None and rows is not None and 2 * len(own) < own.shape[1]:
            z = F.linear(x[:rows], own, bias)  # which is read again instead of x
        if factor is not None:
            y[0].mul_(factor.unsqueeze(1))
        s, finish = sums.begin(y.pop())  # which may let go of them
        if own is not None and z is None:
            z = F.linear(x[: len(s)], own, bias)
        finish()
        ctx.save_for_backward(x, own, weight)
        ctx.factor, ctx.sums, ctx.donate, ctx.owns = factor, sums, donate, owns_saved()
        ctx.sends_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        if z is not None:
            return z.add_(s)
        return s if bias is None else s.add_(bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight = ctx.saved_tensors
        asks_x, asks_own, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        dz, dweight, dx = dz.contiguous(), None, None
        home = ctx.sums.home(dz) if asks_x or asks_weight else None
        dz = dz if home is None else ctx.sums.here(dz)
        down = dz.t() @ x[: len(dz)] if asks_own else None
        dbias = dz.sum(0) if asks_bias else None
        if home is None:
            return None, down, None, dbias, None, None, None
        dy = home.finish()
        if ctx.factor is not None:
            dy.mul_(ctx.factor.unsqueeze(1))
        if asks_weight:
            dweight = dy.t() @ x
        if asks_x:
            donate = ctx.donate and ctx.owns and frees_graph()
            dx = torch.mm(dy, weight, out=x.detach() if donate else None)
            if own is not None:
                dx[: len(dz)].addmm_(dz, own)
        return dx, down, dweight, dbias, None, None, None


class SumUnsaved(ProductFirst):
    """z = O x own^T + b + s W^T with s = S A M x, as :class:`SumFirst`, but s is not saved.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    s         [num_dst, width_in]    this rank; not saved
    others                           as in :class:`ProductFirst`
    ========  =====================  =====================================================

    Backward is that of :class:`ProductFirst`: dy = A^T S dz is as wide as z, dW = (M dy)^T x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor | None, weight: Tensor, bias: Tensor | None,
        factor: Tensor | None, sums: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        z = SumFirst.forward(ctx, x, own, weight, bias, factor, sums, donate)
        ctx.save_for_backward(x, own, weight)  # in place of what that saved
        ctx.sends_gradients = ctx.needs_input_grad[0] or ctx.needs_input_grad[2]
        return z


def saves_no_sums(relation: Relation, x: Tensor, weight: Tensor | None) -> bool:
    """Whether x [num_src, width_in] is summed first and s is not saved: out of a table, which
    takes dz [num_dst, width] as well as ds where that is not wider; ``weight``: [width, width_in].
    """
    if relation.group.table is None or weight is None or not x.requires_grad:
        return False
    return len(weight) <= weight.shape[1]


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """Rows times a factor each, if there are factors."""
    return x if factor is None else x * factor.unsqueeze(1)
