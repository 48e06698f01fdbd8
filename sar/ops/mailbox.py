"""Mailboxes: a function of all messages of a destination at once, block by block.

A function like an LSTM over the neighbours is no running reduction: the messages of a destination
come from all partitions, so the whole halo of the layer is in one table while the blocks run.
Messages and mailboxes exist for one block of destinations. Backward fetches the halo again, runs
blocks under grad, and sends gradients home from one table.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.mailbox_edges import MailBlock
from sar.edges.relation import Relation
from sar.ops.capture import Recording
from sar.ops.halo import fetch_halo, return_halo
from sar.ops.message_blocks import (
    Block,
    Inputs,
    MessagePass,
    Messages,
    RowLayout,
    Rows,
    block_size,
    pack_rows,
    row_bytes,
    rows_at,
    unpack_rows,
)
from sar.ops.message_passes import BlockGrads, Recomputed

_MAX_RUNS = 2**32  # runs in a block, for the numbers that random functions are seeded by
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
            in-degree, messages in ascending position, and ``columns``' rows; gives [n, ...]. Its
            ``capturing`` finds what both functions capture.
        columns: [num_dst, ...] each.
        like: the results on no rows.

    Returns [num_dst, ...] per result; 0 for destinations without edges. Raises on every rank the
    error of a function on any, and ``ValueError`` where ranks differ in numbers of source columns.
    """
    edges = MessagePass.of(relation, messages, "mailbox", policy, inputs)
    boxes = Inputs(list(mail), list(columns), [])
    nodes = MessagePass.of(relation, reduce, "mailbox", policy, boxes)
    layout = RowLayout(inputs.src) if inputs.src else None
    size = block_size(edges, layout, [*inputs.dst, *inputs.edge, *mail])
    spec = MailboxPass(edges, nodes, list(like), size)
    _warn_of_memory(spec, layout, mail, name)
    tensors = [*inputs.src, *inputs.dst, *inputs.edge, *columns]
    recorded = reduce.capturing.record((*messages.captures, *reduce.captures))
    _agree_sources(relation, len(inputs.src))
    with torch.no_grad():
        results, kept = _forward(spec, [t.detach() for t in tensors], recorded)
    captures, hidden = recorded.tensors(), [*messages.hidden, *reduce.hidden]
    src_needs, joins = _agree_grads(relation, inputs.src, [*tensors, *captures, *hidden])
    if joins:  # nothing asks for a gradient here, but other ranks need this one in backward
        captures.append(torch.zeros(0, requires_grad=True))
    again = MailboxBackward(spec, kept, captures, hidden, src_needs)
    return list(Recomputed.apply(again, results, *tensors, *captures, *hidden))


def _agree_sources(relation: Relation, count: int) -> None:
    """``ValueError`` on all ranks that differ: they would fetch rows of other widths, or none."""
    found = [int(t) for t in relation.group.all_gather(torch.tensor(count))]
    if len(set(found)) > 1:
        raise ValueError(
            "message function: ranks differ in the number of source columns that they read: "
            f"{found[:16]}, expected one number on all"
        )


def _agree_grads(
    relation: Relation, src: Sequence[Tensor], tensors: Sequence[Tensor]
) -> tuple[list[bool], bool]:
    """Which source gradients any rank wants, and whether this rank must join others in backward."""
    enabled = torch.is_grad_enabled()
    own = any(t.requires_grad for t in tensors) and enabled
    wants = torch.tensor([own, *(t.requires_grad and enabled for t in src)], dtype=torch.int64)
    relation.group.all_reduce(wants, "max")
    somewhere, *src_needs = wants.bool().tolist()
    return src_needs, somewhere and not own


