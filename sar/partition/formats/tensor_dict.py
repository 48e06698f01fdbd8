"""DGL's tensor dictionaries (``*_feat.dgl``), written in any order: their sizes are known before.

FORMAT: see :mod:`sar.partition.dgl_format`, which reads them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from sar.partition.dgl_format import ARRAY_MAGIC, DTYPES, TENSORS_MAGIC
from sar.partition.digest import ArrayDigest, FileDigest
from sar.partition.formats.out_files import OutFiles

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CPU, _ONE_LANE = 1, 1


class Array(NamedTuple):
    """An array of a file. ``dtype`` is as stored, so never bool."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def text(value: str) -> bytes:
    """A string as DGL writes it."""
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def array_header(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """What stands before the numbers of an array."""
    code, bits = _CODES[dtype]
    nbytes = math.prod(shape) * dtype.itemsize
    layout = f"<QQiiiBBH{len(shape)}qq"
    kind = (len(shape), code, bits, _ONE_LANE)
    return struct.pack(layout, ARRAY_MAGIC, 0, _CPU, 0, *kind, *shape, nbytes)


def named_header(array: Array) -> bytes:
    """The same in a vector of names and arrays."""
    return text(array.name) + array_header(array.dtype, array.shape)


@dataclass
class _Running:
    """An array that is being written: where its next bytes go, its end, and its digest so far."""

    array: Array
    at: int
    end: int
    digest: Any


class FeatureFile:
    """One tensor dictionary, whose arrays are appended to in turn.

    Args:
        arrays: all that it will hold, with names of their own.
    """

    def __init__(self, files: OutFiles, name: str, arrays: Sequence[Array]) -> None:
        self.name, self._files = name, files
        self._running: dict[str, _Running] = {}
        header = struct.pack("<QQQ", TENSORS_MAGIC, len(arrays), len(arrays))
        at = 0
        for array in reversed(arrays):  # as DGL's own files have them, as long as they are few
            header += named_header(array)
            files.write(name, at, header)
            at += len(header)
            self._running[array.name] = _Running(array, at, at + array.nbytes, xxhash.xxh3_128())
            at, header = at + array.nbytes, b""
        files.write(name, at, header)
        self._size = at + len(header)

    def append(self, array: str, rows: Any) -> None:
        """The next rows of an array, as a contiguous buffer."""
        running, view = self._running[array], memoryview(rows)
        self._files.write(self.name, running.at, view)
        if view.nbytes:
            running.digest.update(view)
        running.at += view.nbytes

    def seal(self) -> FileDigest:
        """Of the whole file. Raises ``ValueError`` where rows are missing or too many."""
        for name, one in self._running.items():
            if one.at != one.end:
                raise ValueError(f"{self.name}: {name!r} ends at {one.at}, expected {one.end}")
        arrays = {
            name: ArrayDigest(
                str(one.array.dtype).removeprefix("torch."),
                list(one.array.shape),
                one.digest.hexdigest(),
            )
            for name, one in reversed(self._running.items())
        }
        return FileDigest(self._size, arrays=arrays)
