"""Backward of a message pass: stream again, recompute blocks under grad, send gradients home.

Gradients of what functions read are collected in the dtype that sums keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import block_gradients, detached_leaf
from sar.ops.message_blocks import (
    Block,
    MessagePass,
    RowLayout,
    block_size,
    blocks,
    flat_rows,
    pack_rows,
    passing,
    sum_layout,
    unpack_rows,
)
from sar.ops.reducers import Reducer
from sar.ops.softmax_sum import Weights, softmax_sum
from sar.stream import GradientMessages, GradientReturn, Round, Step

Grad = Tensor | None


class MessageGrads:
    """One backward pass.

    Args:
        reducers: of the forward; they turn the results' gradients into the messages'.
        kept: [round.num_recv, width] halo of each round, empty when it is fetched again.
        captures: what the forward recorded; ``tensors`` end in as many, then in hidden leaves.
        needs: per tensor, whether autograd asks for its gradient.
    """

    def __init__(
        self,
        spec: MessagePass,
        reducers: list[Reducer],
        kept: list[Tensor],
        captures: list[Tensor],
        tensors: Sequence[Tensor],
        needs: Sequence[bool],
    ) -> None:
        self.spec, self.reducers, self.kept, self.originals = spec, reducers, kept, captures
        self.src, self.dst, self.edge = spec.split([t.detach() for t in tensors])
        needs_src, *others = spec.split(needs)
        sides, hidden = [self.dst, self.edge], spec.messages.hidden
        self.grads = BlockGrads(self.src, sides, needs_src, others, captures, hidden)
        self.weights: Weights | None = None

    def run(self, grads: list[Tensor]) -> list[Tensor | None]:
        """Gradients of all inputs and captured tensors, ``None`` where nobody asked."""
        softmax = softmax_sum(self.reducers)
        if softmax is not None:
            self.weights = softmax.weights(grads[0])
        home = self._stream_blocks([grad.contiguous() for grad in grads])
        src, sides, captured = self.grads.results(home)
        return [*src, *sides, *captured]

    def _stream_blocks(self, grads: list[Tensor]) -> Tensor | None:
        """Run all blocks; returns the packed gradient of the owned source rows."""
        layout, packed = pack_rows(self.src)
        size = block_size(self.spec, layout, [*self.dst, *self.edge, *grads])
        home: GradientReturn | None = None
        for step in self._steps(layout, packed):
            target = self._target(home, step.round)
            for block in blocks(self.spec, step, self.edge, size):
                self._block(block, unpack_rows(layout, step.rows, block.src), grads, target)
            if step.round is None and target is not None:
                home = self._open_return(target)
            elif home is not None and step.round is not None and target is not None:
                home.send(step.round, target)
        return None if home is None else home.finish()

    def _steps(self, layout: RowLayout | None, packed: Tensor | None) -> Iterator[Step]:
        """The forward's steps; nothing is fetched where the halo is kept or has no influence."""
        if packed is None or self.kept or not self.spec.messages.linear_in_src:
            yield from passing(self.spec, layout, packed, kept=self.kept)
            return
        blank = packed.new_zeros((1, packed.shape[1]))  # only its shape matters
        for step in passing(self.spec, layout, None):
            step.rows = packed if step.round is None else blank.expand(step.round.num_recv, -1)
            yield step

    def _open_return(self, own: Tensor) -> GradientReturn:
        plan, width = self.spec.relation.plan, own.shape[1]
        messages = GradientMessages(plan, width, own.dtype, add_rows)
        return GradientReturn(messages, lambda: own)

    def _target(self, home: GradientReturn | None, step: Round | None) -> Tensor | None:
        """Zeroed rows that collect the gradients of a shard's sources."""
        if home is not None and step is not None:
            return home.buffer(step).zero_()
        return self.grads.blank(self.spec.relation.num_src, self.spec.relation.plan.device)

    def _block(
        self, block: Block, src: list[Tensor], grads: list[Tensor], target: Tensor | None
    ) -> None:
        """Recompute one block under grad and add its share to every gradient."""
        at = block.dst, block.position
        src_rows, dst_rows, edge_rows = rows = self.grads.leaves(src, at)
        mode = self.spec.messages.capturing.replace(self.originals, self.grads.aliases)
        weigh = None if self.weights is None else self.weights.of(block.dst)
        with torch.enable_grad():
            values = self.spec.call(block, src_rows, dst_rows, edge_rows, mode, weigh)
        pairs = [
            (
                value,
                reducer.edge_grad(block.dst, block.position, grad, value.detach()).to(value.dtype),
            )
            for value, reducer, grad in zip(values, self.reducers, grads, strict=True)
            if value.requires_grad
        ]
        pairs += [] if weigh is None else weigh.pairs()
        self.grads.add(pairs, rows, block.src, at, target)


