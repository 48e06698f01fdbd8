"""The two passes of messages: blocks are computed and reduced, and again under grad in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import Recording, detached_leaf
from sar.ops.message_blocks import (
    Block,
    MessagePass,
    Rows,
    each_block,
    flat_rows,
    rows_at,
    sum_layout,
)
from sar.ops.reducers import Reducer, SoftmaxSum, Weights, make_reducer, softmax_sum
from sar.ops.saving import first_order
from sar.stream import GradientMessages, GradientReturn, Step

Grad = Tensor | None


def reduce_messages(
    spec: MessagePass, inputs: Sequence[Tensor], like: Sequence[Tensor], recorded: Recording
) -> tuple[list[Reducer], list[Tensor]]:
    """Run every block in stream order: the filled reducers, and each halo if it is kept."""
    relation, weighting = spec.relation, spec.messages.weighting
    src, dst, edge = spec.split(inputs)
    num_rows = relation.num_edges if spec.reduce == "edges" else relation.num_dst
    if weighting is None:
        reducers = [make_reducer(spec.reduce, num_rows, out) for out in like]
    else:
        reducers = [SoftmaxSum(weighting, relation.in_degrees, out) for out in like]
    softmax, kept = softmax_sum(reducers), list[Tensor]()
    keeps = not spec.policy.rematerialize and not spec.messages.linear_in_src
    steps = each_block(spec, src, edge, [*dst, *edge, *like], kept if keeps else None)
    for _, blocks in steps:
        for block, src_rows in blocks:
            sides = rows_at(dst, block.dst), rows_at(edge, block.position)
            weigh = None if softmax is None else softmax.weigher(block.dst)
            values = spec.call(block, src_rows, *sides, recorded, weigh)
            for reducer, value in zip(reducers, values, strict=True):
                reducer.add(block.dst, block.position, value)
    return reducers, kept


class Backward(Protocol):
    """A backward pass that computes blocks again."""

    def run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: list[Tensor]
    ) -> list[Grad]:
        """Gradients of ``tensors``, ``None`` where nobody asked, from those of the results."""


class Recomputed(Function):
    """out = f(tensors), computed before this call: only then is it known what f captured.

    =======  =============  =====================================================
    tensor   shape          owner and lifetime
    =======  =============  =====================================================
    tensors  any            this rank; saved (inputs, not copies); see
                            Note [Captured tensors]
    out      any            this rank; passed on, not saved
    halo     see ``again``  peers; fetched again in backward, or kept there
    =======  =============  =====================================================

    Backward: dtensors = (df/dtensors)^T dout, by ``again``.
    """

    @staticmethod
    def forward(
        ctx: Any, again: Backward, results: Sequence[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)
        whole = tuple(_alias(result) for result in results)
        ctx.mark_non_differentiable(*[t for t in whole if not t.is_floating_point()])
        return whole

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = ctx.again.run(ctx.saved_tensors, ctx.needs_input_grad[2:], list(grads))
        return None, None, *found


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, but no view of it to autograd: the caller may write into the result."""
    return tensor.new_empty(0).set_(tensor)  # type: ignore[call-overload]


