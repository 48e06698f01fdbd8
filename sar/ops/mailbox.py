"""Mailboxes: a function of all messages of a destination at once, block by block.

What a function like an LSTM over the neighbours needs is not a running reduction: the messages of
a destination come from all partitions, so the whole halo of the layer is held while the blocks
run, and only then. Messages and mailboxes exist for one block of destinations.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.capture import Recording
from sar.ops.mailbox_blocks import MailboxGrads, MailboxPass, fetch_table
from sar.ops.message_blocks import (
    Inputs,
    MessagePass,
    Messages,
    RowLayout,
    block_size,
    pack_rows,
    unpack_rows,
)
from sar.ops.saving import first_order

_warned: set[tuple[str, str, int]] = set()


def run_mailbox(
    relation: Relation,
    messages: Messages,
    inputs: Inputs,
    mail: Sequence[Tensor],
    reduce: Messages,
    columns: Sequence[Tensor],
    like: Sequence[Tensor],
    policy: Policy,
    name: str,
) -> list[Tensor]:
    """Fill the mailbox of every destination and reduce it with a function; collective.

    Args:
        messages, inputs: as for :func:`sar.ops.run_messages`.
        mail: the messages on no edges: trailing shapes and dtypes.
        reduce: its function takes mailboxes [n, in-degree, ...] of n destinations of equal
            in-degree, messages in ascending position, and ``columns``' rows; gives [n, ...]. What
            both functions capture, its ``capturing`` finds.
        columns: [num_dst, ...] each.
        like: the results on no rows.
        name: of the function, for warnings.

    Returns:
        [num_dst, ...] per result; 0 for destinations without edges.

    Raises:
        The error of a function on any rank, on every rank; ``ValueError`` when ranks differ in
        the number of source columns.
    """
    edges = MessagePass.of(relation, messages, "mailbox", policy, inputs)
    boxes = Inputs(list(mail), list(columns), [])
    nodes = MessagePass.of(relation, reduce, "mailbox", policy, boxes)
    layout = RowLayout(inputs.src) if inputs.src else None
    size = block_size(edges, layout, [*inputs.dst, *inputs.edge, *mail])
    spec = MailboxPass(edges, nodes, list(like), size)
    _warn_of_halo(relation, layout, name)
    _warn_of_hub(spec, mail, name)
    tensors = [*inputs.src, *inputs.dst, *inputs.edge, *columns]
    recorded = reduce.capturing.record((*messages.captures, *reduce.captures))
    _agree_sources(relation, len(inputs.src))
    with torch.no_grad():
        results, kept = _forward(spec, [t.detach() for t in tensors], recorded)
    captures, hidden = recorded.tensors(), [*messages.hidden, *reduce.hidden]
    src_needs, joins = _agree_grads(relation, inputs.src, [*tensors, *captures, *hidden])
    if joins:  # nothing asks for a gradient here, but other ranks need this one in backward
        captures.append(torch.zeros(0, requires_grad=True))
    every = [*tensors, *captures, *hidden]
    return list(_Mailbox.apply(spec, kept, captures, hidden, src_needs, results, *every))


def _agree_sources(relation: Relation, count: int) -> None:
    """Ranks that read other columns would fetch rows of other widths, or not at all."""
    found = [int(t) for t in relation.group.all_gather(torch.tensor(count))]
    if len(set(found)) > 1:
        raise ValueError(
            "message function: ranks differ in the number of source columns that they read: "
            f"{found[:16]}, expected one number on all"
        )


def _agree_grads(
    relation: Relation, src: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[list[bool], bool]:
    """Which source gradients any rank wants, and whether this rank must be made to join."""
    enabled = torch.is_grad_enabled()
    own = any(t.requires_grad for t in tensors) and enabled
    wants = torch.tensor([own, *(t.requires_grad and enabled for t in src)], dtype=torch.int64)
    relation.group.all_reduce(wants, "max")
    somewhere, *src_needs = wants.bool().tolist()
    return src_needs, somewhere and not own


def _forward(
    spec: MailboxPass, inputs: list[Tensor], recorded: Recording
) -> tuple[list[Tensor], Tensor | None]:
    """Fetch the halo and run every block; returns the results and the table, if it is kept."""
    relation, policy = spec.messages.relation, spec.messages.policy
    src, dst, edge, columns = spec.split(inputs)
    layout, packed = pack_rows(src)
    table = None
    if layout is not None and packed is not None:
        table = fetch_table(spec, layout, packed)
        del packed
    results = [t.new_zeros((relation.num_dst, *t.shape[1:])) for t in spec.like]
    error = None
    try:
        for block in relation.arrivals.blocks(spec.block_edges):
            values = spec.compute(
                block,
                unpack_rows(layout, table, block.src),
                [t.index_select(0, block.ends) for t in dst],
                [t.index_select(0, block.position) for t in edge],
                [t.index_select(0, block.dst) for t in columns],
                recorded,
            )
            for result, value in zip(results, values, strict=True):
                result.index_copy_(0, block.dst, value)
    except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
        error = caught
    relation.group.agree(error, "update_all")
    return results, None if policy.rematerialize else table


def _warn_of_halo(relation: Relation, layout: RowLayout | None, name: str) -> None:
    rows = sum(relation.plan.recv_counts)
    if rows and layout is not None:
        _warn_once(
            ("halo", name, layout.row_bytes),
            f"reduce function {name}: a mailbox needs the messages of all partitions at once, so "
            f"the whole halo of the layer is held in memory: {rows} rows, "
            f"{rows * layout.row_bytes} bytes",
        )


def _warn_of_hub(spec: MailboxPass, mail: Sequence[Tensor], name: str) -> None:
    degree = spec.messages.relation.arrivals.max_in_degree
    if degree > spec.block_edges:
        row_bytes = sum(RowLayout([t]).row_bytes for t in mail)
        _warn_once(
            ("hub", name, row_bytes),
            f"reduce function {name}: the mailbox of a destination with {degree} edges takes "
            f"{degree * row_bytes} bytes; it is a block of its own, larger than block_bytes allows",
        )


def _warn_once(key: tuple[str, str, int], text: str) -> None:
    """Once per function and width of rows; a training loop calls it again and again."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, stacklevel=2)


