"""What the system says of folders and memory, and forks of this process."""

from __future__ import annotations

import mmap
import os
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Forking(Protocol):
    """Who has to know of forks."""

    def before_fork(self) -> None:
        """The process is about to fork; in the thread that does."""


_forking = WeakSet[Forking]()


@cache
def _watch_forks() -> None:
    def before() -> None:
        for one in list(_forking):
            one.before_fork()

    os.register_at_fork(before=before)


def mind_forks(one: Forking) -> None:
    """Tell ``one`` of forks, as long as it lives."""
    _watch_forks()
    _forking.add(one)


def check_folder(folder: Path, name: str = "directory") -> None:
    """Raise ``ValueError`` for a folder, there or to be made, that is in memory."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    kind = _file_system(os.stat(there).st_dev)
    if kind in _IN_MEMORY:
        raise ValueError(
            f"{name}: {os.fspath(folder)!r} is in memory ({kind}), expected a folder on a disk"
        )


def _file_system(device: int) -> str:
    """The kind of the file system of a device, "" where the system does not tell."""
    name = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, rest = line.partition(" - ")
        if place.split()[2] == name:
            return rest.split()[0]
    return ""


def anonymous_bytes() -> int:
    """Bytes of this process that no file backs."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * mmap.PAGESIZE
