"""Rows of mapped tensors in another order than they lie in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sar.partition.features import Rows
from sar.partition.mapped import MappedTensor


class PickedRows:
    """Chosen rows of tensors that lie one behind the other; read when asked for.

    Args:
        sources: of one dtype and row shape.
        picked: int [n] positions in all rows of the sources together.
    """

    def __init__(self, sources: Sequence[MappedTensor], picked: np.ndarray) -> None:
        self._sources, self._picked = sources, picked
        self._bounds = np.cumsum([0, *map(len, sources)])
        self.dtype = sources[0].dtype
        self.shape = (len(picked), *sources[0].shape[1:])

    def __len__(self) -> int:
        return len(self._picked)

    def rows(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Rows ``[start, stop)``, as ``dtype`` if given."""
        picked = self._picked[start:stop]
        if len(self._sources) == 1:
            return self._sources[0].pick(picked, dtype)
        out = torch.empty((len(picked), *self.shape[1:]), dtype=dtype or self.dtype)
        owner = np.searchsorted(self._bounds, picked, side="right") - 1
        for number in np.unique(owner):
            mine = np.flatnonzero(owner == number)
            rows = self._sources[number].pick(picked[mine] - self._bounds[number], dtype)
            out[torch.from_numpy(mine)] = rows
        return out


def pick(source: MappedTensor, order: np.ndarray) -> Rows:
    """The rows of ``source`` in ``order``; itself where it has them so."""
    if len(order) == len(source) and np.array_equal(order, np.arange(len(order))):
        return source
    return PickedRows([source], order)
