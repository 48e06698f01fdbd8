"""What a running process can still set: its threads, and its allocator; see Note [Allocators]."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

import torch

from sar.comm import one_host
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


def tune_process() -> None:
    """Settings that a running process can still make: threads, and :func:`tune_allocator`'s.

    Raises ``ValueError`` for what cannot be read in the environment, before anybody waits.

    torchrun sets ``OMP_NUM_THREADS=1`` for several ranks of a host when the user did not; then this
    rank's share of the cores is used instead, with a warning.
    """
    tune_allocator()
    one_host.is_wanted()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    share = max(1, len(os.sched_getaffinity(0)) // local_ranks)
    silent = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if silent and local_ranks > 1 and share > 1 and os.environ.get("SAR_KEEP_THREADS") is None:
        warnings.warn(
            f"torchrun set OMP_NUM_THREADS=1; using {share} threads, this rank's share of the "
            "cores. Set SAR_KEEP_THREADS=1 to keep one.",
            stacklevel=3,
        )
        torch.set_num_threads(share)
