"""What the system says of folders and memory, and forks of this process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

from sar.errors import SarError
from sar.files import locked_folder

_FOLDER = "sar-out-of-core"
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


@contextmanager
def folder_of_a_run(parent: Path) -> Iterator[Path]:
    """A folder in ``parent``, on a disk, which no other run has meanwhile, for its file."""
    check_folder(parent)
    with ExitStack() as opened:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = opened.enter_context(locked_folder(parent / _FOLDER))
        except BlockingIOError as error:
            raise SarError(
                f"directory: {os.fspath(parent)!r} is in use by another run; expected a folder of "
                "this run's own"
            ) from error
        except OSError as error:
            raise SarError(
                f"directory: got {os.fspath(parent)!r}, where no file can be made: "
                f"{error.strerror}; expected a folder that this process may write"
            ) from error
        yield folder


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
