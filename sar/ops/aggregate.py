"""Sum and mean of source rows over edges: the linear reduction that carries most models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from sar.config import CONSTANT_INPUTS, Policy
from sar.edges.constant import constants_of
from sar.edges.push_pull import LinearRelation, linear_relation
from sar.edges.relation import Relation
from sar.edges.shard_store import LOCAL
from sar.kernels import Factors, add_rows, spmm, spmm_add, spmm_into, wide_dtype
from sar.ops.boundary import refuse_sampling, sampled_aggregate
from sar.ops.first_order import first_order
from sar.ops.saving import spares_memory
from sar.ops.weights import weight_gradient
from sar.stream import GradientReturn, Round, fetch
from sar.stream.rounds import WINDOW, fetch_messages
from sar.stream.zeros import NonZeros, PackedGradients, PackedRows, Skipped, skipped

Streamed = Relation | LinearRelation
Place = Callable[[], Tensor | None]  # memory of owned rows that nobody reads any more, if any


def aggregate_forward(
    relation: Streamed, x: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    kept: list[Tensor] | None = None, zeros: NonZeros | None = None,
) -> Tensor:  # fmt: skip
    """[num_dst, width] scaled sums in the wide dtype of ``x`` ([num_src, width], contiguous).

    The halo of each round is appended to ``kept``; with ``zeros`` it comes without its zeros.
    Where memory is spared, a rank's own rows wait for the first round, see :func:`_local_last`.
    """
    out, finish = begin_aggregate(relation, x, weight, scale, policy, kept, zeros)
    finish()
    return out


def begin_aggregate(
    relation: Streamed, x: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    kept: list[Tensor] | None = None, zeros: NonZeros | None = None,
) -> tuple[Tensor, Callable[[], None]]:  # fmt: skip
    """:func:`aggregate_forward` in two parts: sums over a rank's own edges, while the first rounds
    travel, and what waits for the rounds and adds them."""
    plan, factors, order = relation.plan, Factors(edge=weight, row=scale), weight is not None
    num_rounds = plan.num_rounds(policy, x.shape[1] * x.element_size())
    rounds = plan.rounds(num_rounds)
    if zeros is None:
        stream = fetch(plan, x, rounds, kept is not None, policy.lossy)
    else:
        stream = fetch_messages(PackedRows(zeros, x, kept is not None), rounds)
    arriving = zip(stream, relation.shards(num_rounds, order=order), strict=True)
    first = []
    if _local_last(spares_memory(), rounds):
        first.append(next(arriving))
        plan.group.pool.clear()
    out = spmm(relation.local(order=order), x, factors)  # while rounds are on the wire
    sums = out.detach()  # autograd may know the other by then

    def finish() -> None:
        for (_, halo), shard in chain(first, arriving):
            spmm_add(sums, shard, halo, factors)
            if kept is not None:
                kept.append(halo)

    return out, finish


def aggregate_backward(
    relation: Streamed, dout: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    zeros: NonZeros | None = None, spares_memory: bool = False,
    place: Place | None = None,
) -> GradientReturn:  # fmt: skip
    """Gradients of [num_src, width] rows, in the wide dtype, the last rounds of them still on
    their way home; no row is fetched. With ``zeros`` those of numbers that were zero stay away;
    with ``spares_memory`` all are home. ``place`` is called once rounds are on their way."""
    if scale is not None and dout.dtype != scale.dtype:  # a narrow factor would lose digits
        dout, scale = (dout * scale.unsqueeze(1)).to(dout.dtype), None
    plan, factors, order = relation.plan, Factors(edge=weight, gathered=scale), weight is not None
    num_rounds = plan.num_rounds(policy, dout.shape[1] * dout.element_size())
    shards = relation.transposed(num_rounds, policy, order=order)

    def local() -> Tensor:
        own = next(relation.transposed(LOCAL, policy, order=order))
        return spmm(own, dout, factors, None if place is None else place())

    packed = None if zeros is None else PackedGradients(zeros)
    shape = (dout.shape[1], dout.dtype)
    rounds = plan.rounds(num_rounds)
    home = GradientReturn(
        plan, *shape, local, add_rows, lossy=policy.lossy, messages=packed,
        local_last=_local_last(spares_memory, rounds),
    )  # fmt: skip
    for step, shard in zip(rounds, shards, strict=True):
        grads = home.buffer(step)
        spmm_into(grads, shard, dout, factors)
        home.send(step, grads)
        del grads
    if spares_memory:
        home.settle()
    home.own()
    return home


def _local_last(spares_memory: bool, rounds: Sequence[Round]) -> bool:
    """Whether a rank's own rows are summed only when a round has landed, and its send buffer has
    made room for the result: where memory counts, if all rounds are on the wire at once."""
    return spares_memory and 0 < len(rounds) <= WINDOW


class Home(Function):
    """x as it is, in front of :class:`_Aggregate`. Backward waits for the last rounds of gradients.

    What backward still has to compute elsewhere can be computed between the two, see
    :func:`sar.nn.wire_first`. Between them, the gradients of the owned rows [num_src, width] and
    two rounds are held, as they are while :class:`_Aggregate` runs. dx = what came home.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, awaited: Arrival) -> Tensor:
        ctx.awaited = awaited
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        home = ctx.awaited.pop()
        return home.finish().to(dx.dtype), None


