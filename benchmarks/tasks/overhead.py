"""Epochs so small that what is measured is the library itself."""

from __future__ import annotations

import time

from benchmarks.tasks.sage import Dgl, Sar, Task

_WARM = 5


class Timed(Task):
    """A task whose small epochs are timed one by one."""

    def collectives(self) -> int:
        """Begun so far."""
        return 0

    def epochs(self, number: int) -> dict[str, list[float]]:
        """Per epoch: seconds of the process and of its main thread, and collectives begun."""
        found: dict[str, list[float]] = {"cpu": [], "thread": [], "collectives": []}
        for _ in range(_WARM):
            self.step()
        for _ in range(number):
            begin = time.process_time(), time.thread_time(), self.collectives()
            self.step()
            end = time.process_time(), time.thread_time(), self.collectives()
            for name, a, b in zip(found, begin, end):
                found[name].append(b - a)
        return found


class Overhead(Timed, Sar):
    """One rank; see :class:`benchmarks.tasks.sage.Sar`."""

    def collectives(self) -> int:
        return self.group.counters.collectives


class Share(Timed, Dgl):
    """A graph as large as a rank's part, in a process that talks to nobody."""
