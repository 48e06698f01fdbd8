"""Gradients that results are given, and rows of the whole graph that ranks have."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar.comm import Group
from sar.models.measure import nodes_of
from sar.models.validation.compare import Kind, Layout, Piece
from sar.models.validation.record import Recorder, is_plain, mapped
from sar.partition.arrays import GraphArrays

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
        self.layout, self.known, self.group, self.gathered = layout, known, group, gathered
        self.like = like
        self.recorder: Recorder | None = None

    def of(self, step: int, results: list[Tensor]) -> list[Tensor]:
        if self.group is None or self.gathered is None:
            made = [_seed(result, self._is_known(result)) for result in results]
            if self.like is not None:
                layout, others = self.like
                made = list(map(partial(_as_in, layout), made, others.get(step, [])))
            self.known[step] = made
            return made
        self.gathered[self.group.rank] = [result.detach() for result in results]
        self.group.all_gather(torch.zeros(1))  # all have written
        ranks = list(zip(*self.gathered))
        self.group.all_gather(torch.zeros(1))  # all have read
        return [
            self._mine(result, others, whole)
            for result, others, whole in zip(results, ranks, self.known.get(step, []), strict=False)
        ]

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def _is_known(self, result: Tensor) -> bool:
        return any(size == kind.total for kind in self.layout.kinds for size in result.shape)

    def _mine(self, result: Tensor, ranks: tuple[Tensor, ...], whole: Tensor) -> Tensor:
        group: Any = self.group
        found = self.layout.dim_of_rows(whole.shape, [one.shape for one in ranks])
        if found:
            dim, kind = found[0]
            return whole.index_select(dim, kind.pieces[group.rank].there)
        if result.shape != whole.shape:
            return _seed(result, False)
        same = all(torch.equal(one, ranks[0]) for one in ranks)
        if not same and result.numel() == 1:
            return whole  # shares of a sum
        if result.numel() == 1 and self._is_loss_of_all(result):
            return whole
        return whole / group.size

    def _is_loss_of_all(self, result: Tensor) -> bool:
        group: Any = self.group
        before, recorder = group.losses, self.recorder
        leaves = [p for p in _leaves_behind(result) if p.requires_grad]
        if recorder is not None:
            recorder.is_deaf = True
        torch.autograd.grad(result, leaves, torch.ones_like(result), True, allow_unused=True)
        if recorder is not None:
            recorder.is_deaf = False
        return group.losses > before


class Jitter:
    """A hook that moves rows of nodes and edges by numbers of their own."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return mapped((args, kwargs), self._moved)

    def _moved(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not is_plain(leaf) or not leaf.is_floating_point():
            return leaf
        for kind in self._layout.kinds:
            piece = kind.pieces[self._rank]
            if leaf.dim() and len(leaf) == piece.count:
                places = piece.there.view(-1, *[1] * (leaf.dim() - 1)) * 131
                flat = torch.arange(math.prod(leaf.shape[1:])).view(leaf.shape[1:])
                return leaf + 1e-3 * torch.sin(1.0 + places * 7.3 + flat * 1.7)
        return leaf


def _leaves_behind(result: Tensor) -> list[Tensor]:
    nodes = nodes_of([result], set())
    return [end for node in nodes if isinstance(end := getattr(node, "variable", None), Tensor)]


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
    if made.shape == whole.shape and not layout.dim_of_rows(whole.shape, [made.shape]):
        return whole
    for dim, kind in layout.dim_of_rows(whole.shape, [made.shape]):
        (piece,) = kind.pieces
        return made.index_copy(dim, piece.here, whole.index_select(dim, piece.there))
    return made


def layout_of(graph: GraphArrays, parts: np.ndarray, count: int) -> Layout:
    """Which nodes and edges each rank has, in the order in which it has them."""
    kinds, start = [], 0
    owner, nodes, edges = dict[str, Tensor](), [], []
    for ntype, total in graph.num_nodes.items():
        owner[ntype] = torch.from_numpy(np.asarray(parts[start : start + total], np.int64))
        start += total
        nodes.append(_kind(owner[ntype], count))
    for _, dst in graph.edges.items():
        edges.append(_kind(owner[_[2]][dst[1]], count))
    for one in (nodes, edges):
        kinds += one
        if len(one) > 1:
            kinds.append(_together(one, count))
    return Layout(kinds)


def _kind(owner: Tensor, count: int) -> Kind:
    found = [(owner == rank).nonzero()[:, 0] for rank in range(count)]
    pieces = [Piece(len(ids), torch.arange(len(ids)), ids) for ids in found]
    return Kind(len(owner), tuple(pieces))


def _together(kinds: list[Kind], count: int) -> Kind:
    """All types one behind the other, on each rank and in the whole graph."""
    starts = np.cumsum([0, *(kind.total for kind in kinds)])
    pieces = []
    for rank in range(count):
        ids = [k.pieces[rank].there + int(s) for k, s in zip(kinds, starts)]
        joined = torch.cat(ids)
        pieces.append(Piece(len(joined), torch.arange(len(joined)), joined))
    return Kind(int(starts[-1]), tuple(pieces))
