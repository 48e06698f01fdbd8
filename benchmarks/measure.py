"""Memory and processor time of the own process, read from the kernel (Linux)."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks import processes

if TYPE_CHECKING:
    from typing_extensions import Self

_PAGE = os.sysconf("SC_PAGE_SIZE")
_RESET_PEAK = "5"  # what clear_refs takes to set VmHWM back to the present
_TBB_CLEAN_ALL = 0  # TBBMALLOC_CLEAN_ALL_BUFFERS


def status_bytes(*names: str) -> list[int]:
    """Fields of /proc/self/status that are given in kB, for example ``RssAnon``, in bytes."""
    with open("/proc/self/status", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return [int(fields[name].split()[0]) * 1024 for name in names]


def busy_seconds() -> float:
    """How long this machine's processors have worked since it started, on the mean of them."""
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system, _idle, _iowait, irq, softirq = map(int, next(lines).split()[1:8])
    ticks = user + nice + system + irq + softirq
    return ticks / os.sysconf("SC_CLK_TCK") / os.sysconf("SC_NPROCESSORS_ONLN")


def settle() -> None:
    """Collect garbage and return free heap to the system."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if hasattr(libc, "scalable_allocation_command"):  # oneTBB's allocator is preloaded
        libc.scalable_allocation_command(_TBB_CLEAN_ALL, None)


def anonymous_bytes() -> int:
    """Resident anonymous memory now."""
    return status_bytes("RssAnon")[0]


@dataclass(frozen=True)
class Peak:
    """The largest anonymous memory of a stretch of time.

    Attributes:
        sampled: the largest reading.
        low, high: what the kernel's exact peak of all resident memory leaves for the anonymous
            part: less the file pages resident at the end, and less those at the beginning. The
            truth lies between them if no file was unmapped meanwhile. Both equal ``sampled`` where
            the kernel does not let its peak be reset.
    """

    sampled: int
    low: int
    high: int

    @property
    def best(self) -> int:
        """The larger of two lower bounds; only for a stretch that unmaps no file."""
        return max(self.sampled, self.low)


class _Watch:
    """Context manager whose :meth:`look` a thread calls again and again."""

    interval: float  # seconds between two readings

    def look(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        self.look()
        while not self._stop.wait(self.interval):
            self.look()


class PeakMemory(_Watch):
    """Watches the anonymous memory of this process."""

    interval = 0.001

    def __enter__(self) -> Self:
        self._files = sum(status_bytes("RssFile", "RssShmem"))
        self._exact = _reset_peak()
        self._largest = anonymous_bytes()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        os.close(self._statm)
        peak, anonymous, *files = status_bytes("VmHWM", "RssAnon", "RssFile", "RssShmem")
        sampled = max(self._largest, anonymous)
        self.peak = Peak(sampled, sampled, sampled)
        if self._exact:
            self.peak = Peak(sampled, peak - sum(files), peak - self._files)

    def look(self) -> None:
        resident, shared = os.pread(self._statm, 128, 0).split()[1:3]
        self._largest = max(self._largest, (int(resident) - int(shared)) * _PAGE)


class PeakOfAll(_Watch):
    """The largest anonymous memory of this process and its children together."""

    interval, peak = 0.005, 0

    def look(self) -> None:
        own = processes.command_line(os.getpid())  # a child that is a copy of it holds no more
        below = [p for p in processes.children(os.getpid()) if processes.command_line(p) != own]
        found = sum(map(processes.anonymous_bytes, [os.getpid(), *below]))
        self.peak = max(self.peak, found)


def _reset_peak() -> bool:
    """Set VmHWM back to the present; False where the system does not allow it."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write(_RESET_PEAK)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Used:
    """Seconds of wall and processor (user, system, all threads) and page faults of a stretch."""

    wall: float
    user: float
    system: float
    faults: int

    @property
    def cpu(self) -> float:
        return self.user + self.system


class Stopwatch:
    """Started when made; :meth:`read` gives what was used since."""

    def __init__(self) -> None:
        self._wall, self._usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)

    def read(self) -> Used:
        now, before = resource.getrusage(resource.RUSAGE_SELF), self._usage
        return Used(
            time.perf_counter() - self._wall,
            now.ru_utime - before.ru_utime,
            now.ru_stime - before.ru_stime,
            now.ru_minflt - before.ru_minflt,
        )
