"""Maximum and minimum over edges, block by block, with a tie-break that no cut can change."""

from __future__ import annotations

import torch
from torch import Tensor

_NO_EDGE = torch.iinfo(torch.int32).max


class ExtremeReducer:
    """Running max or min per row and feature, and the edge it came from.

    Ties go to the smallest edge position; NaN wins over every number, as in ``torch.amax``. The
    result is the same for any order and any split of the edges into blocks.

    Attributes:
        value: [num_rows, width] the extreme so far (undefined where ``edge`` is ``NO_EDGE``).
        edge: int32 [num_rows, width] position of the edge it came from.
    """

    NO_EDGE = _NO_EDGE

    def __init__(self, largest: bool, num_rows: int, like: Tensor) -> None:
        width = like.shape[1]
        self.largest = largest
        self.value = like.new_zeros((num_rows, width))
        self.edge = torch.full((num_rows, width), _NO_EDGE, dtype=torch.int32, device=like.device)

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        """Take a block of edges: rows int32 [e], positions int32 [e], values [e, width]."""
        if len(row) == 0 or values.shape[1] == 0:
            return
        rows, segment = torch.unique(row.long(), return_inverse=True)
        slot = segment.unsqueeze(1).expand_as(values)
        best = self._scatter(values, slot, len(rows))
        winner = self._same(values, best.index_select(0, segment))
        candidate = torch.where(winner, position.unsqueeze(1), _NO_EDGE)
        edge = candidate.new_full(best.shape, _NO_EDGE)
        edge.scatter_reduce_(0, slot, candidate, "amin")
        self._merge(rows, best, edge)

    def result(self) -> Tensor:
        """[num_rows, width]; 0 where a row has no edge."""
        return self.value.masked_fill_(self.edge == _NO_EDGE, 0)

    def _scatter(self, values: Tensor, slot: Tensor, num_rows: int) -> Tensor:
        best = values.new_zeros((num_rows, values.shape[1]))
        how = "amax" if self.largest else "amin"
        best.scatter_reduce_(0, slot, values, how, include_self=False)
        nans = torch.isnan(values)
        if bool(nans.any()):  # not every backend's scatter carries them
            seen = torch.zeros_like(best, dtype=torch.int32)
            seen.scatter_reduce_(0, slot, nans.int(), "amax")
            best.masked_fill_(seen.bool(), float("nan"))
        return best

    @staticmethod
    def _same(a: Tensor, b: Tensor) -> Tensor:
        return (a == b) | (torch.isnan(a) & torch.isnan(b))

    def _merge(self, rows: Tensor, best: Tensor, edge: Tensor) -> None:
        old, old_edge = self.value.index_select(0, rows), self.edge.index_select(0, rows)
        ahead = best > old if self.largest else best < old
        better = (old_edge == _NO_EDGE) | ahead | (torch.isnan(best) & ~torch.isnan(old))
        tied = self._same(best, old) & ~better
        edge = torch.where(better, edge, torch.where(tied, torch.minimum(edge, old_edge), old_edge))
        self.value.index_copy_(0, rows, torch.where(better, best, old))
        self.edge.index_copy_(0, rows, edge)
