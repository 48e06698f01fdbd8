"""The edges of a relation in the order in which mailboxes are filled, and their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MailBlock:
    """A few destinations with all their edges, edges of one destination next to each other.

    Attributes:
        dst: int64 [n] destination rows.
        segment: int64 [e] which of the n destinations each edge ends in.
        src: int32 [e] rows of the table: owned source rows, then the halo.
        position: int32 [e] positions of the edges among the local ones.
        runs: (destinations, in-degree) of each run of equal in-degrees.
    """

    number: int
    dst: Tensor
    segment: Tensor
    src: Tensor
    position: Tensor
    runs: list[tuple[int, int]]

    @property
    def ends(self) -> Tensor:
        """The destination row of each edge, int64 [e]."""
        return self.dst.index_select(0, self.segment)


@dataclass(frozen=True)
class MailboxEdges:
    """Every local edge, by ascending in-degree of its destination, destination and position.

    ``dst`` int64 [R] are the destinations that have edges, ``indptr`` int64 [R + 1] the bounds of
    their edges, ``src`` and ``position`` int32 [E] as in :class:`MailBlock`.
    """

    dst: Tensor
    indptr: Tensor
    src: Tensor
    position: Tensor

    @property
    def max_in_degree(self) -> int:
        return int(self.indptr[-1] - self.indptr[-2]) if len(self.dst) else 0

    def blocks(self, block_edges: int) -> Iterator[MailBlock]:
        """Blocks of whole destinations: at most ``block_edges`` edges or one destination each."""
        start = number = 0
        while start < len(self.dst):
            limit = self.indptr[start] + block_edges
            stop = int(torch.searchsorted(self.indptr, limit, right=True)) - 1
            stop = max(stop, start + 1)
            yield self._block(number, start, stop)
            start, number = stop, number + 1

    def _block(self, number: int, start: int, stop: int) -> MailBlock:
        bounds = self.indptr[start : stop + 1]
        degrees = bounds.diff()
        segment = torch.repeat_interleave(degrees)
        each, counts = torch.unique_consecutive(degrees, return_counts=True)
        edges = slice(int(bounds[0]), int(bounds[-1]))
        return MailBlock(
            number,
            self.dst[start:stop],
            segment,
            self.src[edges],
            self.position[edges],
            list(zip(counts.tolist(), each.tolist(), strict=True)),
        )


def in_mailbox_order(
    src: Tensor, dst: Tensor, position: Tensor, in_degrees: Tensor
) -> MailboxEdges:
    """Sort edges (int32 [E] each; ``position`` is a permutation of 0 .. E-1) as mailboxes need
    them."""
    rows = torch.argsort(in_degrees, stable=True)
    rows = rows[in_degrees[rows] > 0]
    place = torch.empty_like(in_degrees)
    place[rows] = torch.arange(len(rows), device=rows.device)
    order = torch.argsort(position)
    order = order[torch.argsort(place[dst[order].long()], stable=True)]
    indptr = torch.zeros(len(rows) + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(in_degrees[rows], 0, out=indptr[1:])
    return MailboxEdges(rows, indptr, src[order], position[order])
