"""Ranks as threads of this process: cheap, with a deadline."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from harness.failures import COLLECTIVE_TIMEOUT, DEADLINE, HarnessTimeout
from sar.comm import ThreadGroup


def run_threads(
    size: int,
    case: Callable[..., Any],
    *args: Any,
    timeout: float = COLLECTIVE_TIMEOUT,
    deadline: float = DEADLINE,
) -> list[Any]:
    """Results of ``case(group, *args)`` in rank order; the first error is raised as it is.

    A thread cannot be ended from outside: one that never returns is reported with its stack and
    left behind as a daemon.
    """
    outcome: dict[str, Any] = {}
    before = set(threading.enumerate())

    def main() -> None:
        try:
            outcome["results"] = ThreadGroup.run(
                size, lambda group: case(group, *args), timeout=timeout
            )
        except BaseException as error:  # noqa: BLE001 - raised again below, in the test's thread
            outcome["error"] = error

    runner = threading.Thread(target=main, name="harness", daemon=True)
    runner.start()
    runner.join(deadline)
    if runner.is_alive():
        raise HarnessTimeout(
            f"{_name(case)} on {size} threads still ran after {deadline} s\n"
            + _stacks(set(threading.enumerate()) - before - {runner})
        )
    if "error" in outcome:
        raise outcome["error"]
    return outcome["results"]


def _stacks(threads: set[threading.Thread]) -> str:
    frames = sys._current_frames()
    texts = []
    for thread in sorted(threads, key=lambda t: t.name):
        frame = frames.get(thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "ended meanwhile\n"
        texts.append(f"--- thread {thread.name}\n{stack}")
    return "".join(texts)


def _name(case: Callable[..., Any]) -> str:
    return getattr(case, "__name__", repr(case))
