"""Memory of batches, used again: fresh pages cost more than what is copied into them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.comm.environment import memory_left
from sar.kernels.numbering import Numbering

_ALIGNMENT = 8
IDLE = 16  # buffers of batches that are kept for those to come
_LEAST = 1 << 16  # bytes; less is left to the allocator
_ROOM = 1.125  # times what is asked for, as batches differ
_MUCH = 1 << 28  # bytes; less is asked for without a look at what there is


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to where the next part of a message begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def check_memory(nbytes: int, what: str) -> None:
    """Raise ``MemoryError`` where too little is left: Linux would give it, then end the process."""
    if nbytes < _MUCH or nbytes <= (left := memory_left()):
        return
    raise MemoryError(f"{what} need {nbytes:,} bytes, {left:,.0f} are left; expected fewer")


class BufferPool:
    """Buffers that come back when no tensor on their memory is left; the ``most`` largest stay."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[np.ndarray] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor on the CPU. One thread takes; any gives back."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST:
            return torch.empty(shape, dtype=dtype)
        leased = self._fitting(nbytes)[:nbytes]
        base: Any = leased.base
        weakref.finalize(leased, self._idle.append, base).atexit = False
        return torch.from_numpy(leased).view(dtype).view(shape)

    def _fitting(self, nbytes: int) -> np.ndarray:
        while len(self._idle) > self._most:
            del self._idle[min(range(self._most), key=lambda at: self._idle[at].nbytes)]
        fits = [at for at, one in enumerate(self._idle) if one.nbytes >= nbytes]
        if fits:
            return self._idle.pop(min(fits, key=lambda at: self._idle[at].nbytes))
        return np.empty(int(nbytes * _ROOM), np.uint8)


class Scratch:
    """One buffer, overwritten at each use, which grows as needed."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        nbytes = count * dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(int(nbytes * _ROOM), dtype=torch.uint8)
        return self._buffer[:nbytes].view(dtype)


class NumberingPool:
    """Hash tables, used again: a new one costs as much as what is done with it."""

    def __init__(self) -> None:
        self._idle: dict[bool, list[Numbering]] = {True: [], False: []}

    def take(self, most: int) -> Numbering:
        is_wide = most > torch.iinfo(torch.int32).max
        idle = self._idle[is_wide]
        return idle.pop() if idle else Numbering(is_wide)

    def give(self, numberings: Iterable[Numbering]) -> None:
        """Take back hash tables of which the caller holds no views."""
        for one in numberings:
            one.clear()
            self._idle[one.is_wide].append(one)
