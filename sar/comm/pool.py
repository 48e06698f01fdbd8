"""Buffers that are handed out again."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage


class _Idle(NamedTuple):
    """A buffer that was given back; what torch says of a storage takes microseconds each time."""

    nbytes: int
    device: torch.device
    storage: UntypedStorage


class BufferPool:
    """Keeps the few largest buffers that were given back and hands them out again.

    Fresh ones for each round cost page faults and fragment the heap.
    """

    LIMIT = 4  # two rounds in flight, each a send and a receive buffer
    WASTE = 8  # times what is asked for, a buffer is too good for it

    def __init__(self) -> None:
        self._free: list[_Idle] = []

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, most: int = 0
    ) -> Tensor:
        """An uninitialised contiguous tensor; return it with :meth:`give` when done.

        Args:
            most: rows that will be asked for later; a new buffer has room for them on the CPU,
                where memory takes none before it is written.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        best, least, is_small = -1, self.WASTE * nbytes + 1, False
        for index, idle in enumerate(self._free):
            is_small |= idle.nbytes < nbytes
            if nbytes <= idle.nbytes < least and idle.device == device:
                best, least = index, idle.nbytes
        if best < 0:
            if is_small:
                self._drop_smallest()  # too small for this width: make room before growing
            rows = max(most, shape[0]) if device.type == "cpu" else shape[0]
            return torch.empty((rows, *shape[1:]), dtype=dtype, device=device)[: shape[0]]
        storage = self._free.pop(best).storage
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)  # type: ignore[call-overload]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. The caller holds no view of it any more."""
        storage = buffer.untyped_storage()
        self._free.append(_Idle(storage.nbytes(), buffer.device, storage))
        if len(self._free) > self.LIMIT:
            self.shrink(self.LIMIT)

    def shrink(self, number: int) -> None:
        """Let all idle buffers go but the largest ``number``."""
        while len(self._free) > number:
            self._drop_smallest()

    def clear(self) -> None:
        """Let all idle buffers go."""
        self._free.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for reuse."""
        return sum(idle.nbytes for idle in self._free)

    def _drop_smallest(self) -> None:
        smallest = min(range(len(self._free)), key=lambda i: self._free[i].nbytes)
        del self._free[smallest]
