"""What a running process can still set: its threads, and its allocator; see Note [Allocators]."""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

import torch

from sar.comm import one_host
from sar.errors import NotSupportedError

GONE = "gone: --allocator system keeps nothing, --allocator tbb all that it likes"
_SOFT_LIMIT = "SAR_SOFT_LIMIT"
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's mallopt
_BIG_BUFFER = 1 << 20


def tune_allocator() -> None:
    """What a running process can still set.

    Buffers of 1 MiB and more are mapped, so that freeing them returns memory (``mallopt``), unless
    ``MALLOC_MMAP_THRESHOLD_`` says otherwise. Raises ``ValueError`` where ``SAR_SOFT_LIMIT`` is.
    """
    text = os.environ.get(_SOFT_LIMIT)
    if text:
        raise ValueError(f"{_SOFT_LIMIT}: got {text!r}, but soft limits are {GONE}")
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_MMAP_THRESHOLD, _BIG_BUFFER)
            libc.mallopt(_TRIM_THRESHOLD, _BIG_BUFFER)


def set_soft_limit(size: int) -> None:
    """Gone. Raises ``NotSupportedError``."""
    raise NotSupportedError(f"soft_limit: got {size}, but soft limits are {GONE}")


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
