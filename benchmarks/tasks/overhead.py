"""Epochs so small that what is measured is the library itself."""

from __future__ import annotations

import cProfile
import pstats
import time

from benchmarks.tasks.sage import Sar

_WARM = 5


class Overhead(Sar):
    """One rank; see :class:`benchmarks.tasks.sage.Sar`."""

    def epochs(self, number: int) -> dict[str, list[float]]:
        """Per epoch: seconds of the process and of its main thread, and collectives begun."""
        found: dict[str, list[float]] = {"cpu": [], "thread": [], "collectives": []}
        for _ in range(_WARM):
            self.step()
        for _ in range(number):
            begin = time.process_time(), time.thread_time(), self.group.counters.collectives
            self.step()
            end = time.process_time(), time.thread_time(), self.group.counters.collectives
            for name, a, b in zip(found, begin, end):
                found[name].append(b - a)
        return found

    def profiled(self, number: int, lines: int) -> str:
        """Where the main thread's time goes, as the profiler of Python prints it."""
        import io

        profile, text = cProfile.Profile(time.thread_time), io.StringIO()
        profile.enable()
        for _ in range(number):
            self.step()
        profile.disable()
        pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(lines)
        return text.getvalue()
