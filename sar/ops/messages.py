"""Messages on edges: any function of source, destination and edge rows, reduced or kept.

The generic path behind every reduction that :mod:`sar.ops.aggregate` does not take. Edge values
exist for one block at a time, in both passes; remote rows for one or two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import AnyRelation, Relation, ReversedRelation
from sar.errors import NotSupportedError
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
from sar.ops.push import push_extreme, push_logsumexp, push_sum
from sar.ops.reducers import Reducer, make_reducer
from sar.ops.saving import first_order
from sar.ops.softmax_sum import SoftmaxSum, softmax_sum
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

    Args:
        reduce: ``"sum"``, ``"max"`` or ``"min"`` per destination, or ``"edges"``: keep them.
        inputs: what the message function reads.
        like: the function's outputs on no or some edges: trailing shapes and dtypes.

    Returns:
        One tensor per output: [num_dst, ...], or [num_edges, ...] for ``reduce="edges"``. Rows
        that no edge reaches are 0.

    Raises:
        NotSupportedError: an unknown reduction.
        TypeError: messages to be reduced are not floating point.
        ValueError: on every rank, an input requires a gradient on some ranks only.
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
        reducers, kept = _forward(spec, [t.detach() for t in tensors], like, recorded)
        results = [reducer.result() for reducer in reducers]
    captures = recorded.tensors()
    every = [*tensors, *captures, *messages.hidden]
    return list(_MessagePass.apply(spec, reducers, kept, captures, results, *every))


def _agree_inputs(relation: Relation, messages: Messages, inputs: Inputs) -> None:
    """Raise on every rank where ranks differ in the gradients that this pass would compute."""
    named = [
        (messages.names.get(id(tensor), f"{side} tensor {number}"), tensor)
        for side, tensors in zip(("source", "destination", "edge"), inputs, strict=True)
        for number, tensor in enumerate(tensors)
    ]
    used = [("a tensor that the function uses", t) for t in (*messages.captures, *messages.hidden)]
    fetches = not messages.linear_in_src
    agree_on_gradients(relation.plan, [*named, *used[:1]], len(inputs.src), fetches)


def swap_sides(messages: Messages, inputs: Inputs) -> tuple[Messages, Inputs]:
    """The same messages for a relation whose edges are turned round."""
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


_PUSHES: dict[str, Callable[..., Tensor]] = {
    "sum": push_sum,
    "logsumexp": push_logsumexp,
    "max": partial(push_extreme, largest=True),
    "min": partial(push_extreme, largest=False),
}


def _forward(
    spec: MessagePass, inputs: list[Tensor], like: Sequence[Tensor], recorded: Recording
) -> tuple[list[Reducer], list[Tensor]]:
    """Run every block in stream order; returns the filled reducers and the halo, if kept."""
    relation = spec.relation
    src, dst, edge = spec.split(inputs)
    num_rows = relation.num_edges if spec.reduce == "edges" else relation.num_dst
    reducers = [_reducer(spec, num_rows, out) for out in like]
    softmax = softmax_sum(reducers)
    keep = not spec.policy.rematerialize and not spec.messages.linear_in_src
    kept: list[Tensor] = []
    layout, packed = pack_rows(src)
    size = block_size(spec, layout, [*dst, *edge, *like])
    for step in passing(spec, layout, packed, kept if keep else None):
        for block in blocks(spec, step, edge, size):
            src_rows = unpack_rows(layout, step.rows, block.src)
            dst_rows = [t.index_select(0, block.dst) for t in dst]
            edge_rows = [t.index_select(0, block.position) for t in edge]
            weigh = None if softmax is None else softmax.weigher(block.dst)
            values = spec.call(block, src_rows, dst_rows, edge_rows, recorded, weigh)
            for reducer, value in zip(reducers, values, strict=True):
                reducer.add(block.dst, block.position, value)
    return reducers, kept


def _reducer(spec: MessagePass, num_rows: int, like: Tensor) -> Reducer:
    weighting = spec.messages.weighting
    if weighting is None:
        return make_reducer(spec.reduce, num_rows, like)
    return SoftmaxSum(weighting, spec.relation.in_degrees, like)


class _MessagePass(Function):
    """out_i = reduce over edges e = (j -> i) of f(u_j, v_i, w_e; captured tensors).

    ==========  =====================  ====================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  ====================================================
    u           [num_src, ...]         this rank; saved (an input, not a copy)
    v           [num_dst, ...]         this rank; saved (an input)
    w           [num_edges, ...]       this rank; saved (an input)
    captures    any                    this rank; saved (inputs)
    halo of u   [<= round, width]      peers; fetched per round in forward and, unless f is
                                       linear in u, again in backward (kept instead when the
                                       policy does not rematerialize)
    message     [<= block, ...]        this rank; recomputed per block in backward
    winner      [num_dst, ...] int32   this rank; saved for max and min: the winning edge
    out         [num_dst, ...]         this rank; not saved, but for a softmax-weighted sum
    m, 1 / t    [num_dst, H]           this rank; of :class:`sar.ops.softmax_sum.SoftmaxSum`
    ==========  =====================  ====================================================

    Forward passes the results on: the blocks have run already, so that the tensors which the
    function captured are known and can be inputs (Note [Captured tensors]). Backward: with
    g_e = dout_i for a sum, dout_i where e won for max and min, dout_e for kept edges, per block
    (du_j, dv_i, dw_e, dcaptures) += (df/d(u_j, v_i, w_e, captures))^T g_e;
    du of halo rows goes home round by round.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: MessagePass,
        reducers: list[Reducer],
        kept: list[Tensor],
        captures: list[Tensor],
        results: list[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.spec, ctx.reducers, ctx.kept, ctx.captures = spec, reducers, kept, captures
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)
        whole = tuple(_alias(result) for result in results)
        ctx.mark_non_differentiable(*[t for t in whole if not t.is_floating_point()])
        softmax = softmax_sum(reducers)
        if softmax is not None and not torch.is_inference_mode_enabled():
            softmax.keep(whole[0])
        return whole

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        spec, needs, tensors = ctx.spec, ctx.needs_input_grad[5:], ctx.saved_tensors
        reducers, softmax = ctx.reducers, softmax_sum(ctx.reducers)
        if softmax is not None and softmax.is_written:
            reducers = _reduced_again(spec, tensors, grads)
        collect = MessageGrads(spec, reducers, ctx.kept, ctx.captures, tensors, needs)
        return (None, None, None, None, None, *collect.run(list(grads)))


def _reduced_again(
    spec: MessagePass, tensors: Sequence[Tensor], like: Sequence[Tensor]
) -> list[Reducer]:
    """The reducers of another forward pass over the saved ``tensors``; collective."""
    inputs = [t.detach() for side in spec.split(tensors) for t in side]
    reducers, _ = _forward(spec, inputs, like, spec.messages.capturing.record())
    softmax = softmax_sum(reducers)
    if softmax is not None:
        softmax.keep(softmax.result())
    return reducers


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, but no view of it to autograd: the caller may write into the result."""
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]
