"""What reading tables is made of: blocks of rows, and errors that say where something is."""

from __future__ import annotations

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from sar.partition.sources.open import closest

Key = str | int  # the name of a column, or its number
Column: TypeAlias = "pa.Array | np.ndarray"
BLOCK_ROWS, BLOCK_BYTES = 1 << 17, 8 << 20
# What pyarrow, numpy and zlib raise for damaged bytes, besides what they are named for.
DAMAGE = (
    pa.ArrowException, OSError, EOFError, zlib.error, struct.error, UnicodeError, OverflowError,
    MemoryError,
)  # fmt: skip


class WidenError(Exception):
    """A column of a CSV file begins with integers and goes on with other numbers.

    Who reads the column catches this, and begins again with :attr:`key` among the floats.
    """

    def __init__(self, key: Key, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class Block:
    """Rows of one file: where they lie, and the columns that were asked for, [n, ...] each."""

    path: Path
    row: int
    columns: list[Column]

    def at(self, row: int, key: Key | None = None) -> str:
        """Names a row of the block in an error."""
        column = "" if key is None else f", column {key!r}"
        return f"{self.path}: row {self.row + row}{column}"


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What libraries raise for a damaged file becomes a ValueError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ValueError(f"{path}: cannot be read: {lines[0]}") from error


def position(key: Key, names: Sequence[str], path: Path) -> int:
    """Where a column is. Raises ValueError that lists the columns that there are."""
    if isinstance(key, int):
        if not 0 <= key < len(names):
            raise ValueError(f"{path}: has no column number {key}, it has {len(names)}")
        return key
    if key not in names:
        shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
        raise ValueError(f"{path}: has no column {key!r}{closest(key, names)}; it has {shown}")
    if names.count(key) > 1:
        raise ValueError(f"{path}: column {key!r} is there {names.count(key)} times")
    return list(names).index(key)


def rows_at_once(row_bytes: float) -> int:
    return max(256, min(BLOCK_ROWS, int(BLOCK_BYTES / max(row_bytes, 1))))
