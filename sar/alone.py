"""Work whose result all processes of a host find, such as compiled code: one of them does it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

PATIENCE = 30.0  # seconds; the longest kernel takes three
_within: list[str] = []  # files of what this process is about


@contextmanager
def alone(source: str) -> Iterator[None]:
    """Inside, no other process of this host is about what is in the file: it waits, and may find
    the result then. Not for ever, as who is inside may be stopped; nor while it holds others."""
    with open(source, "rb") as file:
        end = time.monotonic() + (0 if _within else PATIENCE)
        _within.append(source)
        try:
            while _is_taken(file) and time.monotonic() < end:
                time.sleep(0.02)
            yield
        finally:
            _within.remove(source)


def _is_taken(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # some shared file systems have no locks
        return isinstance(error, BlockingIOError)
    return False
