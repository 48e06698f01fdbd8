"""Backward of a message pass: stream again, recompute blocks under grad, send gradients home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sar.kernels import add_rows
from sar.ops.block_grads import BlockGrads
from sar.ops.message_blocks import (
    Block,
    MessagePass,
    block_size,
    blocks,
    pack_rows,
    passing,
    unpack_rows,
)
from sar.ops.reducers import Reducer
from sar.ops.softmax_sum import Weights, softmax_sum
from sar.stream import GradientMessages, GradientReturn, Round, Step
from sar.stream.packing import RowLayout


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
