"""Round buffers that are reused: fresh ones cost page faults and fragment the heap."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class BufferPool:
    """Keeps the few largest byte buffers that were given back and hands them out again."""

    LIMIT = 4  # two rounds in flight, each a send and a receive buffer

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised contiguous tensor; return it with :meth:`give` when done."""
        nbytes = math.prod(shape) * dtype.itemsize
        fitting = [b for b in self._free if b.numel() >= nbytes and b.device == device]
        if fitting:
            raw = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not raw]
        else:
            if self._free:  # too small for this width: make room before growing
                self._drop_smallest()
            raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return raw[:nbytes].view(dtype).view(shape)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back. The caller holds no view of it any more."""
        raw = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        raw.set_(buffer.untyped_storage())  # type: ignore[call-overload]
        self._free.append(raw)
        if len(self._free) > self.LIMIT:
            self._drop_smallest()

    def clear(self) -> None:
        """Let all idle buffers go."""
        self._free.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for reuse."""
        return sum(buffer.numel() for buffer in self._free)

    def _drop_smallest(self) -> None:
        smallest = min(range(len(self._free)), key=lambda i: self._free[i].numel())
        del self._free[smallest]
