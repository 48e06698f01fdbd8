"""Compressed edges: the one array layout that every kernel reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.kernels.device import KERNELS, implements

INT32_EDGES = 2**31 - 1  # positions and bounds are int32
_NOWHERE = torch.empty(0, dtype=torch.int32).numpy()


class Arrays(NamedTuple):
    """The tensors of a :class:`Csc` on the CPU as compiled loops take them, the same memory;
    ``rows`` and ``order`` are empty where there are none."""

    rows: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class Csc:
    """Edges grouped by the node they end in.

    The transposed edges (grouped by source) are the same structure with the roles exchanged.

    Attributes:
        rows: int32 [R] the node rows that have edges, ascending; ``None`` when segment i is row i.
        indptr: int32 [R + 1] segment bounds.
        indices: int32 [E] the other end of each edge, a row of the gathered tensor.
        order: int32 [E] position of each edge in the order it was given in; ``None`` if unchanged.
        num_rows: rows of the tensor that is reduced into.
    """

    rows: Tensor | None
    indptr: Tensor
    indices: Tensor
    order: Tensor | None
    num_rows: int

    @cached_property
    def arrays(self) -> Arrays:
        """The edges for compiled loops; kept, as a sum over a few edges takes less time."""
        rows, order = (_NOWHERE if ids is None else ids.numpy() for ids in (self.rows, self.order))
        return Arrays(rows, self.indptr.numpy(), self.indices.numpy(), order)

    @cached_property
    def ids(self) -> list[Tensor]:
        """The tensors that there are, ``indptr`` first."""
        given = self.indptr, self.indices, self.rows, self.order
        return [ids for ids in given if ids is not None]

    def __getstate__(self) -> dict[str, object]:
        """Without ``arrays``: a copy's would be memory of their own beside its tensors."""
        return {name: value for name, value in vars(self).items() if name not in ("arrays", "ids")}

    @property
    def num_edges(self) -> int:
        return self.indices.shape[0]  # len() of a tensor goes through Python

    @property
    def num_segments(self) -> int:
        return self.indptr.shape[0] - 1

    def to(self, device: torch.device) -> Csc:
        rows = None if self.rows is None else self.rows.to(device)
        order = None if self.order is None else self.order.to(device)
        return Csc(rows, self.indptr.to(device), self.indices.to(device), order, self.num_rows)

    def row_of_edges(self) -> Tensor:
        """The node row that each edge is grouped under, int32 [E]."""
        rows = self.rows
        if rows is None:
            rows = torch.arange(self.num_segments, dtype=torch.int32, device=self.indptr.device)
        return torch.repeat_interleave(rows, self.indptr.diff(), output_size=self.num_edges)

    def segments(self, start: int, stop: int) -> Csc:
        """The edges of segments [start, stop), each a row of the result; indices are a view."""
        if self.rows is None and stop - start == self.num_segments:
            return self
        low, high = int(self.indptr[start]), int(self.indptr[stop])
        bounds = self.indptr[start : stop + 1]
        order = None if self.order is None else self.order[low:high]
        indptr = bounds - low if low else bounds
        return Csc(None, indptr, self.indices[low:high], order, stop - start)

    def edge_blocks(self, block_edges: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Runs of at most ``block_edges`` edges: (other end, row, position), int32 [e] each."""
        starts = range(0, self.num_edges, block_edges)
        bounds = torch.tensor([*starts, self.num_edges]).to(self.indptr)
        firsts = torch.searchsorted(self.indptr, bounds[:-1], right=True) - 1
        ends = torch.searchsorted(self.indptr, bounds[1:])
        for low, first, end in zip(starts, firsts.tolist(), ends.tolist(), strict=True):
            high = min(low + block_edges, self.num_edges)
            counts = self.indptr[first : end + 1].clamp(low, high).diff()
            segments = torch.arange(first, end, dtype=torch.int32, device=counts.device)
            segment = segments.repeat_interleave(counts, output_size=high - low)
            span = torch.arange(low, high, dtype=torch.int32, device=counts.device)
            row = segment if self.rows is None else self.rows.index_select(0, segment)
            position = span if self.order is None else self.order[low:high]
            yield self.indices[low:high], row, position


def compress(
    keys: Tensor, others: Tensor, num_rows: int, *, compact: bool, order: bool | Tensor
) -> Csc:
    """Group edges by ``keys``, keeping the given order inside a group.

    Args:
        keys, others: int32 [E] the end to group by and the other end.
        num_rows: rows that keys index.
        compact: leave out rows without edges.
        order: remember each edge's position, for values stored per edge; or this tensor's numbers
            in its place.
    """
    permutation = torch.argsort(keys, stable=True)
    rows = None
    if compact and len(keys) < num_rows:  # few edges: their cost, not that of all rows
        rows, counts = torch.unique_consecutive(keys[permutation], return_counts=True)
    else:
        counts = torch.bincount(keys, minlength=num_rows)
        if compact and bool((counts == 0).any()):
            rows = counts.nonzero().view(-1).int()
            counts = counts[rows]
    if isinstance(order, Tensor):
        positions: Tensor | None = order.index_select(0, permutation)
    else:
        positions = permutation.int() if order else None
    indices = others.index_select(0, permutation)
    return Csc(rows, _bounds(counts), indices, positions, num_rows)


def transpose(csc: Csc, num_rows: int, *, order: bool) -> Csc:
    """The same edges grouped by their other end, inside a group in the order of ``csc``; a segment
    for each of ``num_rows``. ``order``: keep ``csc.order``."""
    permutation = torch.argsort(csc.indices, stable=True)
    indptr = _bounds(torch.bincount(csc.indices, minlength=num_rows))
    eids = csc.order.index_select(0, permutation) if order and csc.order is not None else None
    return Csc(None, indptr, csc.row_of_edges().index_select(0, permutation), eids, num_rows)


def _bounds(counts: Tensor) -> Tensor:
    """Bounds of R segments from their sizes, int32 [R + 1]."""
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    return indptr


def ascending(position: Tensor) -> Tensor:
    """The order, int64, that sorts distinct int32 numbers."""
    run = KERNELS.get(("ascending", position.device.type, position.dtype), torch.argsort)
    return run(position)


@implements("ascending", "cpu", torch.int32)
def _ascending_by_numpy(position: Tensor) -> Tensor:
    """Sort by numpy: its vectorised sort is five times as fast as torch's."""
    return torch.from_numpy(np.argsort(position.numpy()))