class BlockGrads:
    """What one backward pass collects from the blocks that it computes again.

    Args:
        src: [num_src, ...] owned source rows that the function reads.
        sides: what else it reads, by whose rows these are.
        needs_src, needs: of each of them, whether a gradient is collected.
        captures: what the forward recorded; each gets an alias, see Note [Captured tensors].
        hidden: leaves that the function uses where no torch function shows them.

    Attributes:
        layout: of rows of the sources' gradients; ``None`` where none is collected.
        aliases: of ``captures``.
    """

    def __init__(
        self,
        src: list[Tensor],
        sides: Sequence[list[Tensor]],
        needs_src: Sequence[bool],
        needs: Sequence[Sequence[bool]],
        captures: list[Tensor],
        hidden: Sequence[Tensor],
    ) -> None:
        self.src, self.sides, self.needs_src, self.needs = src, sides, needs_src, needs
        self.layout = sum_layout(self._needed(src))
        self.aliases = [detached_leaf(t, True) for t in captures]
        self._captured, self._has_hidden = [*self.aliases, *hidden], len(hidden) > 0
        self._captured_grads = [torch.zeros_like(t, dtype=torch.float64) for t in self._captured]
        self._totals = [
            [_zeros_like(t) if needed else None for t, needed in zip(*side, strict=True)]
            for side in zip(sides, needs, strict=True)
        ]

    def blank(self, num_rows: int, device: torch.device) -> Tensor | None:
        """[num_rows, width] zeros that collect the sources' gradients, if any is collected."""
        if self.layout is None:
            return None
        return torch.zeros((num_rows, self.layout.width), dtype=self.layout.dtype, device=device)

    def leaves(self, src: list[Tensor], at: Sequence[Tensor]) -> list[list[Tensor]]:
        """Rows of a block that get gradients of their own: ``src``, then those ``at`` each side."""
        rows = [list(map(detached_leaf, src, self.needs_src))]
        for tensors, needs, idx in zip(self.sides, self.needs, at, strict=True):
            taken = [t.index_select(0, idx) for t in tensors]
            rows.append(list(map(detached_leaf, taken, needs)))
        return rows

    def add(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        rows: list[list[Tensor]],
        src_idx: Tensor,
        at: Sequence[Tensor],
        target: Tensor | None,
    ) -> None:
        """Add a block's share to every gradient.

        Args:
            pairs: results of the block and their gradients.
            rows: what :meth:`leaves` gave for the same ``at``.
            src_idx: rows of ``target`` that the gradients of source rows are added to.
        """
        inputs = [t for side in rows for t in side if t.requires_grad]
        if not pairs or not (inputs or self._captured):
            return
        by_leaf = block_gradients(
            pairs, inputs, self._captured, self._captured_grads, shared=self._has_hidden
        )
        if target is not None and self.layout is not None:
            grads = [by_leaf.get(id(t)) for t in self._needed(rows[0])]
            self.layout.add_rows(target, src_idx, grads)
        for side, totals, idx in zip(rows[1:], self._totals, at, strict=True):
            for leaf, total in zip(side, totals, strict=True):
                grad = by_leaf.get(id(leaf))
                if total is not None and grad is not None:
                    add_rows(flat_rows(total), idx, flat_rows(grad.to(total.dtype)))

    def results(self, home: Tensor | None) -> tuple[list[Grad], list[Grad], list[Tensor]]:
        """Gradients of the sources, which came ``home``, of the sides, and of captured tensors."""
        parts = iter([] if home is None or self.layout is None else self.layout.unpack(home))
        src = [
            next(parts).to(t.dtype) if needed else None
            for t, needed in zip(self.src, self.needs_src, strict=True)
        ]
        sides = [
            None if total is None else total.to(t.dtype)
            for tensors, totals in zip(self.sides, self._totals, strict=True)
            for t, total in zip(tensors, totals, strict=True)
        ]
        captured = zip(self._captured_grads, self._captured, strict=True)
        return src, sides, [total.to(t.dtype) for total, t in captured]

    def _needed(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t for t, needed in zip(tensors, self.needs_src, strict=True) if needed]


def _zeros_like(tensor: Tensor) -> Tensor:
    wide = wide_dtype(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=wide, device=tensor.device)