def _forward(
    spec: MailboxPass, inputs: list[Tensor], recorded: Recording
) -> tuple[list[Tensor], Tensor | None]:
    """Fetch the halo and run every block; the results, and the table if it is kept."""
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
        for block in relation.mailbox_edges.blocks(spec.block_edges):
            values = spec.compute(
                block,
                unpack_rows(layout, table, block.src),
                rows_at(dst, block.ends),
                rows_at(edge, block.position),
                rows_at(columns, block.dst),
                recorded,
            )
            for result, value in zip(results, values, strict=True):
                result.index_copy_(0, block.dst, value)
    except Exception as caught:  # noqa: BLE001 - a user's function; raised on every rank
        error = caught
    relation.group.agree(error, "update_all")
    return results, None if policy.rematerialize else table


def _warn_of_memory(
    spec: MailboxPass, layout: RowLayout | None, mail: Sequence[Tensor], name: str
) -> None:
    """Warn that the whole halo is held at once, and of the mailbox of a hub."""
    relation = spec.messages.relation
    rows, degree = sum(relation.plan.recv_counts), relation.mailbox_edges.max_in_degree
    if rows and layout is not None:
        _warn_once(
            ("halo", name, layout.row_bytes),
            f"reduce function {name}: a mailbox needs the messages of all partitions at once, so "
            f"the whole halo of the layer is held in memory: {rows} rows, "
            f"{rows * layout.row_bytes} bytes",
        )
    if degree > spec.block_edges:
        row_bytes = sum(RowLayout([t]).row_bytes for t in mail)
        _warn_once(
            ("hub", name, row_bytes),
            f"reduce function {name}: the mailbox of a destination with {degree} edges takes "
            f"{degree * row_bytes} bytes; it is a block of its own, larger than block_bytes allows",
        )


def _warn_once(key: tuple[str, str, int], text: str) -> None:
    """Warn once per function and width of rows, not at each call of a training loop."""
    if key not in _warned:
        _warned.add(key)
        warnings.warn(text, stacklevel=2)


@dataclass(frozen=True)
class MailboxPass:
    """One pass of a mailbox: messages on edges, and a function of all messages of a destination.

    Attributes:
        messages: source, destination and edge rows -> mailbox columns [e, ...].
        reduce: mailbox columns [n, in-degree, ...] (as its source rows) and destination columns
            [n, ...] -> results [n, ...].
        like: results on no rows: their trailing shapes and dtypes.
        block_edges: edges of a block, unless one destination alone has more.
    """

    messages: MessagePass
    reduce: MessagePass
    like: list[Tensor]
    block_edges: int

    def split(self, values: list) -> tuple[list, list, list, list]:
        """Source, destination and edge inputs of the messages, then the columns of the function."""
        src, dst, edge = self.messages.split(values)
        start = len(src) + len(dst) + len(edge)
        return src, dst, edge, list(values[start : start + self.reduce.num_dst])

    def compute(
        self,
        block: MailBlock,
        src_rows: Rows,
        dst_rows: Rows,
        edge_rows: Rows,
        node_rows: Rows,
        mode: AbstractContextManager,
    ) -> Rows:
        """Results [n, ...] of a block, from [e, ...] rows of edges and [n, ...] of destinations."""
        mail = self._mail(block, src_rows, dst_rows, edge_rows, mode)
        parts: list[Rows] = []
        row = edge = 0
        for index, (count, degree) in enumerate(block.runs):
            rows, edges = slice(row, row + count), slice(edge, edge + count * degree)
            boxes = [m[edges].reshape(count, degree, *m.shape[1:]) for m in mail]
            number = block.number * _MAX_RUNS + index
            run = Block(number, block.dst[rows], block.dst[rows], block.dst[rows])
            parts.append(self.reduce.call(run, boxes, [t[rows] for t in node_rows], [], mode))
            row, edge = rows.stop, edges.stop
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    def _mail(
        self,
        block: MailBlock,
        src_rows: Rows,
        dst_rows: Rows,
        edge_rows: Rows,
        mode: AbstractContextManager,
    ) -> Rows:
        """Messages [e, ...] in mailbox order, computed in the order that their function wants."""
        order = self._wanted_order(block, edge_rows)
        edges = Block(block.number, block.src, block.segment, block.position)
        if order is None:
            return self.messages.call(edges, src_rows, dst_rows, edge_rows, mode)
        edges = Block(block.number, *(t[order] for t in (edges.src, edges.dst, edges.position)))
        src, dst, edge = (rows_at(rows, order) for rows in (src_rows, dst_rows, edge_rows))
        mail = self.messages.call(edges, src, dst, edge, mode)
        back = torch.argsort(order)
        return rows_at(mail, back)

    def _wanted_order(self, block: MailBlock, edge_rows: Rows) -> Tensor | None:
        messages = self.messages.messages
        if not messages.ordered:
            return None
        order = torch.argsort(block.position)
        if messages.sort_by is not None:
            kind = edge_rows[messages.sort_by].detach().index_select(0, order)
            order = order[torch.argsort(kind, stable=True)]
        return order


