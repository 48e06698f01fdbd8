"""Gradients of what functions read, collected from blocks of edges in the dtype that sums keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.kernels import add_rows, wide_dtype
from sar.ops.capture import block_gradients, detached_leaf
from sar.stream.packing import flat_rows, sum_layout

Grad = Tensor | None


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
