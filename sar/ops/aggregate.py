"""Sum and mean of source rows over edges: the linear reduction that carries most models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from sar._private import without_modes
from sar.config import CONSTANT_INPUTS, Policy
from sar.edges.constant import constants_of
from sar.edges.push_pull import Fewest, LinearPlan, LinearRelation, linear_relation
from sar.edges.relation import LOCAL, Relation
from sar.kernels import Csc, Factors, add_rows, spmm, spmm_add, spmm_into, wide_dtype
from sar.ops.first_order import first_order
from sar.ops.saving import spares_memory
from sar.ops.weights import weight_gradient
from sar.stream import GradientReturn, Pass, Round
from sar.stream.passes import WINDOW
from sar.stream.plan import agree_wanted
from sar.stream.zeros import NonZeros, Skipped, skipped

Streamed = Relation | LinearRelation
Place = Callable[[], Tensor | None]  # memory of owned rows that nobody reads any more, if any


def aggregate_forward(
    relation: Streamed, x: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    kept: list[Tensor] | None = None, wire: NonZeros | None = None,
) -> Tensor:  # fmt: skip
    """[num_dst, width] scaled sums in the wide dtype of ``x`` ([num_src, width], contiguous).

    The halo of each round is appended to ``kept``; ``wire`` says how it travels, if not as it is.
    Where memory is spared, a rank's own rows wait for the first round, see :func:`_local_last`.
    """
    out, finish = begin_aggregate(relation, x, weight, scale, policy, kept, wire)
    finish()
    return out


def begin_aggregate(
    relation: Streamed, x: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    kept: list[Tensor] | None = None, wire: NonZeros | None = None,
) -> tuple[Tensor, Callable[[], None]]:  # fmt: skip
    """:func:`aggregate_forward` in two parts: sums over a rank's own edges, while the first rounds
    travel, and what waits for the rounds and adds them."""
    factors = Factors(edge=weight, row=scale)
    messages = None if wire is None else wire.rows(x, kept is not None)
    steps = iter(
        Pass(
            relation, policy, x, order=weight is not None, keep=kept, messages=messages,
            local_last=spares_memory(),
        )
    )  # fmt: skip
    out = spmm(next(steps).shard, x, factors)  # while rounds are on the wire
    sums = out.detach()  # autograd may know the other by then

    def finish() -> None:
        for step in steps:
            spmm_add(sums, step.shard, step.rows, factors)

    return out, finish


def aggregate_backward(
    relation: Streamed, dout: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy,
    wire: NonZeros | None = None, spares_memory: bool = False,
    place: Place | None = None,
) -> GradientReturn:  # fmt: skip
    """Gradients of [num_src, width] rows, in the wide dtype, the last rounds of them still on
    their way home; no row is fetched. ``wire`` says how they travel, if not as they are; with
    ``spares_memory`` all are home. ``place`` is called once rounds are on their way."""
    if scale is not None and dout.dtype != scale.dtype:  # a narrow factor would lose digits
        dout, scale = (dout * scale.unsqueeze(1)).to(dout.dtype), None
    plan, factors, order = relation.plan, Factors(edge=weight, gathered=scale), weight is not None
    num_rounds = plan.num_rounds(policy, dout.shape[1] * dout.element_size())
    shards = relation.transposed(num_rounds, policy, order=order)

    def local() -> Tensor:
        own = next(relation.transposed(LOCAL, policy, order=order))
        return spmm(own, dout, factors, None if place is None else place())

    shape = (dout.shape[1], dout.dtype)
    messages = None if wire is None else wire.gradients(*shape)
    rounds = plan.rounds(num_rounds)
    home = GradientReturn(
        plan, *shape, local, add_rows, messages=messages,
        local_last=_local_last(spares_memory, rounds),
    )  # fmt: skip
    _send_sums(home, rounds, shards, dout, factors)
    if spares_memory:
        home.settle()
    home.own()
    return home


def _send_sums(
    home: GradientReturn,
    rounds: Sequence[Round],
    shards: Iterable[Csc],
    dout: Tensor,
    factors: Factors,
) -> None:
    """The gradients of each round; no buffer is held when this returns."""
    for (_, grads), shard in zip(home.each(rounds), shards, strict=True):
        spmm_into(grads, shard, dout, factors)


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
        wire = NonZeros(relation.plan, x, summed) if skips else None
        ctx.wire = None if skips is Skipped.ROWS else wire
        out = aggregate_forward(relation, x, weight, scale, policy, ctx.kept, wire)
        if ctx.spares_memory:
            relation.plan.group.pool.clear()
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, x = ctx.saved_tensors
        dx, dweight, dout = None, None, dout.contiguous()
        if ctx.needs_input_grad[0]:
            if ctx.wire is not None:
                ctx.wire.check()
            home = aggregate_backward(
                ctx.relation, dout, weight, scale, ctx.policy, ctx.wire, ctx.spares_memory
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
        return dx, dweight, *(None,) * 6


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
        return _agreed_aggregate(relation, x, op, policy, weight)


def agree_sums(relation: Relation, x: Tensor, policy: Policy) -> Skipped:
    """What travels of rows ``x`` of a sum; ``ValueError`` on all ranks where they differ in how.

    Who keeps constant rows waits for the others in collectives of its own.
    """
    skips = skipped(x, policy) if relation.group.size > 1 else Skipped.NOTHING
    agree_skipped(relation, skips, policy)
    return skips


def agree_skipped(relation: Relation, skips: Skipped, policy: Policy) -> None:
    """:func:`agree_sums` of rows of which this rank knows what travels."""
    what = "(number of the mode of constant_inputs, what goes without zeros)"
    mode = CONSTANT_INPUTS.index(policy.constant_inputs)
    relation.plan.agree_once(what, mode, int(skips))


def mean_scale(relation: Relation, dtype: torch.dtype) -> Tensor:
    """[num_dst] 1 / in-degree, and 1 where there is no edge, in the wide dtype of ``dtype``; kept.

    Not to be written into.
    """
    wide = wide_dtype(dtype)

    def make() -> Tensor:
        return relation.in_degrees.clamp(min=1).to(wide).reciprocal_()

    return relation.derived(("1 / in-degree", wide), make)


@dataclass
class Sums:
    """S A over the edges of a relation, as the two passes of a layer stream it.

    Attributes:
        scale: S, [num_dst]; ``None`` is 1.
        streamed: what is left of the relation for this rank to do.
        zeros: of one call, where rows travel without theirs; see :meth:`begin`.
    """

    policy: Policy
    scale: Tensor | None
    streamed: Streamed
    skips: Skipped
    zeros: NonZeros | None = None

    def begin(self, rows: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """S A rows, which are whole when what comes with them has been called."""
        zeros = None
        if self.skips:
            zeros = NonZeros(self.streamed.plan, rows, ref(rows))
            self.zeros = zeros if self.skips is Skipped.ROWS_AND_GRADIENTS else None
        return begin_aggregate(self.streamed, rows, None, self.scale, self.policy, None, zeros)

    def home(self, dout: Tensor, place: Place | None = None) -> GradientReturn:
        """A^T S dout, the last rounds of it still on their way."""
        if self.zeros is not None:
            self.zeros.check()
        return aggregate_backward(
            self.streamed, dout, None, self.scale, self.policy, self.zeros, place=place
        )


def agreed_sums(
    relation: Relation,
    rows: Tensor,
    policy: Policy,
    what: str,
    scale: Callable[[], Tensor | None],
    width: int | None = None,
) -> Sums:
    """Sums of rows that ask for a gradient; kept for the next such call.

    Collective when such rows come for the first time, as :func:`aggregate` of them is.

    Args:
        rows: [*, *] float32 or float64, which are summed as they are, or that they are made from.
        what: names the scale among those of the relation.
        width: of the rows that are summed, if they are made from ``rows``.
    """
    skips = Skipped.NOTHING
    if policy.zeros == "skip" and relation.group.size > 1:
        skips = Skipped.ROWS if width is not None else skipped(rows, policy)
    key = what, rows.shape[1] if width is None else width, rows.dtype, policy, skips

    def make() -> tuple[Tensor | None, tuple[LinearPlan, Fewest] | None]:
        like = rows
        if width is not None:
            like = rows.new_empty((0, width)).requires_grad_()
        agree_wanted(relation.plan, [("rows of a sum", like)], 1)
        agree_skipped(relation, skips, policy)
        streamed = linear_relation(relation, like, None, policy)
        if isinstance(streamed, LinearRelation):
            return scale(), (streamed.plan, streamed.fewest)
        return scale(), None

    made, fewest = relation.derived(key, make)  # which would never end if it held the relation
    streamed = relation if fewest is None else LinearRelation(relation, *fewest)
    return Sums(policy, made, streamed, skips)


def _agreed_aggregate(
    relation: Relation, x: Tensor, op: str, policy: Policy, weight: Tensor | None
) -> Tensor:
    skips = agree_sums(relation, x, policy)

    def compute() -> Tensor:
        return aggregate_agreed(relation, x, op, policy, weight, skips)

    tensors = [x] if weight is None else [x, weight]
    if any(t.requires_grad for t in tensors) or policy.constant_inputs == "off":
        return compute()
    return constants_of(relation).reduce(tensors, op, policy, compute)


def aggregate_agreed(
    relation: Relation, x: Tensor, op: str, policy: Policy, weight: Tensor | None, skips: Skipped
) -> Tensor:
    """:func:`aggregate` of rows on which the ranks have agreed, by :func:`agree_sums`."""
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    scale = mean_scale(relation, x.dtype) if op == "mean" else None
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