def fetch_table(spec: MailboxPass, layout: RowLayout, packed: Tensor) -> Tensor:
    """Fetch [num_src + halo, width], in rounds: the owned rows, then the whole halo."""
    plan, num_src = spec.messages.relation.plan, len(packed)
    num_rounds = plan.num_rounds(spec.messages.policy, row_bytes(spec.messages, layout))
    table = packed.new_empty((num_src + sum(plan.recv_counts), packed.shape[1]))
    table[:num_src] = packed
    fetch_halo(plan, table[:num_src], num_rounds, table[num_src:])
    return table


def return_table(spec: MailboxPass, layout: RowLayout, table: Tensor) -> Tensor:
    """Send the halo's gradients home: [num_src, width] gradients of the owned rows, complete."""
    plan, num_src = spec.messages.relation.plan, spec.messages.relation.num_src
    num_rounds = plan.num_rounds(spec.messages.policy, row_bytes(spec.messages, layout))
    return return_halo(plan, table[num_src:], num_rounds, table[:num_src])


@dataclass
class MailboxBackward:
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

    Per block: (du_j, dv_i, dw_e, dx_i, dcaptures) +=
    (dr(f)/d(u_j, v_i, w_e, x_i, captures))^T dout_i.

    Attributes:
        kept: the table, if the policy keeps it.
        captures: what the forward recorded; the tensors end in as many, then in ``hidden``.
        src_needs: per source input, whether any rank's does: every rank sends those home.
    """

    spec: MailboxPass
    kept: Tensor | None
    captures: list[Tensor]
    hidden: list[Tensor]
    src_needs: list[bool]

    def run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: list[Tensor]
    ) -> list[Tensor | None]:
        spec, table, relation = self.spec, self.kept, self.spec.messages.relation
        src, *sides = spec.split([t.detach() for t in tensors])
        own_needs, *others = spec.split(list(needs))
        sums = BlockGrads(src, sides, self.src_needs, others, self.captures, self.hidden)
        layout, packed = pack_rows(src)
        if layout is not None and packed is not None and table is None:
            table = fetch_table(spec, layout, packed)
        del packed
        target = None if table is None else sums.blank(len(table), table.device)
        for block in relation.mailbox_edges.blocks(spec.block_edges):
            self._block(sums, block, unpack_rows(layout, table, block.src), grads, target)
        del table
        home = None
        if target is not None and layout is not None:
            home = return_table(spec, layout, target)
        dsrc, dsides, captured = sums.results(home)
        asked = [grad if own else None for grad, own in zip(dsrc, own_needs, strict=True)]
        return [*asked, *dsides, *captured]

    def _block(
        self, sums: BlockGrads, block: MailBlock, src: Rows, grads: list[Tensor],
        target: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute one block under grad and add its share to every gradient."""
        at = block.ends, block.position, block.dst
        src_rows, dst_rows, edge_rows, node_rows = rows = sums.leaves(src, at)
        mode = self.spec.reduce.messages.capturing.replace(self.captures, sums.aliases)
        with torch.enable_grad():
            values = self.spec.compute(block, src_rows, dst_rows, edge_rows, node_rows, mode)
        pairs = [
            (value, grad.index_select(0, block.dst).to(value.dtype))
            for value, grad in zip(values, grads, strict=True)
            if value.requires_grad
        ]
        sums.add(pairs, rows, block.src, at, target)
