"""A mailbox pass: the whole halo in one table, blocks of destinations, two functions a block.

Backward has the halo again, blocks under grad, and sends gradients home in one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.edges.arrivals import MailBlock
from sar.kernels import add_rows
from sar.ops.message_blocks import (
    Block,
    MessagePass,
    RowLayout,
    Rows,
    pack_rows,
    row_bytes,
    unpack_rows,
)
from sar.ops.message_grads import BlockGrads
from sar.stream import GradientMessages, GradientReturn, fetch

_MAX_RUNS = 2**32  # runs in a block, for the numbers that random functions are seeded by


@dataclass(frozen=True)
class MailboxPass:
    """What is computed: messages on edges, and a function of all messages of a destination.

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
        """One value per input: the messages' source, destination and edge, the function's rows."""
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
        """The results [n, ...] of a block's destinations.

        Args:
            src_rows, dst_rows, edge_rows: [e, ...] that the messages read.
            node_rows: [n, ...] that the function reads.
        """
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
        src, dst, edge = (_taken(rows, order) for rows in (src_rows, dst_rows, edge_rows))
        mail = self.messages.call(edges, src, dst, edge, mode)
        back = torch.argsort(order)
        return _taken(mail, back)

    def _wanted_order(self, block: MailBlock, edge_rows: Rows) -> Tensor | None:
        messages = self.messages.messages
        if not messages.ordered:
            return None
        order = torch.argsort(block.position)
        if messages.sort_by is not None:
            kind = edge_rows[messages.sort_by].detach().index_select(0, order)
            order = order[torch.argsort(kind, stable=True)]
        return order


def _taken(rows: Rows, order: Tensor) -> Rows:
    return [t.index_select(0, order) for t in rows]


def fetch_table(spec: MailboxPass, layout: RowLayout, packed: Tensor) -> Tensor:
    """[num_src + halo, width]: the owned rows, then the whole halo; fetched in rounds."""
    relation = spec.messages.relation
    plan, starts = relation.plan, relation.halo_starts
    num_rounds = plan.num_rounds(spec.messages.policy, row_bytes(spec.messages, layout))
    table = packed.new_empty((len(packed) + sum(plan.recv_counts), packed.shape[1]))
    table[: len(packed)] = packed
    for step, halo in fetch(plan, table[: len(packed)], plan.rounds(num_rounds)):
        parts = halo.split(step.recv_rows)
        for peer, rows in zip(step.sources, parts, strict=True):
            table[starts[peer] : starts[peer] + len(rows)] = rows
    return table


def return_table(spec: MailboxPass, layout: RowLayout, table: Tensor) -> Tensor:
    """[num_src, width]: the owned rows' gradients with those that come home from other ranks."""
    relation = spec.messages.relation
    plan, starts = relation.plan, relation.halo_starts
    own = table[: relation.num_src]
    messages = GradientMessages(plan, table.shape[1], table.dtype, add_rows)
    home = GradientReturn(messages, lambda: own)
    num_rounds = plan.num_rounds(spec.messages.policy, row_bytes(spec.messages, layout))
    for step, buffer in home.each(plan.rounds(num_rounds)):
        parts = buffer.split(step.recv_rows)
        for peer, rows in zip(step.sources, parts, strict=True):
            rows.copy_(table[starts[peer] : starts[peer] + len(rows)])
    return home.finish()


class MailboxGrads:
    """One backward pass.

    Args:
        captures: what the forward recorded; ``tensors`` end in as many, then in ``hidden``.
        needs: per tensor, whether autograd asks for its gradient.
        src_needs: per source input, whether any rank's does: every rank sends those home.
    """

    def __init__(
        self,
        spec: MailboxPass,
        captures: list[Tensor],
        hidden: list[Tensor],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
        src_needs: list[bool],
    ) -> None:
        self.spec, self.originals = spec, captures
        self.src, *sides = spec.split([t.detach() for t in tensors])
        self.own_needs, *others = spec.split(list(needs))
        self.grads = BlockGrads(self.src, sides, src_needs, others, captures, hidden)

    def run(self, grads: list[Tensor], kept: Tensor | None) -> list[Tensor | None]:
        """Gradients of all inputs and captured tensors, ``None`` where nobody asked."""
        relation = self.spec.messages.relation
        layout, packed = pack_rows(self.src)
        table = kept
        if layout is not None and packed is not None and table is None:
            table = fetch_table(self.spec, layout, packed)
        del packed
        target = None if table is None else self.grads.blank(len(table), table.device)
        for block in relation.arrivals.blocks(self.spec.block_edges):
            self._block(block, unpack_rows(layout, table, block.src), grads, target)
        del table
        home = None
        if target is not None and layout is not None:
            home = return_table(self.spec, layout, target)
        src, sides, captured = self.grads.results(home)
        asked = [grad if own else None for grad, own in zip(src, self.own_needs, strict=True)]
        return [*asked, *sides, *captured]

    def _block(
        self, block: MailBlock, src: list[Tensor], grads: list[Tensor], target: Tensor | None
    ) -> None:
        """Recompute one block under grad and add its share to every gradient."""
        at = block.ends, block.position, block.dst
        src_rows, dst_rows, edge_rows, node_rows = rows = self.grads.leaves(src, at)
        mode = self.spec.reduce.messages.capturing.replace(self.originals, self.grads.aliases)
        with torch.enable_grad():
            values = self.spec.compute(block, src_rows, dst_rows, edge_rows, node_rows, mode)
        pairs = [
            (value, grad.index_select(0, block.dst).to(value.dtype))
            for value, grad in zip(values, grads, strict=True)
            if value.requires_grad
        ]
        self.grads.add(pairs, rows, block.src, at, target)
