"""What the environment tells a rank, and what its process can set: threads, Note [Allocators]."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from sar.comm import one_host
from sar.words import SOFT_LIMITS_GONE

_SOFT_LIMIT = "SAR_SOFT_LIMIT"
_COUNTS_OF_OTHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # mpirun, srun
_DEFAULT_PORT, _LAST_PORT = 12345, 65535
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # parameters of glibc's mallopt
_BIG_BUFFER = 1 << 20


def number(name: str, value: int | None, variable: str) -> int:
    """``value``, or else the variable's; ``ValueError`` where neither is given."""
    if value is not None:
        return int(value)
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(f"{name}: got nothing, expected an argument or {variable} from torchrun")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{variable}: got {text!r}, expected a non-negative integer")
    return int(text)


def port(value: int | None, size: int) -> int:
    """The port of the store of ``size`` ranks; 0, any free one, for one rank alone."""
    if value is None and "MASTER_PORT" not in os.environ:
        return _DEFAULT_PORT
    found = number("master_port_number", value, "MASTER_PORT")
    if not 0 <= found <= _LAST_PORT:
        raise ValueError(
            f"master_port_number, MASTER_PORT: got {found}, expected 0 to {_LAST_PORT}"
        )
    if found == 0 and size > 1:
        raise ValueError(
            "master_port_number, MASTER_PORT: got 0, any free port, which only one rank alone can "
            f"take; expected 1 to {_LAST_PORT}"
        )
    return found


def is_alone() -> bool:
    """Whether neither ``RANK`` nor ``WORLD_SIZE`` is set; ``ValueError`` where mpirun or srun
    started several processes: each would train alone."""
    if {"RANK", "WORLD_SIZE"} & set(os.environ):
        return False
    if (count := several_processes()) is not None:
        raise ValueError(
            f"rank: got nothing, and {count} says that there are several processes; expected RANK "
            "and WORLD_SIZE (docs/launching.md says how)"
        )
    return True


def several_processes() -> str | None:
    """The variable, as ``NAME=count``, that says that a launcher started several processes."""
    for variable in ("WORLD_SIZE", *_COUNTS_OF_OTHERS):
        count = os.environ.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            return f"{variable}={count}"
    return None


def take_device(device: torch.device) -> None:
    """Make the CUDA device number ``LOCAL_RANK`` current, unless the script chose another than the
    first: all ranks of a host would share that one."""
    place = os.environ.get("LOCAL_RANK", "")
    if device.type != "cuda" or not place.isdigit() or torch.cuda.current_device() != 0:
        return
    torch.cuda.set_device(int(place) % torch.cuda.device_count())


def tune_process() -> None:
    """Set the number of threads and the allocator; ``ValueError`` for what cannot be read. torchrun
    sets ``OMP_NUM_THREADS=1`` for several ranks of a host when the user did not; then this rank's
    share of the cores is used instead, with a warning."""
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


def tune_allocator() -> None:
    """Have buffers of 1 MiB and more mapped, so that freeing them returns memory (``mallopt``),
    unless ``MALLOC_MMAP_THRESHOLD_`` says otherwise; ``ValueError`` for ``SAR_SOFT_LIMIT``."""
    text = os.environ.get(_SOFT_LIMIT)
    if text:
        raise ValueError(f"{_SOFT_LIMIT}: got {text!r}, but {SOFT_LIMITS_GONE}")
    if sys.platform == "linux" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_MMAP_THRESHOLD, _BIG_BUFFER)
            libc.mallopt(_TRIM_THRESHOLD, _BIG_BUFFER)


def memory_left() -> float:
    """Bytes that this process may still take, of the machine and of its container; infinite where
    nothing tells."""
    left = math.inf
    with suppress(OSError):  # not Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next((line for line in lines if line.startswith("MemAvailable")), None)
        left = int(found.split()[1]) * 1024 if found else left
    for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        with suppress(OSError, ValueError):  # none of this version of control groups, or no limit
            folder = _control_group(limit)
            limits = [int((folder / f"memory.{name}").read_text()) for name in (limit, used)]
            left = min(left, limits[0] - limits[1])
    return left


def _control_group(limit: str) -> Path:
    """The folder of this process' control group that has a limit of its memory. Raises ``OSError``
    where there is none."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        for own in (root / kinds / path.lstrip("/"), root / kinds):  # a container may see its own
            if kinds in ("", "memory") and (own / f"memory.{limit}").exists():
                return own
    raise FileNotFoundError(f"{root}: no memory.{limit}")