@dataclass
class MessageBackward:
    """out_i = reduce over edges e = (j -> i) of f(u_j, v_i, w_e; captured tensors).

    ==========  =====================  ====================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  ====================================================
    u           [num_src, ...]         this rank; saved (an input, not a copy)
    v           [num_dst, ...]         this rank; saved (an input)
    w           [num_edges, ...]       this rank; saved (an input)
    halo of u   [<= round, width]      peers; fetched per round in forward and, unless f is
                                       linear in u, again in backward (kept instead when the
                                       policy does not rematerialize)
    message     [<= block, ...]        this rank; recomputed per block in backward
    winner      [num_dst, ...] int32   this rank; kept for max and min: the winning edge
    out         [num_dst, ...]         this rank; kept of a softmax-weighted sum alone
    m, 1 / t    [num_dst, H]           this rank; of :class:`sar.ops.reducers.SoftmaxSum`
    ==========  =====================  ====================================================

    With g_e = dout_i for a sum, dout_i where e won for max and min, dout_e for kept edges, per
    block (du_j, dv_i, dw_e, dcaptures) += (df/d(u_j, v_i, w_e, captures))^T g_e; du of halo rows
    goes home round by round.

    Attributes:
        reducers: of the forward; they turn the results' gradients into the messages'.
        kept: [round.num_recv, width] halo of each round, empty when it is fetched again.
        captures: what the forward recorded; the tensors end in as many, then in hidden leaves.
    """

    spec: MessagePass
    reducers: list[Reducer]
    kept: list[Tensor]
    captures: list[Tensor]

    def run(
        self, tensors: Sequence[Tensor], needs: Sequence[bool], grads: list[Tensor]
    ) -> list[Grad]:
        spec, reducers, weights = self.spec, self.reducers, None
        softmax = softmax_sum(reducers)
        if softmax is not None and softmax.is_written:
            inputs = [t.detach() for side in spec.split(tensors) for t in side]
            reducers, _ = reduce_messages(spec, inputs, grads, spec.messages.capturing.record())
            softmax = softmax_sum(reducers)
            if softmax is not None:
                softmax.keep(softmax.result())
        if softmax is not None:
            weights = softmax.weights(grads[0])
        src, dst, edge = spec.split([t.detach() for t in tensors])
        needs_src, *others = spec.split(needs)
        hidden = spec.messages.hidden
        sums = BlockGrads(src, [dst, edge], needs_src, others, self.captures, hidden)
        grads = [grad.contiguous() for grad in grads]
        home: GradientReturn | None = None
        steps = each_block(
            spec, src, edge, [*dst, *edge, *grads], kept=self.kept,
            fetches=not spec.messages.linear_in_src,
        )  # fmt: skip
        for step, blocks in steps:
            target = self._target(sums, home, step)
            for block, src_rows in blocks:
                self._block(sums, block, src_rows, reducers, grads, weights, target)
            if step.round is None and target is not None:
                home = self._open_return(target)
            elif home is not None and step.round is not None and target is not None:
                home.send(step.round, target)
        found = sums.results(None if home is None else home.finish())
        return [grad for part in found for grad in part]

    def _open_return(self, own: Tensor) -> GradientReturn:
        plan, width = self.spec.relation.plan, own.shape[1]
        return GradientReturn(GradientMessages(plan, width, own.dtype, add_rows), lambda: own)

    def _target(self, sums: BlockGrads, home: GradientReturn | None, step: Step) -> Tensor | None:
        """Zeroed rows that collect the gradients of a shard's sources."""
        if home is not None and step.round is not None:
            return home.buffer(step.round).zero_()
        return sums.blank(self.spec.relation.num_src, self.spec.relation.plan.device)

    def _block(
        self, sums: BlockGrads, block: Block, src: Rows, reducers: list[Reducer],
        grads: list[Tensor], weights: Weights | None, target: Tensor | None,
    ) -> None:  # fmt: skip
        """Compute one block under grad and add its share to every gradient."""
        at = block.dst, block.position
        rows = sums.leaves(src, at)
        mode = self.spec.messages.capturing.replace(self.captures, sums.aliases)
        weigh = None if weights is None else weights.of(block.dst)
        with torch.enable_grad():
            values = self.spec.call(block, rows[0], rows[1], rows[2], mode, weigh)
        pairs = [
            (value, reducer.edge_grad(*at, grad, value.detach()).to(value.dtype))
            for value, reducer, grad in zip(values, reducers, grads, strict=True)
            if value.requires_grad
        ]
        pairs += [] if weigh is None else weigh.pairs()
        sums.add(pairs, rows, block.src, at, target)


