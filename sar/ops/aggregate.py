"""Sum and mean of source rows over edges: the linear reduction that carries most models."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from sar._private import without_modes
from sar.config import Policy
from sar.edges.constant import constants_of
from sar.edges.relation import Relation
from sar.ops.first_order import first_order
from sar.ops.saving import spares_memory
from sar.ops.sums import Sums, agree_way, mean_scale, sums_over
from sar.ops.weights import weight_gradient
from sar.stream import GradientReturn

Arrival = list[GradientReturn]  # what the backward of a sum leaves for that before it


class _Arrive(Function):
    """x as it is, in front of :class:`_Aggregate`. Backward waits for the last rounds of gradients.

    What backward still has to compute elsewhere can be computed between the two, see
    :func:`sar.nn.wire_first`. Between them, the gradients of the owned rows [num_src, width] and
    two rounds are held, as they are while :class:`_Aggregate` runs. dx = what came home.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        home = ctx.arrival.pop()
        return home.finish().to(dx.dtype), None


class _Aggregate(Function):
    """out_i = s_i * sum over edges e = (j -> i) of w_e x_j.

    ========  ======================  =====================================================
    tensor    shape                   owner and lifetime
    ========  ======================  =====================================================
    x         [num_src, width]        this rank; saved (an input) if w asks for a gradient
    w         [num_edges] or none     this rank, by local edge; saved (an input, not a copy)
    s         [num_dst] or none       this rank; saved. 1 / in-degree for the mean
    halo      [<= round, width]       peers; fetched per round, reduced, dropped; if w asks
                                      fetched again in backward, or kept as the policy says
    zeros     a bit per number of     this rank; kept where the policy skips zeros, see
              x and of the halo       Note [Zeros]
    out       [num_dst, width]        this rank; not saved
    ========  ======================  =====================================================

    Forward: out = s * (A x). Backward: dx = A^T (s * dout), where the rows of A^T that belong to
    peers are computed here, round by round, and sent home, where :class:`_Arrive` adds the last of
    them; s multiplies inside the sum, so that s * dout is never stored.
    dw_e = s_i <x_j, dout_i>, by destination. ``s`` gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, sums: Sums, relation: Relation,
        arrival: Arrival,
    ) -> Tensor:  # fmt: skip
        asks = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, x if asks else None)
        ctx.sums, ctx.relation, ctx.arrival = sums, relation, arrival
        ctx.spares_memory = spares_memory()
        ctx.sends_gradients = not ctx.spares_memory  # which another awaits
        ctx.kept = [] if asks and not sums.policy.rematerialize else None
        out, finish = sums.begin(x, weight, ctx.kept)
        finish()
        if ctx.spares_memory:
            sums.plan.group.pool.clear()
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, x = ctx.saved_tensors
        sums, dx, dweight, dout = ctx.sums, None, None, dout.contiguous()
        if ctx.needs_input_grad[0]:
            home = sums.home(dout, weight=weight, settled=ctx.spares_memory)
            if x is not None:
                home.finish()  # no rounds held while rows are fetched
            ctx.arrival.append(home)
            dx = home.own().to(dout.dtype)
        if x is not None:
            more = sums.scale, sums.policy, ctx.kept or ()
            dweight = weight_gradient(ctx.relation, x, dout, *more).to(weight.dtype)
        if ctx.spares_memory:
            sums.plan.group.pool.clear()
        return dx, dweight, None, None, None


def aggregate(
    relation: Relation,
    x: Tensor,
    op: str,
    policy: Policy,
    weight: Tensor | None = None,
) -> Tensor:
    """Sum or mean of source rows over the edges that end in each owned row; collective.

    Args:
        x: [num_src, ...] floating point.
        op: ``"sum"`` or ``"mean"`` (of the weighted messages; 0 for a row without edges).
        weight: [num_edges] per local edge; same dtype as ``x``. For a gradient both are float32,
            float64 or bfloat16 on the CPU.

    Returns:
        [num_dst, ...] in the dtype of ``x``. Of a constant ``x`` by the policy what an earlier call
        gave, see Note [Constant rows]; all ranks agree on what asks for a gradient.
    """
    # What follows is no business of modes, which would slow it; it keeps kinds of tensors, though.
    plain = type(x) in (Tensor, Parameter)
    with without_modes() if plain else nullcontext():
        tensors = [x] if weight is None else [x, weight]
        if any(t.requires_grad for t in tensors) or policy.constant_inputs == "off":
            return summed(relation, x, op, policy, weight)
        agree_way(relation, x.dtype, policy)
        constants = constants_of(relation)
        return constants.reduce(
            tensors, op, policy, lambda: summed(relation, x, op, policy, weight)
        )


def summed(
    relation: Relation, x: Tensor, op: str, policy: Policy, weight: Tensor | None = None
) -> Tensor:
    """:func:`aggregate` of rows that nobody has kept sums of."""
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()

    def scale() -> Tensor | None:
        return mean_scale(relation, x.dtype) if op == "mean" else None

    sums = sums_over(relation, x, policy, op, scale, weight=weight, trained=False)
    arrival: Arrival = []
    if flat.requires_grad:
        flat = _Arrive.apply(flat, arrival)
    out = _Aggregate.apply(flat, weight, sums, relation, arrival)
    return out if x.dim() == 2 else out.view(relation.num_dst, *x.shape[1:])


def sends_gradients(node: Any) -> bool:
    """Whether the backward of an autograd node begins to send gradients that another awaits."""
    return getattr(node, "sends_gradients", False)
