"""What may wait for others for ever, with a limit of time and an eye on whether they are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from sar.comm.failure import FailureBoard

_T = TypeVar("_T")

_LOOK_SECONDS = 0.5  # from one look at who has ended to the next
_GRACE_SECONDS = 1.5  # for what waits to end by itself then, with the better error
_stuck: list[threading.Thread] = []  # what did not end in time


def stuck() -> bool:
    """Whether this process gave up a thread that waits for others.

    What it holds of torch may abort the process while that is taken down, also when it has ended.
    """
    return bool(_stuck)


def watched(make: Callable[[], _T], board: FailureBoard, device: torch.device, limit: float) -> _T:
    """What ``make`` returns or raises; ``TimeoutError`` if it does neither in time, or a rank has
    ended meanwhile.

    A thread does it: what torch waits for has limits of its own, one behind the other, and a
    network or a rank that goes away before it has connected is not noticed.

    Args:
        device: of this rank; a thread has a current CUDA device of its own.
        limit: seconds.
    """
    done: list[_T] = []
    failed: list[BaseException] = []
    index = torch.cuda.current_device() if device.type == "cuda" else None

    def body() -> None:
        try:
            if index is not None:
                torch.cuda.set_device(index)
            done.append(make())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=body, name="sar-meeting", daemon=True)
    _stuck.append(thread)  # also if an interrupt comes now
    thread.start()
    _watch(thread, board, limit)
    if not done and not failed:
        raise TimeoutError("no answer")
    _stuck.remove(thread)
    if failed:
        raise failed[0]
    return done[0]


def _watch(thread: threading.Thread, board: FailureBoard, limit: float) -> None:
    """Return when it has ended, or the time is over, or a rank that it needs has ended."""
    end = time.monotonic() + limit
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, _LOOK_SECONDS))
        if thread.is_alive() and board.hopeless():
            thread.join(min(left, _GRACE_SECONDS))  # what ended may have met all before
            return