Arrival = list[GradientReturn]  # what a backward of _Aggregate leaves for that of Home


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
    peers are computed here, round by round, and sent home, where :class:`Home` adds the last of
    them; s multiplies inside the sum, so that s * dout is never stored.
    dw_e = s_i <x_j, dout_i>, by destination. ``s`` gets no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        relation: Streamed,
        policy: Policy,
        arrival: Arrival,
        skips: Skipped,
        summed: ReferenceType[Tensor],
    ) -> Tensor:
        asks = ctx.needs_input_grad[1]
        ctx.save_for_backward(weight, scale, x if asks else None)
        ctx.relation, ctx.policy, ctx.arrival = relation, policy, arrival
        ctx.spares_memory = spares_memory()
        ctx.kept = [] if asks and not policy.rematerialize else None
        zeros = NonZeros(relation.plan, x, summed) if skips else None
        ctx.zeros = zeros if skips is Skipped.ROWS_AND_GRADIENTS else None
        out = aggregate_forward(relation, x, weight, scale, policy, ctx.kept, zeros)
        if ctx.spares_memory:
            relation.plan.group.pool.clear()
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, x = ctx.saved_tensors
        dx, dweight, dout = None, None, dout.contiguous()
        if ctx.needs_input_grad[0]:
            if ctx.zeros is not None:
                ctx.zeros.check()
            home = aggregate_backward(
                ctx.relation, dout, weight, scale, ctx.policy, ctx.zeros, ctx.spares_memory
            )
            if x is not None:
                home.finish()  # no rounds held while rows are fetched
            ctx.arrival.append(home)
            dx = home.own().to(dout.dtype)
        if x is not None:
            dweight = weight_gradient(ctx.relation, x, dout, scale, ctx.policy, ctx.kept or ())
            dweight = dweight.to(weight.dtype)
        if ctx.spares_memory:
            ctx.relation.plan.group.pool.clear()
        return dx, dweight, None, None, None, None, None, None


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
    with torch._C.DisableTorchFunction() if plain else nullcontext():
        out = _agreed_aggregate(relation, x, op, policy, weight)
    _results[id(out)] = out
    return out


def is_aggregated(rows: Tensor) -> bool:
    """Whether :func:`aggregate` returned this very tensor."""
    return _results.get(id(rows)) is rows


_results: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def agree_sums(relation: Relation, x: Tensor, policy: Policy) -> Skipped:
    """What travels of rows ``x`` of a sum; ``ValueError`` on all ranks where they differ in how.

    Who keeps constant rows, or draws a sample, waits for the others in collectives of its own.
    """
    skips = skipped(x, policy) if relation.group.size > 1 else Skipped.NOTHING
    what = "(number of the mode of constant_inputs, code of what is lossy, what goes without zeros)"
    mode = CONSTANT_INPUTS.index(policy.constant_inputs)
    relation.plan.agree_once(what, mode, policy.lossy.code, int(skips))
    return skips


def mean_scale(relation: Relation, dtype: torch.dtype) -> Tensor:
    """[num_dst] 1 / in-degree, and 1 where there is no edge, in the wide dtype of ``dtype``."""
    return relation.in_degrees.clamp(min=1).to(wide_dtype(dtype)).reciprocal_()


def _agreed_aggregate(
    relation: Relation, x: Tensor, op: str, policy: Policy, weight: Tensor | None
) -> Tensor:
    skips = agree_sums(relation, x, policy)

    def compute() -> Tensor:
        return _aggregate(relation, x, op, policy, weight, skips)

    tensors = [x] if weight is None else [x, weight]
    if any(t.requires_grad for t in tensors) or policy.constant_inputs == "off":
        return compute()
    return constants_of(relation).reduce(tensors, op, policy, compute)


def _aggregate(
    relation: Relation, x: Tensor, op: str, policy: Policy, weight: Tensor | None, skips: Skipped
) -> Tensor:
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    scale = mean_scale(relation, x.dtype) if op == "mean" else None
    if weight is not None and weight.requires_grad:
        refuse_sampling(policy, "edge weights that ask for a gradient")
    if policy.lossy.boundary_rate < 1 and torch.is_grad_enabled():
        out = sampled_aggregate(relation, flat, weight, scale, policy)
    else:
        streamed = linear_relation(relation, flat, weight, policy)
        arrival: Arrival = []
        if flat.requires_grad:
            flat = Home.apply(flat, arrival)
        out = _Aggregate.apply(flat, weight, scale, streamed, policy, arrival, skips, ref(x))
    return out if x.dim() == 2 else out.view(relation.num_dst, *x.shape[1:])


def sends_gradients(node: Any) -> bool:
    """Whether the backward of an autograd node begins to send gradients that another awaits."""
    sends = isinstance(getattr(node, "arrival", None), list)
    return sends and not getattr(node, "spares_memory", False)
