"""The table of implementations by device, and chunks, generators, memory and clocks of devices.

An implementation is filed by :func:`implements` where it is written. An operation looks it up in
:data:`KERNELS`, once a call, and is done by torch's own operators where there is none. Code with no
such second form asks :func:`has` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
KERNELS: dict[tuple[str, str, torch.dtype], Callable[..., Any]] = {}
HOST_CHUNK_BYTES = 8 << 20  # stays in the caches
DEVICE_CHUNK_BYTES = 1 << 30  # few launches: with chunks of 8 MiB a GPU waits for them
_MARKS = 1 << 12  # that are kept before the device is waited for


def implements(operation: str, device: str, *dtypes: torch.dtype) -> Callable[[F], F]:
    """Decorator of what computes ``operation`` on a type of device, for numbers of ``dtypes``."""

    def file(function: F) -> F:
        for dtype in dtypes:
            KERNELS[operation, device, dtype] = function
        has.cache_clear()
        return function

    return file


@cache
def has(operation: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an implementation is filed."""
    return (operation, device.type, dtype) in KERNELS


def is_host(device: torch.device) -> bool:
    """Whether a device is the processor: its memory, its generator, the clock of this thread."""
    return device.type == "cpu"


@cache
def chunk_bytes(device: torch.device) -> int:
    """Bytes of edge values that are computed at once where nobody says how many."""
    return HOST_CHUNK_BYTES if is_host(device) else DEVICE_CHUNK_BYTES


def same_random(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Afterwards random numbers of these devices and of the processor go on as before."""
    places = {device.index or 0 for device in devices if device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(places))


def peak_bytes(device: torch.device) -> int:
    """Most bytes of tensors on a CUDA device since :func:`reset_peak`; 0 of others."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Timed(Protocol):
    """An object that gets the seconds that its work took."""

    seconds: float


class StreamClock:
    """Time as a CUDA device's stream passes it: the host's clock tells when work was asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last, self._marks = self._event(), list[tuple[Timed, Any, Any]]()

    def mark(self, taken: Timed) -> None:
        """Count the stream's time since the mark before as ``taken``'s; without waiting."""
        event = self._event()
        self._marks.append((taken, self._last, event))
        self._last = event
        if len(self._marks) >= _MARKS:
            self.settle()

    def settle(self) -> None:
        """Wait for the last mark, and add the seconds of each."""
        self._last.synchronize()
        for taken, begin, end in self._marks:
            taken.seconds += begin.elapsed_time(end) / 1000
        self._marks.clear()

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def clock_of(device: torch.device) -> StreamClock | None:
    """A clock for a device that computes asynchronously; ``None`` for the processor."""
    return StreamClock(device) if device.type == "cuda" else None
