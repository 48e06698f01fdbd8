"""A mailbox pass: the whole halo in one table, blocks of destinations, two functions a block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.edges.arrivals import MailBlock
from sar.kernels import add_rows
from sar.ops.message_blocks import Block, MessagePass, Rows, row_bytes
from sar.stream import GradientMessages, GradientReturn, fetch
from sar.stream.packing import RowLayout

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