class BlockGrads:
    """Gradients that one backward pass sums, in wide dtypes, over the blocks it computes again.

    Args:
        sides: what the function reads besides ``src``, by whose rows these are.
        needs_src, needs: of each tensor, whether its gradient is collected.
        captures: what the forward recorded; each gets an alias, see Note [Captured tensors].
        hidden: leaves that the function uses where no torch function shows them.

    Attributes:
        layout: of rows of the sources' gradients; ``None`` where none is collected.
    """

    def __init__(
        self, src: Rows, sides: Sequence[Rows], needs_src: Sequence[bool],
        needs: Sequence[Sequence[bool]], captures: list[Tensor], hidden: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.src, self.sides, self.needs_src, self.needs = src, sides, needs_src, needs
        self.layout = sum_layout(self._needed(src))
        self.aliases = [detached_leaf(t, True) for t in captures]
        self._captured, self._has_hidden = [*self.aliases, *hidden], len(hidden) > 0
        self._captured_grads = [torch.zeros_like(t, dtype=torch.float64) for t in self._captured]
        self._totals = [
            [
                torch.zeros(t.shape, dtype=wide_dtype(t.dtype), device=t.device) if needed else None
                for t, needed in zip(*side, strict=True)
            ]
            for side in zip(sides, needs, strict=True)
        ]

    def blank(self, num_rows: int, device: torch.device) -> Tensor | None:
        """[num_rows, width] zeros for the sources' gradients; ``None`` where none is collected."""
        if self.layout is None:
            return None
        return torch.zeros((num_rows, self.layout.width), dtype=self.layout.dtype, device=device)

    def leaves(self, src: Rows, at: Sequence[Tensor]) -> list[Rows]:
        """Rows of a block, ``src`` and those ``at`` each side, as leaves that get gradients."""
        taken = [src, *map(rows_at, self.sides, at)]
        each = zip(taken, [self.needs_src, *self.needs], strict=True)
        return [list(map(detached_leaf, rows, needs)) for rows, needs in each]

    def add(
        self, pairs: list[tuple[Tensor, Tensor]], rows: list[Rows], src_idx: Tensor,
        at: Sequence[Tensor], target: Tensor | None,
    ) -> None:  # fmt: skip
        """Add a block's share to every gradient.

        ``pairs`` are results of the block with their gradients, ``rows`` what :meth:`leaves` gave
        for the same ``at``; gradients of source rows are added to rows ``src_idx`` of ``target``.
        """
        inputs = [t for side in rows for t in side if t.requires_grad]
        if not pairs or not (inputs or self._captured):
            return
        values, dvalues = zip(*pairs, strict=True)
        given = [*inputs, *self._captured]
        # The history of hidden leaves is used again by other blocks.
        found: Sequence[Grad] = torch.autograd.grad(
            values, given, dvalues, allow_unused=True, retain_graph=self._has_hidden
        )
        for captured, grad in zip(self._captured_grads, found[len(inputs) :], strict=True):
            if grad is not None:
                captured.add_(grad)
        by_leaf = {id(t): grad for t, grad in zip(inputs, found, strict=False)}
        if target is not None and self.layout is not None:
            grads = [by_leaf.get(id(t)) for t in self._needed(rows[0])]
            self.layout.add_rows(target, src_idx, grads)
        for side, totals, idx in zip(rows[1:], self._totals, at, strict=True):
            for leaf, total in zip(side, totals, strict=True):
                grad = by_leaf.get(id(leaf))
                if total is not None and grad is not None:
                    add_rows(flat_rows(total), idx, flat_rows(grad.to(total.dtype)))

    def results(self, home: Tensor | None) -> tuple[list[Grad], list[Grad], list[Tensor]]:
        """Gradients of the sources, from rows ``home``, of the sides, and of captured tensors."""
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

    def _needed(self, tensors: Rows) -> Rows:
        return [t for t, needed in zip(tensors, self.needs_src, strict=True) if needed]
