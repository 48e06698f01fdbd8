"""Messages reduced at the sources of their edges: partial results are pushed to the owners.

Every other reduction ends where the edges end, which is where they are stored. Here each rank
reduces the messages of its own edges per source and round, and the owners combine what comes home.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import Recording
from sar.ops.message_blocks import (
    Inputs,
    MessagePass,
    Messages,
    Rows,
    block_size,
    blocks,
    pack_rows,
    passing,
    unpack_rows,
)
from sar.ops.message_grads import MessageGrads
from sar.ops.reducers import make_reducer
from sar.ops.saving import first_order
from sar.stream import GradientMessages, GradientReturn


def push_sum(
    relation: Relation, messages: Messages, policy: Policy, inputs: Inputs, like: Tensor
) -> Tensor:
    """Sum of the messages of all edges that start in each owned source row; collective.

    Args:
        like: the message on some edges: trailing shape and floating point dtype.

    Returns:
        [num_src, ...]; 0 for a row without edges.
    """
    spec, tensors = _spec(relation, messages, policy, inputs, like)
    recorded = messages.capturing.record(messages.captures)
    with torch.no_grad():
        total = _push(spec, [t.detach() for t in tensors], like, recorded)
    captures = recorded.tensors()
    every = [*tensors, *captures, *messages.hidden]
    return _PushSum.apply(spec, captures, total.view(-1, *like.shape[1:]).to(like.dtype), *every)


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
    """[num_src, width] largest message per source row, without gradient, in the wide dtype.

    -inf for a row without edges. Collective.
    """
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
    """[num_src, width] in the wide dtype: what this rank's edges give, and what comes home."""
    relation, plan = spec.relation, spec.relation.plan
    src, dst, edge = spec.split(inputs)
    width, dtype = math.prod(like.shape[1:]), wide_dtype(like.dtype)
    start, combine = (-math.inf, _keep_largest) if largest else (0.0, add_rows)
    own = torch.full((relation.num_src, width), start, dtype=dtype, device=plan.device)
    home = GradientReturn(GradientMessages(plan, width, dtype, combine), lambda: own)
    layout, packed = pack_rows(src)
    size = block_size(spec, layout, [*dst, *edge, like])
    for step in passing(spec, layout, packed):
        target = own if step.round is None else home.buffer(step.round).fill_(start)
        for block in blocks(spec, step, edge, size):
            dst_rows = [t.index_select(0, block.dst) for t in dst]
            edge_rows = [t.index_select(0, block.position) for t in edge]
            src_rows = unpack_rows(layout, step.rows, block.src)
            (values,) = spec.call(block, src_rows, dst_rows, edge_rows, recorded)
            combine(target, block.src, values.reshape(len(values), width).to(dtype))
        if step.round is not None:
            home.send(step.round, target)
    return home.finish()


def _keep_largest(home: Tensor, idx: Tensor, rows: Tensor) -> None:
    home.scatter_reduce_(0, idx.long().unsqueeze(1).expand_as(rows), rows, "amax")


class _PushSum(Function):
    """out_j = sum over edges e = (j -> i) of m_e, m_e = f(u_j, v_i, w_e; captured tensors).

    ==========  =====================  ====================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  ====================================================
    u, v, w     rows of each side      this rank; saved (inputs, not copies)
    captures    any                    this rank; saved (inputs)
    halo of u   [<= round, width]      peers; fetched per round in both passes
    message     [<= block, ...]        this rank; computed per block in both passes
    partial     [<= round, width]      this rank; sums for remote rows, sent home per round
    out         [num_src, ...]         this rank; not saved
    ==========  =====================  ====================================================

    Forward: as above; the result is passed on. Backward: dm_e = dout_j, so all gradients are those
    of the number sum_e <m_e, dout_j>, where dout is fetched like any other source row.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: MessagePass, captures: list[Tensor], total: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.spec, ctx.captures = spec, captures
        ctx.save_for_backward(*tensors)
        return total.view_as(total)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        spec, relation = ctx.spec, ctx.spec.relation
        messages = replace(
            spec.messages, function=_weighted(spec.messages.function), linear_in_src=False
        )
        spec = replace(spec, messages=messages, num_src=spec.num_src + 1)
        ones = dout.new_ones((relation.num_dst, 1))
        reducer = make_reducer("sum", 0, ones[:0])
        tensors, needs = [dout.contiguous(), *ctx.saved_tensors], [False, *ctx.needs_input_grad[3:]]
        collect = MessageGrads(spec, [reducer], [], ctx.captures, tensors, needs)
        return (None, None, None, *collect.run([ones])[1:])


def _weighted(function: Callable[..., Rows]) -> Callable[..., Rows]:
    """sum over the features of (message x first source row), [e, 1]."""

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
    """Largest or smallest message of all edges that start in each owned source row; collective.

    out_j = sum over the edges e out of j of [e = w_j] m_e, where w_j is the edge with the extreme
    message, of equal ones that with the smallest of ``relation.keys``: a constant to the gradient,
    which is the winner's alone. Three streams forward: extreme, winner, message.

    Args:
        like: the message on some edges: trailing shape and floating point dtype.

    Returns:
        [num_src, ...]; 0 for a row without edges.

    Raises ``TypeError`` for messages that are not floating point.
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
    """float64 [e, 1, ...]: less the larger the edge's key is; exact below 2^53."""
    keys = relation.keys.index_select(0, position)
    return keys.double().neg_().view(-1, *[1] * (values.dim() - 1))
