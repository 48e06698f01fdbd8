"""Messages on edges: any function of source, destination and edge rows, reduced or kept.

The generic path behind every reduction that :mod:`sar.ops.aggregate` does not take. Edge values
exist for one block at a time, in both passes; remote rows for one or two rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.relation import AnyRelation, Relation, ReversedRelation
from sar.errors import NotSupportedError
from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import Recording
from sar.ops.message_blocks import Inputs, MessagePass, Messages, Rows, each_block, rows_at
from sar.ops.message_passes import MessageBackward, Recomputed, reduce_messages
from sar.ops.reducers import make_reducer, softmax_sum
from sar.stream import GradientMessages, GradientReturn
from sar.stream.plan import agree_on_gradients


def run_messages(
    relation: AnyRelation,
    messages: Messages,
    reduce: str,
    policy: Policy,
    inputs: Inputs,
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Compute messages on every local edge and reduce them; collective.

    ``reduce`` is ``"sum"``, ``"max"`` or ``"min"`` per destination, or ``"edges"``: keep them.
    ``like`` are the function's outputs on no or some edges: trailing shapes and dtypes. Returns one
    tensor per output: [num_dst, ...], or [num_edges, ...] for ``reduce="edges"``; rows that no edge
    reaches are 0.

    Raises ``NotSupportedError`` for an unknown reduction, ``TypeError`` for messages to reduce that
    are not floating point, and ``ValueError`` on every rank where an input requires a gradient on
    some ranks only.
    """
    if isinstance(relation, ReversedRelation):
        return _run_reversed(relation.forward, messages, reduce, policy, inputs, like)
    relation.group.meter.tell("edge program")
    _agree_inputs(relation, messages, inputs)
    if reduce == "logsumexp":  # its gradient is a function of the messages
        messages = replace(messages, linear_in_src=False)
    spec = MessagePass.of(relation, messages, reduce, policy, inputs)
    tensors = [*inputs.src, *inputs.dst, *inputs.edge]
    recorded = messages.capturing.record(messages.captures)
    with torch.no_grad():
        reducers, kept = reduce_messages(spec, [t.detach() for t in tensors], like, recorded)
        results = [reducer.result() for reducer in reducers]
    captures = recorded.tensors()
    again = MessageBackward(spec, reducers, kept, captures)
    whole = list(Recomputed.apply(again, results, *tensors, *captures, *messages.hidden))
    softmax = softmax_sum(reducers)
    if softmax is not None and not torch.is_inference_mode_enabled():
        softmax.keep(whole[0])
    return whole


def _agree_inputs(relation: Relation, messages: Messages, inputs: Inputs) -> None:
    """Raise on every rank where ranks differ in which inputs ask for gradients."""
    named = [
        (messages.names.get(id(tensor), f"{side} tensor {number}"), tensor)
        for side, tensors in zip(("source", "destination", "edge"), inputs, strict=True)
        for number, tensor in enumerate(tensors)
    ]
    used = [("a tensor that the function uses", t) for t in (*messages.captures, *messages.hidden)]
    fetches = not messages.linear_in_src
    agree_on_gradients(relation.plan, [*named, *used[:1]], len(inputs.src), fetches)


