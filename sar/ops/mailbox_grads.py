"""Backward of a mailbox pass: fetch again, recompute blocks under grad, send gradients home."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.edges.arrivals import MailBlock
from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import block_gradients, detached_leaf
from sar.ops.mailbox_blocks import MailboxPass, fetch_table, grad_layout, return_table
from sar.ops.message_blocks import pack_rows, unpack_rows
from sar.stream.packing import flat_rows


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
        self.spec, self.originals, self.hidden = spec, captures, hidden
        inputs = spec.split([t.detach() for t in tensors])
        self.src, self.dst, self.edge, self.nodes = inputs
        self.own_needs, self.needs_dst, self.needs_edge, self.needs_nodes = spec.split(list(needs))
        self.needs_src = src_needs
        self.aliases = [detached_leaf(t, True) for t in captures]
        self.captured = [*self.aliases, *hidden]
        self.captured_grads = [torch.zeros_like(t, dtype=torch.float64) for t in self.captured]
        self.dst_grads = _blank(self.dst, self.needs_dst)
        self.edge_grads = _blank(self.edge, self.needs_edge)
        self.node_grads = _blank(self.nodes, self.needs_nodes)
        self.layout = grad_layout(self.src, src_needs)

    def run(self, grads: list[Tensor], kept: Tensor | None) -> list[Tensor | None]:
        """Gradients of all inputs and captured tensors, ``None`` where nobody asked."""
        relation = self.spec.messages.relation
        layout, packed = pack_rows(self.src)
        table = kept
        if layout is not None and packed is not None and table is None:
            table = fetch_table(self.spec, layout, packed)
        del packed
        target = None
        if self.layout is not None and table is not None:
            shape = (len(table), self.layout.width)
            target = torch.zeros(shape, dtype=self.layout.dtype, device=table.device)
        for block in relation.arrivals.blocks(self.spec.block_edges):
            self._block(block, unpack_rows(layout, table, block.src), grads, target)
        del table
        home = None
        if target is not None and layout is not None:
            home = return_table(self.spec, layout, target)
        captured = [
            total.to(t.dtype) for total, t in zip(self.captured_grads, self.captured, strict=True)
        ]
        totals = [*self.dst_grads, *self.edge_grads, *self.node_grads]
        like = [*self.dst, *self.edge, *self.nodes]
        rows = [
            None if total is None else total.to(t.dtype)
            for total, t in zip(totals, like, strict=True)
        ]
        return [*self._src_grads(home), *rows, *captured]

    def _block(
        self, block: MailBlock, src: list[Tensor], grads: list[Tensor], target: Tensor | None
    ) -> None:
        """Recompute one block under grad and add its share to every gradient."""
        src_rows = [detached_leaf(t, n) for t, n in zip(src, self.needs_src, strict=True)]
        dst_rows = _leaves(self.dst, self.needs_dst, block.ends)
        edge_rows = _leaves(self.edge, self.needs_edge, block.position)
        node_rows = _leaves(self.nodes, self.needs_nodes, block.dst)
        mode = self.spec.reduce.messages.capturing.replace(self.originals, self.aliases)
        with torch.enable_grad():
            values = self.spec.compute(block, src_rows, dst_rows, edge_rows, node_rows, mode)
        pairs = [
            (value, grad.index_select(0, block.dst).to(value.dtype))
            for value, grad in zip(values, grads, strict=True)
            if value.requires_grad
        ]
        rows = [*src_rows, *dst_rows, *edge_rows, *node_rows]
        inputs = [t for t in rows if t.requires_grad]
        if not pairs or not (inputs or self.captured):
            return
        by_leaf = block_gradients(
            pairs, inputs, self.captured, self.captured_grads, shared=bool(self.hidden)
        )
        wanted = [t for t, needed in zip(src_rows, self.needs_src, strict=True) if needed]
        self._add_src(target, block.src, [by_leaf.get(id(t)) for t in wanted])
        _add(self.dst_grads, dst_rows, block.ends, by_leaf)
        _add(self.edge_grads, edge_rows, block.position, by_leaf)
        _add(self.node_grads, node_rows, block.dst, by_leaf)

    def _add_src(self, target: Tensor | None, idx: Tensor, grads: list[Tensor | None]) -> None:
        if target is not None and self.layout is not None:
            self.layout.add_rows(target, idx, grads)

    def _src_grads(self, home: Tensor | None) -> list[Tensor | None]:
        parts = iter([] if home is None or self.layout is None else self.layout.unpack(home))
        wanted = [next(parts) if needed else None for needed in self.needs_src]
        return [
            part.to(t.dtype) if part is not None and own else None
            for part, t, own in zip(wanted, self.src, self.own_needs, strict=True)
        ]


def _blank(tensors: list[Tensor], needs: list[bool]) -> list[Tensor | None]:
    """Zeroed totals in the dtype to accumulate in, where a gradient is asked for."""
    return [
        torch.zeros(t.shape, dtype=wide_dtype(t.dtype), device=t.device) if needed else None
        for t, needed in zip(tensors, needs, strict=True)
    ]


def _leaves(tensors: list[Tensor], needs: list[bool], idx: Tensor) -> list[Tensor]:
    return [detached_leaf(t.index_select(0, idx), n) for t, n in zip(tensors, needs, strict=True)]


def _add(
    totals: list[Tensor | None], rows: list[Tensor], idx: Tensor, by_leaf: dict[int, Tensor | None]
) -> None:
    for total, leaf in zip(totals, rows, strict=True):
        grad = by_leaf.get(id(leaf))
        if total is not None and grad is not None:
            add_rows(flat_rows(total), idx, flat_rows(grad.to(total.dtype)))
