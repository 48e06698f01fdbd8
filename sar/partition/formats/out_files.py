"""Files that are written at many positions in turn, more of them than may be open at once."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from sar.files import naming

_MOST = 4096


class OutFiles:
    """New files below a folder, by relative name. As many as the system allows stay open, half of
    its limit; each of the others is opened for every write.

    Args:
        folder: where they are written.
        shown: the folder that they will be in, which errors name.

    Raises ``OSError`` that names the file, for a full disk among others.
    """

    def __init__(self, folder: Path, shown: Path) -> None:
        self._folder, self._shown = folder, shown
        self._numbers: dict[str, int] = {}
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._room = _MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2)

    def __enter__(self) -> OutFiles:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all; an error that only closing tells of is not lost."""
        with ExitStack() as closing:
            for name, number in self._numbers.items():
                closing.callback(self._close, name, number)

    def _close(self, name: str, number: int) -> None:
        with naming(self._shown / name):
            os.close(number)

    @contextmanager
    def placed(self, name: str) -> Iterator[Path]:
        """Where somebody else writes a file; its folder is there, and errors name it."""
        with naming(self._shown / name):
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            yield path

    def write(self, name: str, at: int, data: Any) -> None:
        """All bytes of a contiguous buffer, from a position on."""
        with naming(self._shown / name), self._open(name) as number:
            left = _bytes(data)
            while left:
                done = os.pwrite(number, left, at)
                at, left = at + done, left[done:]

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        """Fill a contiguous array with what was written at a position."""
        with naming(self._shown / name), self._open(name) as number:
            left = _bytes(out)
            while left:
                done = os.preadv(number, [left], at)
                if not done:
                    raise OSError(0, "it was cut short while it was written")
                at, left = at + done, left[done:]

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        if name in self._numbers:
            yield self._numbers[name]
            return
        number = os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666)
        if len(self._numbers) < self._room:
            self._numbers[name] = number
            yield number
            return
        try:
            yield number
        finally:
            os.close(number)


def _bytes(data: Any) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