def swap_sides(messages: Messages, inputs: Inputs) -> tuple[Messages, Inputs]:
    """The same messages for the reversed relation."""
    function = messages.function

    def swapped(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        return function(dst, src, edge, position)

    turned = replace(messages, function=swapped, linear_in_src=False)
    return turned, Inputs(inputs.dst, inputs.src, inputs.edge)


def _run_reversed(
    forward: Relation,
    messages: Messages,
    reduce: str,
    policy: Policy,
    inputs: Inputs,
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Messages over reversed edges: their destinations are the sources of ``forward``."""
    messages, inputs = swap_sides(messages, inputs)
    if reduce == "edges":
        return run_messages(forward, messages, reduce, policy, inputs, like)
    push = _PUSHES.get(reduce)
    if push is None or len(like) != 1:
        raise NotSupportedError(
            f"reduction over reversed edges: got {reduce!r}, expected sum, mean, max or min"
        )
    forward.group.meter.tell("edge program")
    return [push(forward, messages, policy, inputs, like[0])]


# Messages reduced at the sources of their edges: every other reduction ends where the edges end,
# which is where they are stored. Here each rank reduces the messages of its own edges per source
# and round, partial results are pushed to the owners, and these combine what comes home.


def push_sum(
    relation: Relation, messages: Messages, policy: Policy, inputs: Inputs, like: Tensor
) -> Tensor:
    """Sum of messages of all edges out of each owned source row, [num_src, ...] or 0; collective.
    ``like`` is the message on some edges: trailing shape and floating point dtype."""
    spec, tensors = _spec(relation, messages, policy, inputs, like)
    recorded = messages.capturing.record(messages.captures)
    with torch.no_grad():
        total = _push(spec, [t.detach() for t in tensors], like, recorded)
    captures = recorded.tensors()
    total = total.view(-1, *like.shape[1:]).to(like.dtype)
    again = PushBackward(spec, captures)
    return Recomputed.apply(again, [total], *tensors, *captures, *messages.hidden)[0]


def push_logsumexp(
    relation: Relation, messages: Messages, policy: Policy, inputs: Inputs, like: Tensor
) -> Tensor:
    """(m_j, l_j) per source row, wide, [num_src, ..., 2]; 0 for a row without edges. Collective.

    l_j = log sum over the edges e out of j of exp(z_e - m_j), with m_j their largest message, which
    is a constant to the gradient.
    """
    with torch.no_grad():
        largest = push_largest(relation, messages, policy, inputs, like)
        empty = largest == -math.inf
        largest = largest.masked_fill_(empty, 0).view(-1, *like.shape[1:])
    function = messages.function

    def shifted(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        (values,) = function(src[1:], dst, edge, position)
        return [(values - src[0]).exp()]

    moved = replace(messages, function=shifted, linear_in_src=False)
    wide = like.to(wide_dtype(like.dtype))
    total = push_sum(relation, moved, policy, inputs._replace(src=[largest, *inputs.src]), wide)
    total = total.masked_fill(empty.view_as(total), 1)
    return torch.stack([largest, total.log()], -1)


def push_largest(
    relation: Relation, messages: Messages, policy: Policy, inputs: Inputs, like: Tensor
) -> Tensor:
    """Largest message per source row, [num_src, width], without gradient, in the wide dtype; -inf
    for a row without edges. Collective."""
    spec, tensors = _spec(relation, messages, policy, inputs, like)
    recorded = messages.capturing.record()
    return _push(spec, [t.detach() for t in tensors], like, recorded, largest=True)


def _spec(
    relation: Relation, messages: Messages, policy: Policy, inputs: Inputs, like: Tensor
) -> tuple[MessagePass, list[Tensor]]:
    spec = MessagePass.of(relation, messages, "sum", policy, inputs)
    width = math.prod(like.shape[1:]) * wide_dtype(like.dtype).itemsize
    return replace(spec, pushed_bytes=width), [*inputs.src, *inputs.dst, *inputs.edge]


def _push(
    spec: MessagePass,
    inputs: list[Tensor],
    like: Tensor,
    recorded: Recording,
    largest: bool = False,
) -> Tensor:
    """Reduce this rank's messages and those that come home: [num_src, width] in the wide dtype."""
    relation, plan = spec.relation, spec.relation.plan
    src, dst, edge = spec.split(inputs)
    width, dtype = math.prod(like.shape[1:]), wide_dtype(like.dtype)
    start, combine = (-math.inf, _keep_largest) if largest else (0.0, add_rows)
    own = torch.full((relation.num_src, width), start, dtype=dtype, device=plan.device)
    home = GradientReturn(GradientMessages(plan, width, dtype, combine), lambda: own)
    for step, blocks in each_block(spec, src, edge, [*dst, *edge, like]):
        target = own if step.round is None else home.buffer(step.round).fill_(start)
        for block, src_rows in blocks:
            sides = rows_at(dst, block.dst), rows_at(edge, block.position)
            (values,) = spec.call(block, src_rows, *sides, recorded)
            combine(target, block.src, values.reshape(len(values), width).to(dtype))
        if step.round is not None:
            home.send(step.round, target)
    return home.finish()


def _keep_largest(home: Tensor, idx: Tensor, rows: Tensor) -> None:
    home.scatter_reduce_(0, idx.long().unsqueeze(1).expand_as(rows), rows, "amax")


@dataclass
class PushBackward:
    """out_j = sum over edges e = (j -> i) of m_e, m_e = f(u_j, v_i, w_e; captured tensors).

    Partial sums [<= round, width] for remote rows went home round by round. dm_e = dout_j, so all
    gradients are those of the number sum_e <m_e, dout_j>, where dout is fetched like any other
    source row.
    """

    spec: MessagePass
    captures: list[Tensor]

    def run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: list[Tensor]
    ) -> list[Tensor | None]:
        spec, (dout,) = self.spec, grads
        function = _weighted(spec.messages.function)
        messages = replace(spec.messages, function=function, linear_in_src=False)
        spec = replace(spec, messages=messages, num_src=spec.num_src + 1)
        ones = dout.new_ones((spec.relation.num_dst, 1))
        again = MessageBackward(spec, [make_reducer("sum", 0, ones[:0])], [], self.captures)
        return again.run([dout.contiguous(), *tensors], [False, *needs], [ones])[1:]


def _weighted(function: Callable[..., Rows]) -> Callable[..., Rows]:
    """The sum over features of (message x first source row), [e, 1], as a message function."""

    def product(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        (values,) = function(src[1:], dst, edge, position)
        return [(values * src[0]).reshape(len(values), -1).sum(1, keepdim=True)]

    return product


def push_extreme(
    relation: Relation,
    messages: Messages,
    policy: Policy,
    inputs: Inputs,
    like: Tensor,
    *,
    largest: bool,
) -> Tensor:
    """Largest or smallest message of all edges out of each owned source row, [num_src, ...].

    out_j = sum over the edges e out of j of [e = w_j] m_e, where w_j is the edge with the extreme
    message, of equal ones that with the smallest of ``relation.keys``: a constant to the gradient,
    which is the winner's alone. Three streams forward: extreme, winner, message. Collective.
    0 for a row without edges. Raises ``TypeError`` for messages that are not floating point.
    """
    if not like.is_floating_point():
        raise TypeError(f"messages: got {like.dtype}, expected a floating point dtype to reduce")
    of, sign = messages.function, 1 if largest else -1
    wide = like.to(wide_dtype(like.dtype))

    def run(
        function: Callable[[Rows, Rows, Rows, Tensor], Tensor], src: list[Tensor], like: Tensor
    ) -> Tensor:
        given = inputs._replace(src=[*src, *inputs.src])
        moved = replace(messages, function=lambda *rows: [function(*rows)])
        return push_largest(relation, moved, policy, given, like).view(-1, *like.shape[1:])

    def signed(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Tensor:
        return sign * of(src, dst, edge, position)[0].to(wide.dtype)

    def name_of_winner(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Tensor:
        values, best = signed(src[1:], dst, edge, position), src[0]
        won = (values == best) | (values.isnan() & best.isnan())
        return torch.where(won, _names(relation, position, values), -math.inf)

    def winner(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        (values,) = of(src[1:], dst, edge, position)
        return [torch.where(_names(relation, position, values) == src[0], values, 0)]

    with torch.no_grad():
        best = run(signed, [], wide)
        names = run(name_of_winner, [best], like.double())
        del best
    chosen = replace(messages, function=winner, linear_in_src=False)
    given = inputs._replace(src=[names, *inputs.src])
    return push_sum(relation, chosen, policy, given, wide).to(like.dtype)


def _names(relation: Relation, position: Tensor, values: Tensor) -> Tensor:
    """Names of edges to compare, float64 [e, 1, ...]: minus the edge's key; exact below 2^53."""
    keys = relation.keys.index_select(0, position)
    return keys.double().neg_().view(-1, *[1] * (values.dim() - 1))


_PUSHES: dict[str, Callable[..., Tensor]] = {
    "sum": push_sum,
    "logsumexp": push_logsumexp,
    "max": partial(push_extreme, largest=True),
    "min": partial(push_extreme, largest=False),
}
