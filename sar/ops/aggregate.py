"""Sum, mean and extremes of source rows over edges; no row of an edge is ever made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from sar import expect
from sar._private import without_modes
from sar.comm.group import Table
from sar.config import Policy
from sar.edges.relation import Relation
from sar.edges.whole import edges_of_table
from sar.kernels import ExtremeReducer, add_rows, add_to_winners, wide_dtype
from sar.kernels.sddmm import edge_dots
from sar.ops.saving import first_order, spares_memory
from sar.ops.sums import Sums, mean_scale, sums_over
from sar.stream import GradientMessages, GradientReturn, Pass

REDUCTIONS = ("sum", "mean", "max", "min")
Awaited = list[GradientReturn]  # what the backward of a sum leaves for that before it


class _AwaitGradients(Function):
    """x as it is, in front of :class:`_Aggregate`; backward waits for the last rounds of gradients.

    Other gradients can be computed between the two, see :func:`sar.nn.wire_first`. Until then the
    gradients of the owned rows [num_src, width] and two rounds are held. dx = what came home.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, awaited: Awaited) -> Tensor:
        ctx.awaited = awaited
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        home = ctx.awaited.pop()
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
    peers are computed here, round by round, and sent home, where :class:`_AwaitGradients` adds the
    last of them; s multiplies inside the sum, so that s * dout is never stored.
    dw_e = s_i <x_j, dout_i>, by destination. ``s`` gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, sums: Sums, relation: Relation,
        awaited: Awaited,
    ) -> Tensor:  # fmt: skip
        asks = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, x if asks else None)
        ctx.sums, ctx.relation, ctx.awaited = sums, relation, awaited
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
            ctx.awaited.append(home)
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
    """Sum or mean of source rows over the edges into each owned row, [num_dst, ...]; collective.

    Args:
        x: [num_src, ...] floating point. Where it is constant the result may be an earlier call's,
            see Note [Constant rows]; all ranks agree on what asks for a gradient.
        op: ``"sum"`` or ``"mean"`` (of the weighted messages; 0 for a row without edges).
        weight: [num_edges] per local edge; same dtype as ``x``. For a gradient both are float32,
            float64 or bfloat16 on the CPU.
    """
    # Modes would slow this and have no business here; tensors of other types keep them, though.
    plain = type(x) in (Tensor, Parameter)
    with without_modes() if plain else nullcontext():
        asks = x.requires_grad or (weight is not None and weight.requires_grad)
        trained = asks and torch.is_grad_enabled()
        flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()

        def scale() -> Tensor | None:
            return mean_scale(relation, x.dtype) if op == "mean" else None

        sums = sums_over(
            relation, x, policy, op, scale, weight=weight, trained=trained, agreed=True
        )
        awaited: Awaited = []
        if flat.requires_grad:
            flat = _AwaitGradients.apply(flat, awaited)
        out = _Aggregate.apply(flat, weight, sums, relation, awaited)
        return out if x.dim() == 2 else out.view(relation.num_dst, *x.shape[1:])


def sends_gradients(node: Any) -> bool:
    """Whether the backward of an autograd node begins to send gradients that another awaits."""
    return getattr(node, "sends_gradients", False)


def extreme_of_rows(relation: Relation, x: Tensor, policy: Policy, *, largest: bool) -> Tensor:
    """The largest or smallest source row, per feature, of the edges into each row: [num_dst, ...].

    0 where no edge ends. Of equal numbers the edge with the smallest position wins, and gets the
    gradient alone; NaN wins over every number. Collective, as is its backward pass. There must be a
    kernel ``extremes`` for ``x`` [num_src, ...].
    """
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    out = _Extreme.apply(flat, relation, policy, largest)
    return out.view(relation.num_dst, *x.shape[1:])


