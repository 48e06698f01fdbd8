"""Backward of a message pass: stream again, recompute blocks under grad, send gradients home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import block_gradients, detached_leaf
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
from sar.stream import GradientReturn, Round, Step
from sar.stream.packing import RowLayout, flat_rows, sum_layout


class _RowGrads:
    """Collects the gradient of one input from the rows of each block, in the wide dtype."""

    def __init__(self, tensor: Tensor, needed: bool) -> None:
        self.dtype = tensor.dtype
        self.total: Tensor | None = None
        if needed:
            wide = wide_dtype(tensor.dtype)
            self.total = torch.zeros(tensor.shape, dtype=wide, device=tensor.device)

    def add(self, idx: Tensor, grad: Tensor | None) -> None:
        if self.total is not None and grad is not None:
            add_rows(flat_rows(self.total), idx, flat_rows(grad.to(self.total.dtype)))

    def result(self) -> Tensor | None:
        return None if self.total is None else self.total.to(self.dtype)


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
        self.needs_src, self.needs_dst, self.needs_edge = spec.split(needs)
        self.hidden = spec.messages.hidden
        self.weights: Weights | None = None
        aliases = [detached_leaf(t, True) for t in captures]
        self.aliases, self.captured = aliases, [*aliases, *self.hidden]
        self.dst_grads = [_RowGrads(*p) for p in zip(self.dst, self.needs_dst, strict=True)]
        self.edge_grads = [_RowGrads(*p) for p in zip(self.edge, self.needs_edge, strict=True)]
        self.captured_grads = [torch.zeros_like(t, dtype=torch.float64) for t in self.captured]
        self.layout = sum_layout(self._needed(self.src))

    def run(self, grads: list[Tensor]) -> list[Tensor | None]:
        """Gradients of all inputs and captured tensors, ``None`` where nobody asked."""
        softmax = softmax_sum(self.reducers)
        if softmax is not None:
            self.weights = softmax.weights(grads[0])
        home = self._stream_blocks([grad.contiguous() for grad in grads])
        captured = [
            total.to(t.dtype) for total, t in zip(self.captured_grads, self.captured, strict=True)
        ]
        rows = [part.result() for part in (*self.dst_grads, *self.edge_grads)]
        return [*self._src_grads(home), *rows, *captured]

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
        lossy = self.spec.policy.lossy
        return GradientReturn(plan, width, own.dtype, lambda: own, add_rows, lossy=lossy)

    def _target(self, home: GradientReturn | None, step: Round | None) -> Tensor | None:
        """Zeroed rows that collect the gradients of a shard's sources."""
        if self.layout is None:
            return None
        if home is not None and step is not None:
            return home.buffer(step).zero_()
        relation = self.spec.relation
        shape = (relation.num_src, self.layout.width)
        return torch.zeros(shape, dtype=self.layout.dtype, device=relation.plan.device)

    def _block(
        self, block: Block, src: list[Tensor], grads: list[Tensor], target: Tensor | None
    ) -> None:
        """Recompute one block under grad and add its share to every gradient."""
        src_rows = [detached_leaf(t, n) for t, n in zip(src, self.needs_src, strict=True)]
        dst_rows = self._leaves(self.dst, self.needs_dst, block.dst)
        edge_rows = self._leaves(self.edge, self.needs_edge, block.position)
        mode = self.spec.messages.capturing.replace(self.originals, self.aliases)
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
        inputs = [t for t in (*src_rows, *dst_rows, *edge_rows) if t.requires_grad]
        if not pairs or not (inputs or self.captured):
            return
        by_leaf = block_gradients(
            pairs, inputs, self.captured, self.captured_grads, shared=bool(self.hidden)
        )
        self._add_src(target, block.src, [by_leaf.get(id(t)) for t in self._needed(src_rows)])
        for rows, total in zip(dst_rows, self.dst_grads, strict=True):
            total.add(block.dst, by_leaf.get(id(rows)))
        for rows, total in zip(edge_rows, self.edge_grads, strict=True):
            total.add(block.position, by_leaf.get(id(rows)))

    @staticmethod
    def _leaves(tensors: list[Tensor], needs: list[bool], idx: Tensor) -> list[Tensor]:
        return [
            detached_leaf(t.index_select(0, idx), n) for t, n in zip(tensors, needs, strict=True)
        ]

    def _needed(self, tensors: list[Tensor]) -> list[Tensor]:
        return [t for t, needed in zip(tensors, self.needs_src, strict=True) if needed]

    def _add_src(self, target: Tensor | None, idx: Tensor, grads: list[Tensor | None]) -> None:
        if target is not None and self.layout is not None:
            self.layout.add_rows(target, idx, grads)

    def _src_grads(self, home: Tensor | None) -> list[Tensor | None]:
        parts = iter([] if home is None or self.layout is None else self.layout.unpack(home))
        return [
            next(parts).to(t.dtype) if needed else None
            for t, needed in zip(self.src, self.needs_src, strict=True)
        ]
