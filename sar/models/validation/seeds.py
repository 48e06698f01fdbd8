"""Gradients that results are given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.models.validation.compare import Layout
from sar.models.validation.record import is_plain

Seeds = dict[int, list[Tensor]]  # gradients of results, by step


class SeedMaker:
    """Gradients of results: of each number another, and the same however the graph is cut.

    Of results that all ranks have each rank gives its share, unless a loss of all ranks is among
    them, whose gradient is the share already.

    Args:
        layout: which rows of the graph that ``known`` is of a rank's are.
        known: the seeds of that graph; ``None``: of this one.
        gathered: a place for each rank's results.
    """

    def __init__(
        self, layout: Layout, known: Seeds | None, group: Group, gathered: list[Any]
    ) -> None:
        self.layout, self.rank = layout, group.rank
        self._known, self._group, self._gathered = known, group, gathered

    def of(self, step: int, results: list[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of a step's results, which were made of ``leaves``. Collective."""
        if self._known is None:
            return [_seed(result, self._has_rows(result)) for result in results]
        self._gathered[self.rank] = [result.detach() for result in results]
        self._group.all_gather(torch.zeros(1))  # all have written
        ranks = list(zip(*self._gathered))
        self._group.all_gather(torch.zeros(1))  # all have read
        known = self._known.get(step, [])
        return [self._mine(leaves, *one) for one in zip(results, ranks, known)]

    def _has_rows(self, result: Tensor) -> bool:
        return any(size == kind.total for kind in self.layout.kinds for size in result.shape)

    def _mine(
        self, leaves: Sequence[Tensor], result: Tensor, ranks: tuple[Tensor, ...], whole: Tensor
    ) -> Tensor:
        for dim, kind in self.layout.dim_of_rows(whole.shape, [one.shape for one in ranks]):
            piece = kind.pieces[self.rank]
            rows = whole.index_select(dim, piece.there)
            return _seed(result, True).index_copy(dim, piece.here, rows)
        if any(one.shape != whole.shape for one in ranks):
            return _seed(result, False)
        are_shares = not all(torch.equal(one, ranks[0]) for one in ranks)
        if result.numel() == 1 and (are_shares or self._is_loss_of_all(result, leaves)):
            return whole
        return whole / self._group.size

    def _is_loss_of_all(self, result: Tensor, leaves: Sequence[Tensor]) -> bool:
        """Whether a pass backwards meets one of the losses that take rows of all ranks."""
        before = self._group.losses
        torch.autograd.grad(result, leaves, torch.ones_like(result), True, allow_unused=True)
        return self._group.losses > before


def moved(leaf: Any, layout: Layout, rank: int) -> Any:
    """Rows of nodes or edges with numbers of their own added, so that no two are equal."""
    if not isinstance(leaf, Tensor) or not is_plain(leaf) or not leaf.is_floating_point():
        return leaf
    pieces = [kind.pieces[rank] for kind in layout.kinds] if leaf.dim() else []
    piece = next((one for one in pieces if one.count == len(leaf)), None)
    if piece is None:
        return leaf
    places = piece.there.view(-1, *[1] * (leaf.dim() - 1)) * 131
    flat = torch.arange(math.prod(leaf.shape[1:])).view(leaf.shape[1:])
    return leaf + 1e-3 * torch.sin(1.0 + places * 7.3 + flat * 1.7)


def _seed(result: Tensor, by_rows: bool) -> Tensor:
    """Numbers by place; where rows are in no known order, by all places but the row."""
    angle = torch.zeros(result.shape, dtype=torch.float64)
    for dim, size in enumerate(result.shape):
        if dim or by_rows:
            shape = [size if place == dim else 1 for place in range(result.dim())]
            angle = angle + (0.7 + 0.6 * dim) * torch.arange(1.0, size + 1).view(shape)
    return torch.sin(angle + 1.0).to(result.dtype)