class _Extreme(Function):
    """out_id = the largest (smallest) x_jd over the edges e = (j -> i), of edge w_id.

    ========  ===================  =========================================================
    tensor    shape                owner and lifetime
    ========  ===================  =========================================================
    x         [num_src, width]     this rank; not saved
    halo      [<= round, width]    peers; fetched per round, compared, dropped
    w         [num_dst, width]     this rank; saved: int32 positions of edges
    out       [num_dst, width]     this rank; not saved
    dx        [num_src, width]     this rank; and [<= round, width] on its way to peers
    ========  ===================  =========================================================

    Forward: as above. Backward: dx_jd = sum over the edges e = (j -> i) of [e = w_id] dout_id,
    where gradients of peers' rows are computed here, round by round, and sent home; no row is
    fetched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, relation: Relation, policy: Policy, largest: bool) -> Tensor:
        running = ExtremeReducer(largest, relation.num_dst, x)
        for step in Pass(relation.store, policy, x, order=True):
            running.add_shard(step.shard, step.rows)
        ctx.save_for_backward(running.edge)
        ctx.relation, ctx.policy = relation, policy
        return running.result()

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (winner,) = ctx.saved_tensors
        relation, policy, plan = ctx.relation, ctx.policy, ctx.relation.plan
        num_rounds = plan.num_rounds(policy, dout.shape[1] * dout.element_size())

        def local() -> Tensor:
            dx = dout.new_zeros((relation.num_src, dout.shape[1]))
            add_to_winners(dx, relation.store.local(order=True), winner, dout)
            return dx

        messages = GradientMessages(plan, dout.shape[1], dout.dtype, add_rows)
        home = GradientReturn(messages, local)
        shards = relation.store.shards(num_rounds, order=True)
        each = home.each(plan.rounds(num_rounds))
        for (_, grads), shard in zip(each, shards, strict=True):
            add_to_winners(grads.zero_(), shard, winner, dout)
        return home.finish(), None, None, None


def weight_gradient(
    relation: Relation, x: Tensor, dout: Tensor, scale: Tensor | None, policy: Policy,
    kept: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """dw_e = s_i <x_j, dout_i> for the local edges e = (j -> i): [num_edges] in the wide dtype.

    Streams x [num_src, width], contiguous, again, or publishes it; collective. ``scale`` is s,
    [num_dst] in the wide dtype, ``None`` for 1; ``kept`` has the halo of each round, where the
    policy keeps it.
    """
    wide = wide_dtype(x.dtype)
    dweight = torch.empty(relation.num_edges, dtype=wide)
    dout = dout.to(wide).contiguous()
    if relation.group.table is not None:
        return _weight_gradient_of_table(relation.group.table, relation, x.to(wide), dout, scale)
    for step in Pass(relation.store, policy, x, order=True, kept=kept):
        edge_dots(dweight, step.shard, step.rows.to(wide), dout, scale)
    return dweight


def _weight_gradient_of_table(
    table: Table, relation: Relation, x: Tensor, dout: Tensor, scale: Tensor | None
) -> Tensor:
    """:func:`weight_gradient`, some columns of x at a time where the table is small."""
    ends, width = edges_of_table(relation, ordered=True).into, x.shape[1]
    total = torch.zeros(relation.num_edges, dtype=x.dtype)
    at_once = table.columns(ends.num_rows, width, x.dtype)
    for low in range(0, width, at_once):
        some = [x[:, low : low + at_once]]
        (rows,) = table.publish(some, "rows of weighted edges", ends.first, ends.num_rows)
        part = torch.empty_like(total)
        edge_dots(part, ends.edges, rows, dout[:, low : low + at_once].contiguous(), scale)
        total += part
    return total


def check_reduction(relation: Any, x: Any, op: str, edge_weight: Tensor | None = None) -> None:
    """Raise ``ValueError`` or ``TypeError`` for arguments that do not fit: kernels check no bounds,
    and would read beyond the end of a tensor that is too short."""
    if op not in REDUCTIONS:
        raise ValueError(f"op: got {op!r}, expected one of {', '.join(REDUCTIONS)}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: got {getattr(x, 'dtype', type(x))}, expected a floating point tensor")
    expect.dense(x, "x")
    if len(x) != relation.num_src:
        raise ValueError(f"x: got {len(x)} rows, expected {relation.num_src}, one per source row")
    if edge_weight is not None and edge_weight.numel() != relation.num_edges:
        got = tuple(edge_weight.shape)
        raise ValueError(f"edge_weight: got {got}, expected [{relation.num_edges}], one per edge")
