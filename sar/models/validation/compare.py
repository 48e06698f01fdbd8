"""Rows of ranks beside those of the whole graph: which they are, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import GraphArrays

_SMALL = 1e-3  # what is smaller in all its numbers counts as of this size


@dataclass(frozen=True)
class Piece:
    """Rows of one rank: it has ``count``, of which ``here`` are rows ``there`` of the whole."""

    count: int
    here: Tensor
    there: Tensor


@dataclass(frozen=True)
class Kind:
    """Nodes or edges of a type, or of all types: how many there are, and each rank's."""

    total: int
    pieces: tuple[Piece, ...]


class Layout:
    """Which rows of the whole graph each rank's rows are, by the types of nodes and edges."""

    def __init__(self, nodes: Sequence[Kind], edges: Sequence[Kind]) -> None:
        known = [kind for one in (nodes, edges) for kind in (*one, *_together(one))]
        self.kinds = [kind for kind in known if kind.total]

    def dim_of_rows(
        self, whole: Sequence[int], parts: Sequence[Sequence[int]]
    ) -> list[tuple[int, Kind]]:
        """(dimension, kind) by which tensors of these shapes may be rows of one kind."""

        def are_rows(dim: int, kind: Kind) -> bool:
            wanted = [[*whole[:dim], one.count, *whole[dim + 1 :]] for one in kind.pieces]
            return kind.total == whole[dim] and wanted == [list(part) for part in parts]

        pairs = ((dim, kind) for dim in range(len(whole)) for kind in self.kinds)
        return [pair for pair in pairs if are_rows(*pair)]

    def difference(
        self, whole: Tensor, parts: Sequence[Tensor], scale: float = 0, *,
        strict: bool = False, shares: bool = False,
    ) -> float | None:  # fmt: skip
        """The largest difference over the largest number of ``whole`` (or ``scale``, if larger);
        ``None`` where it cannot be said which rows of ``parts`` are which.

        Of whole numbers it is the share that differs. Tensors may be rows of nodes or edges by any
        dimension, the same on all ranks, or rows in an order that is not known. ``strict``: what
        may be rows of nodes or edges, is. ``shares``: one number may be the sum of the ranks'.
        """
        shapes = [part.shape for part in parts]
        are_alike = all(shape == whole.shape for shape in shapes)
        found = [
            apart(whole, _joined(whole, parts, dim, kind), scale)
            for dim, kind in self.dim_of_rows(whole.shape, shapes)
        ]
        if are_alike and not (strict and found):
            found.append(max(apart(whole, part, scale) for part in parts))
        if are_alike and shares and whole.numel() == 1:
            found.append(apart(whole, torch.stack(list(parts)).sum(0).to(whole.dtype), scale))
        if not found and _fit_together(whole, parts):
            found.append(apart(_sorted(whole), _sorted(torch.cat(list(parts))), scale))
        return min(found, default=None)


def _together(kinds: Sequence[Kind]) -> list[Kind]:
    """All types one behind the other, on each rank and in the whole graph, if there are several."""
    if len(kinds) < 2:
        return []
    starts, pieces = list(accumulate((kind.total for kind in kinds), initial=0)), []
    for ranks in zip(*(kind.pieces for kind in kinds)):
        own = list(accumulate((piece.count for piece in ranks), initial=0))
        here = torch.cat([piece.here + start for piece, start in zip(ranks, own)])
        there = torch.cat([piece.there + start for piece, start in zip(ranks, starts)])
        pieces.append(Piece(own[-1], here, there))
    return [Kind(starts[-1], tuple(pieces))]


def layout_of(graph: GraphArrays, parts: np.ndarray) -> Layout:
    """Which nodes and edges each rank has, in the order in which it has them."""

    def kind(owner: Tensor) -> Kind:
        found = [(owner == rank).nonzero()[:, 0] for rank in range(int(parts.max()) + 1)]
        return Kind(len(owner), tuple(Piece(len(i), torch.arange(len(i)), i) for i in found))

    all_owners = torch.from_numpy(np.asarray(parts, np.int64))
    owners = dict(zip(graph.num_nodes, all_owners.split([*graph.num_nodes.values()])))
    edges = [kind(owners[etype[2]][dst]) for etype, (_, dst) in graph.edges.items()]
    return Layout(list(map(kind, owners.values())), edges)


def _joined(whole: Tensor, parts: Sequence[Tensor], dim: int, kind: Kind) -> Tensor:
    made = torch.empty_like(whole, dtype=parts[0].dtype)
    for part, piece in zip(parts, kind.pieces, strict=True):
        made.index_copy_(dim, piece.there, part.index_select(dim, piece.here))
    return made


def _fit_together(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the ranks' rows, in any order, can be those of the whole."""
    if whole.dim() == 0 or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    return all(part.dim() for part in parts) and sum(map(len, parts)) == len(whole)


def _sorted(rows: Tensor) -> Tensor:
    """Rows in an order that only their numbers decide, but for rounding."""
    flat = rows.reshape(len(rows), -1).double().nan_to_num()
    weights = torch.sin(1.0 + torch.arange(flat.shape[1], dtype=torch.float64))
    return rows[(flat @ weights).argsort(stable=True)]


def apart(expected: Tensor, got: Tensor, scale: float = 0) -> float:
    """How far two tensors of one shape are apart, see :meth:`Layout.difference`."""
    if expected.numel() == 0:
        return 0.0
    if not expected.is_floating_point():
        return float((expected != got).double().mean())
    expected, got = expected.double(), got.double()
    if not torch.equal(expected.isnan(), got.isnan()):
        return float("inf")
    rest = ~((expected == got) | expected.isnan())
    if not rest.any():
        return 0.0
    size = max(largest(expected), scale, _SMALL)
    return float((expected - got)[rest].abs().max()) / size


def largest(values: Tensor) -> float:
    """The largest finite magnitude; 0 without any."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if len(finite) else 0.0
