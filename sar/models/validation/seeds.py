"""Gradients that results are given."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.models.measure import nodes_of
from sar.models.validation.compare import Layout
from sar.models.validation.record import is_plain

Seeds = dict[int, list[Tensor]]  # gradients of results, by step


class SeedMaker:
    """Gradients of results: of each number another, and the same however the graph is cut.

    Of results that all ranks have each rank gives its share, unless a loss of all ranks is among
    them, whose gradient is the share already.
    """

    def __init__(
        self, layout: Layout, known: Seeds, group: Group | None = None,
        gathered: list[Any] | None = None, like: tuple[Layout, Seeds] | None = None,
    ) -> None:  # fmt: skip
        self.layout, self._known, self._group, self._like = layout, known, group, like
        self.rank = 0 if group is None else group.rank
        self._gathered: list[Any] = gathered or []

    def of(self, step: int, results: list[Tensor]) -> list[Tensor]:
        if self._group is None:
            self._known[step] = [_seed(result, self._is_known(result)) for result in results]
            if self._like is not None:
                layout, others = self._like
                pairs = zip(self._known[step], others.get(step, []))
                self._known[step] = [_as_in(layout, *pair) for pair in pairs]
            return self._known[step]
        self._gathered[self.rank] = [result.detach() for result in results]
        self._group.all_gather(torch.zeros(1))  # all have written
        ranks = list(zip(*self._gathered))
        self._group.all_gather(torch.zeros(1))  # all have read
        return list(map(self._mine, results, ranks, self._known.get(step, [])))

    def _is_known(self, result: Tensor) -> bool:
        return any(size == kind.total for kind in self.layout.kinds for size in result.shape)

    def _mine(self, result: Tensor, ranks: tuple[Tensor, ...], whole: Tensor) -> Tensor:
        group: Any = self._group
        found = self.layout.dim_of_rows(whole.shape, [one.shape for one in ranks])
        if found:
            dim, kind = found[0]
            return whole.index_select(dim, kind.pieces[self.rank].there)
        if result.shape != whole.shape:
            return _seed(result, False)
        are_shares = not all(torch.equal(one, ranks[0]) for one in ranks)
        if result.numel() == 1 and (are_shares or _is_loss_of_all(result, group)):
            return whole
        return whole / group.size


def _is_loss_of_all(result: Tensor, group: Any) -> bool:
    """Whether a pass backwards meets one of the losses that take rows of all ranks."""
    before, nodes = group.losses, nodes_of([result], set())
    ends = [getattr(node, "variable", None) for node in nodes]
    leaves = [end for end in ends if isinstance(end, Tensor) and end.requires_grad]
    torch.autograd.grad(result, leaves, torch.ones_like(result), True, allow_unused=True)
    return group.losses > before


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
            shape = [1] * result.dim()
            shape[dim] = size
            angle = angle + (0.7 + 0.6 * dim) * torch.arange(1.0, size + 1).view(shape)
    return (torch.sin(angle + 1.0)).to(result.dtype)


def _as_in(layout: Layout, made: Tensor, whole: Tensor) -> Tensor:
    """A seed whose rows are those of another graph's, which ``layout`` tells."""
    found = layout.dim_of_rows(whole.shape, [made.shape])
    if not found:
        return whole if made.shape == whole.shape else made
    dim, kind = found[0]
    (piece,) = kind.pieces
    return made.index_copy(dim, piece.here, whole.index_select(dim, piece.there))
