"""Runs one case function on several ranks, as threads or as processes, and compares results.

A case is a function ``case(group, *args)`` that every rank runs. Three clocks are nested: a
collective gives up first, then the harness, then pytest; whoever notices names the cause.
"""

from harness.compare import TOLERANCE, assert_close, assert_gradients_close, relative_error
from harness.failures import COLLECTIVE_TIMEOUT, DEADLINE, HarnessTimeout, RankFailed
from harness.pool import WorkerPool
from harness.threads import run_threads

__all__ = [
    "COLLECTIVE_TIMEOUT",
    "DEADLINE",
    "HarnessTimeout",
    "RankFailed",
    "TOLERANCE",
    "WorkerPool",
    "assert_close",
    "assert_gradients_close",
    "relative_error",
    "run_threads",
]