class _Mailbox(Function):
    """out_i = r((f(u_j, v_i, w_e) for the edges e = (j -> i), ascending), x_i; captured tensors).

    ==========  =======================  =================================================
    tensor      shape                    owner and lifetime
    ==========  =======================  =================================================
    u           [num_src, ...]           this rank; saved (an input, not a copy)
    v, x        [num_dst, ...]           this rank; saved (inputs)
    w           [num_edges, ...]         this rank; saved (an input)
    captures    any                      this rank; saved (inputs)
    table of u  [num_src + halo, width]  own and peers' rows; fetched in forward, dropped at
                                         its end and fetched again in backward (kept when the
                                         policy does not rematerialize)
    message,    [<= block, ...]          this rank; recomputed per block in backward
    mailbox
    table of du [num_src + halo, width]  this rank; lives in backward, goes home in rounds
    out         [num_dst, ...]           this rank; not saved
    ==========  =======================  =================================================

    Forward passes the results on: the blocks have run already, so that the tensors which the
    functions captured are known and can be inputs (Note [Captured tensors]). Backward, per block:
    (du_j, dv_i, dw_e, dx_i, dcaptures) += (dr(f)/d(u_j, v_i, w_e, x_i, captures))^T dout_i.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: MailboxPass,
        kept: Tensor | None,
        captures: list[Tensor],
        hidden: list[Tensor],
        src_needs: list[bool],
        results: list[Tensor],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.spec, ctx.captures, ctx.hidden, ctx.src_needs = spec, captures, hidden, src_needs
        ctx.kept = kept
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)
        ctx.mark_non_differentiable(*[t for t in results if not t.is_floating_point()])
        return tuple(results)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        collect = MailboxGrads(
            ctx.spec,
            ctx.captures,
            ctx.hidden,
            ctx.saved_tensors,
            ctx.needs_input_grad[6:],
            ctx.src_needs,
        )
        return (None,) * 6 + tuple(collect.run(list(grads), ctx.kept))
