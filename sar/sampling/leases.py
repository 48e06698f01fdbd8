"""Memory of batches that is used again: fresh pages cost more than what is copied into them."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor

IDLE = 16  # buffers of batches that are kept for those to come
_LEAST = 1 << 16  # bytes; less is left to the allocator
_ROOM = 1.125  # times what is asked for, as batches differ


class Leases:
    """Hands out buffers that come back when nobody holds them any more.

    A buffer is the memory of an array, which the tensor holds; the end of the array, and so of the
    last tensor that shares the memory, gives it back.

    Args:
        most: idle buffers that are kept, the largest.
    """

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


class Grown:
    """One buffer that is used again and again, as large as was needed."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, count: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Uninitialised [count]; what was taken before is overwritten."""
        nbytes = count * dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(int(nbytes * _ROOM), dtype=torch.uint8)
        return self._buffer[:nbytes].view(dtype)
