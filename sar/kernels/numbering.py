"""Numbering nodes in the order in which they come: a hash table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.jit import STEP, inlined, ordered_kernel, prefetch_byte

_EMPTY = -1  # in a table of ids
_IDS_AHEAD = 16
_IDS_AT_ONCE = 1 << 13  # so that the table grows by those that are new, not by all
_ONE = np.uint64(1)


@inlined
def _home(shift: Any, wanted: Any) -> Any:
    """The slot to look in first: the highest bits of a product (Knuth 1998, section 6.4); with the
    middle ones a search takes four times as long."""
    return (np.uint64(wanted) * STEP) >> shift


@inlined
def _ask_ahead(table: Any, shift: Any, ids: Any, i: int) -> None:
    if i + _IDS_AHEAD < ids.shape[0]:
        slot = _home(shift, ids[i + _IDS_AHEAD])
        prefetch_byte(table, np.int64(slot) * 2 * table.itemsize)


@ordered_kernel
def _number(table: Any, shift: Any, nodes: Any, count: int, ids: Any, local: Any) -> int:
    mask = np.uint64(table.shape[0] - 1)
    for i in range(ids.shape[0]):
        _ask_ahead(table, shift, ids, i)
        slot = _home(shift, ids[i])
        while table[slot, 0] != _EMPTY and table[slot, 0] != ids[i]:
            slot = (slot + _ONE) & mask
        # Without a branch: whether an id is new cannot be foreseen. nodes has room for one more.
        is_new = table[slot, 0] == _EMPTY
        number = count if is_new else np.int64(table[slot, 1])
        table[slot, 0] = ids[i]
        table[slot, 1] = number
        nodes[count] = ids[i]
        count += is_new
        local[i] = number
    return count


@ordered_kernel
def _find(table: Any, shift: Any, ids: Any, local: Any) -> None:
    mask = np.uint64(table.shape[0] - 1)
    for i in range(ids.shape[0]):
        _ask_ahead(table, shift, ids, i)
        slot = _home(shift, ids[i])
        while table[slot, 0] != _EMPTY and table[slot, 0] != ids[i]:
            slot = (slot + _ONE) & mask
        local[i] = table[slot, 1] if table[slot, 0] == ids[i] else _EMPTY


class Numbering:
    """Numbers nodes in the order in which they first come, ``count`` so far: an open hash table.
    ``is_wide``: ids may need 64 bits."""

    def __init__(self, is_wide: bool = True) -> None:
        self.count, self.is_wide = 0, is_wide
        self._dtype = np.int64 if is_wide else np.int32
        self._nodes = np.empty(64, np.int64)
        self._table = np.full((256, 2), _EMPTY, self._dtype)

    @property
    def _shift(self) -> np.uint64:
        """The shift that leaves as many bits of a product as number the table's slots."""
        return np.uint64(65 - len(self._table).bit_length())

    def clear(self) -> None:
        """Forget all ids, and keep the memory."""
        self.count = 0
        self._table.fill(_EMPTY)

    def number(self, ids: Tensor, local: Tensor | None = None) -> Tensor:
        """Numbers of ids, int64 [m] both; new ids get the next ones. ``local`` gets the numbers,
        and may be ``ids``."""
        local = torch.empty(len(ids), dtype=torch.int64) if local is None else local
        given, out = ids.numpy(), local.numpy()
        for first in range(0, len(ids), _IDS_AT_ONCE):
            some = given[first : first + _IDS_AT_ONCE]
            self._make_room(len(some))
            numbers = out[first : first + _IDS_AT_ONCE]
            self.count = _number(self._table, self._shift, self._nodes, self.count, some, numbers)
        return local

    def find(self, ids: Tensor) -> Tensor:
        """Numbers of ids, int64 [m] both; -1 for those that have not come."""
        local = torch.empty(len(ids), dtype=torch.int64)
        _find(self._table, self._shift, ids.numpy(), local.numpy())
        return local

    def nodes(self, first: int = 0) -> Tensor:
        """The ids, int64, of the numbers from ``first`` on; a view until more are numbered."""
        return torch.from_numpy(self._nodes[first : self.count])

    def _make_room(self, more: int) -> None:
        """Make room for as many new ids, in a table of which a third stays empty."""
        if self.count + more >= len(self._nodes):
            grown = np.empty(2 * (self.count + more), np.int64)
            grown[: self.count] = self._nodes[: self.count]
            self._nodes = grown
        size = len(self._table)
        while 2 * size < 3 * (self.count + more):
            size *= 2
        if size > len(self._table):
            self._table = np.full((size, 2), _EMPTY, self._dtype)
            known = self._nodes[: self.count].copy()
            _number(self._table, self._shift, self._nodes, 0, known, np.empty_like(known))
