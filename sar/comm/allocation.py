"""What a running process can still set of its allocator; see Note [Allocators]."""

from __future__ import annotations

import ctypes
import os
import sys

from sar.errors import MissingDependencyError

SOFT_LIMIT = "SAR_SOFT_LIMIT"  # bytes, for :func:`tune_allocator`
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's mallopt
_BIG_BUFFER = 1 << 20
_TBB_SOFT_LIMIT = 1  # TBBMALLOC_SET_SOFT_HEAP_LIMIT


def tune_allocator() -> None:
    """What a running process can still set.

    Buffers of 1 MiB and more are mapped, so that freeing them returns memory (``mallopt``), unless
    ``MALLOC_MMAP_THRESHOLD_`` says otherwise. ``SAR_SOFT_LIMIT`` is the argument of
    :func:`set_soft_limit`, whose errors this raises, and ``ValueError`` for what is no number.
    """
    text = os.environ.get(SOFT_LIMIT)
    if text:
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{SOFT_LIMIT}: got {text!r}, expected bytes, an integer")
        set_soft_limit(int(text))
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_MMAP_THRESHOLD, _BIG_BUFFER)
            libc.mallopt(_TRIM_THRESHOLD, _BIG_BUFFER)


def set_soft_limit(size: int) -> None:
    """From how much memory on oneTBB's allocator gives freed buffers back instead of keeping them.

    Memory that is in use is never refused. A limit that every process exceeds keeps nothing.

    Args:
        size: bytes that the allocator of this process holds, in use or kept.

    Raises:
        TypeError: not an int.
        ValueError: not positive, or more than the system can address.
        MissingDependencyError: this process runs with another allocator.
    """
    check_soft_limit(size)
    allocation_mode = getattr(ctypes.CDLL(None), "scalable_allocation_mode", None)
    if allocation_mode is None:
        raise MissingDependencyError(
            f"soft_limit: got {size}, but this process runs without oneTBB's allocator; start it "
            'after eval "$(sar environment --allocator tbb)"'
        )
    allocation_mode.argtypes = (ctypes.c_int, ctypes.c_ssize_t)
    if allocation_mode(_TBB_SOFT_LIMIT, size) != 0:
        raise ValueError(f"soft_limit: got {size}, which oneTBB's allocator does not take")


def check_soft_limit(size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what :func:`set_soft_limit` does not take."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"soft_limit: got {type(size).__name__}, expected an int of bytes")
    if not 0 < size <= sys.maxsize:
        raise ValueError(f"soft_limit: got {size}, expected bytes, 1 to {sys.maxsize}")
