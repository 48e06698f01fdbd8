"""Backward of a mailbox pass: the halo again, blocks under grad, gradients home in one table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.edges.arrivals import MailBlock
from sar.ops.block_grads import BlockGrads
from sar.ops.mailbox_blocks import MailboxPass, fetch_table, return_table
from sar.ops.message_blocks import pack_rows, unpack_rows


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
