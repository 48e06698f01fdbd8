"""Graph convolution (arXiv 1609.02907) as one function of autograd.

z = N A (M x) W + b; M and N are powers of degrees, or 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.aggregate import aggregate
from sar.ops.saving import first_order, owns_saved
from sar.ops.sums import Sums, sums_over
from sar.stream.plan import agree_on_gradients


class Degrees(NamedTuple):
    """A power of degrees, by which rows are multiplied.

    Attributes:
        of: ``"in"`` or ``"out"``: the edges that end in a row, or start in it on any rank.
        power: -1 divides by them.
        empty: what rows without such edges are multiplied by.
    """

    of: str
    power: float
    empty: float = 1.0


def gcn(
    relation: Relation, x: Tensor, weight: Tensor | None, bias: Tensor | None, policy: Policy,
    *, src: Degrees | None = None, dst: Degrees | None = None, weight_first: bool = False,
    donate: bool = False,
) -> Tensor:  # fmt: skip
    """N A (M x) @ weight + bias, the sum over edges (j -> i); collective, as is its backward.

    Ranks that compute the same by :func:`sar.ops.aggregate.aggregate` and torch exchange the same
    messages.

    Args:
        x: [num_src, width_in] contiguous owned source rows, float32 or float64.
        weight: [width_in, width] of the dtype of ``x``; ``None``: width is width_in.
        bias: [width] or none.
        src, dst: what M and N are, of source and of destination rows; ``None`` is 1. In-degrees of
            sources are for relations whose sources are their destinations.
        weight_first: rows are multiplied before they are summed.
        donate: backward writes dx over ``x`` where it reads ``x``, unless it keeps the graph.

    Returns:
        [num_dst, width], which nobody else has or saved.
    """
    relation.group.meter.tell("fused")
    first = weight if weight_first else None
    asks = x.requires_grad or (first is not None and first.requires_grad)
    if not (asks and torch.is_grad_enabled()):
        return _of_constant_rows(relation, x, weight, bias, policy, src, dst, weight_first)
    factor = degree_factor(relation, x.dtype, src)
    is_made = factor is not None or first is not None
    width = None if not is_made else x.shape[1] if first is None else first.shape[1]

    def scale() -> Tensor | None:
        return degree_factor(relation, x.dtype, dst)

    sums = sums_over(relation, x, policy, f"gcn {src} {dst}", scale, width=width)
    if first is not None:
        return _WeightFirst.apply(x, first, bias, factor, sums, donate)
    return _WeightLast.apply(x, weight, bias, factor, sums)


def degree_factor(relation: Relation, dtype: torch.dtype, degrees: Degrees | None) -> Tensor | None:
    """[n] what rows are multiplied by; kept, and not to be written into."""
    if degrees is None:
        return None

    def make() -> Tensor:
        found = relation.in_degrees if degrees.of == "in" else relation.out_degrees
        factor = found.to(dtype).pow_(degrees.power)
        return factor.masked_fill_(found == 0, degrees.empty)

    return relation.derived(("degrees", degrees, dtype), make)


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor.unsqueeze(1)


def _of_constant_rows(
    relation: Relation, x: Tensor, weight: Tensor | None, bias: Tensor | None, policy: Policy,
    src: Degrees | None, dst: Degrees | None, weight_first: bool,
) -> Tensor:  # fmt: skip
    """The same where no gradient travels: the sums may be those of an earlier call."""
    factor, scale = (degree_factor(relation, x.dtype, degrees) for degrees in (src, dst))
    if weight is not None and weight_first:
        rows = _scaled(x, factor) @ weight
        agree_on_gradients(relation.plan, [("rows of a sum", rows)], 1)
        z = _scaled(aggregate(relation, rows, "sum", policy), scale)
        return z if bias is None else z + bias
    like = x if factor is None else x.new_empty((0, x.shape[1]))
    agree_on_gradients(relation.plan, [("rows of a sum", like)], 1)
    made = None if factor is None else (f"gcn {src}", x)  # so that they are known by x itself
    sums = _scaled(
        aggregate(relation, _scaled(x.detach(), factor), "sum", policy, made=made), scale
    )
    if weight is not None:
        return F.linear(sums, weight.t(), bias)
    return sums if bias is None else sums + bias


class _WeightLast(Function):
    """z = (N A M x) W + b.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; not saved
    W         [width_in, width]      replicated; saved (a parameter); or none, which is 1
    b         [width] or none        replicated
    M, N      [num_src], [num_dst]   this rank; kept by the relation; or none, which are 1
    y         [num_src, width_in]    this rank; M x, in forward
    s         [num_dst, width_in]    this rank; N A y, saved. Becomes ds in the last backward
                                     pass; where there is no W it is z, and not saved
    halo      [<= round, width_in]   peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    ========  =====================  =====================================================

    Backward with D = dz, in this order: dW = s^T D; ds = D W^T, where s was; dy = A^T N ds, on its
    way home while db = the sum of the rows of D is computed; dx = M dy, where dy is.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, factor: Tensor | None,
        sums: Sums,
    ) -> Tensor:  # fmt: skip
        s, finish = sums.begin(_scaled(x, factor))
        finish()
        ctx.save_for_backward(weight, None if weight is None else s)
        ctx.factor, ctx.sums, ctx.owns = factor, sums, owns_saved()
        ctx.sends_gradients = True
        if weight is not None:
            return F.linear(s, weight.t(), bias)
        return s if bias is None else s.add_(bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        weight, s = ctx.saved_tensors
        asks_x, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        dz, dweight = dz.contiguous(), None
        ds = dz
        if weight is not None:
            dweight = s.t() @ dz if asks_weight else None
            is_last = ctx.owns and frees_graph()
            ds = torch.mm(dz, weight.t(), out=s if is_last else None)
        home = ctx.sums.home(ds)
        dbias = dz.sum(0) if asks_bias else None
        dx = home.finish()
        if ctx.factor is not None:
            dx.mul_(ctx.factor.unsqueeze(1))
        return dx, dweight, dbias, None, None


class _WeightFirst(Function):
    """z = N A ((M x) W) + b, where W makes rows narrower before they are summed.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if it is donated
    W         [width_in, width]      replicated; saved (a parameter)
    b         [width] or none        replicated
    M, N      [num_src], [num_dst]   this rank; kept by the relation; or none, which are 1
    y, dy     [num_src, width]       this rank; M (x W), and M dy, in one pass each
    halo      [<= round, width]      peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    ========  =====================  =====================================================

    M, which is by row, is applied to the narrow rows. Backward with D = dz, in this order:
    dy = A^T N D, on its way home while db = the sum of the rows of D is computed, then times M;
    dW = x^T dy; dx = dy W^T, where x was.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factor: Tensor | None,
        sums: Sums, donate: bool,
    ) -> Tensor:  # fmt: skip
        y = x @ weight
        if factor is not None:
            y.mul_(factor.unsqueeze(1))
        z, finish = sums.begin(y)
        finish()
        ctx.save_for_backward(x, weight)
        ctx.factor, ctx.sums, ctx.donate, ctx.owns = factor, sums, donate, owns_saved()
        ctx.sends_gradients = True
        return z if bias is None else z.add_(bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        asks_x, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        dz = dz.contiguous()
        home = ctx.sums.home(dz)
        dbias = dz.sum(0) if asks_bias else None
        dy = home.finish()
        if ctx.factor is not None:
            dy.mul_(ctx.factor.unsqueeze(1))
        dweight = x.t() @ dy if asks_weight else None
        dx = None
        if asks_x:
            donate = ctx.donate and ctx.owns and frees_graph()
            dx = torch.mm(dy, weight.t(), out=x.detach() if donate else None)
        return dx, dweight, dbias, None, None, None
