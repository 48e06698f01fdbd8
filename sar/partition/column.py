"""Columns: rows of numbers in files, read a few megabytes at a time.

Pages of a mapped file count as the system's cache, not as this process's memory.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import tempfile
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from sar.errors import PartitionError, SarError
from sar.files import naming
from sar.partition.arrays import need
from sar.partition.progress import blocks, rows_in


def check(is_good: object, text: str) -> None:
    """Raise ``PartitionError(text)`` unless ``is_good``."""
    if not is_good:
        raise PartitionError(text)


class Column(ABC):
    """Rows of one dtype that are read when they are asked for: the first dimension."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, shape={self.shape})"

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    @abstractmethod
    def read(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Fresh tensor of rows ``[start, stop)``, all by default, converted to ``dtype``."""


class MappedColumn(Column):
    """Rows in a mapped file, from any byte on: DGL's files align nothing, so bytes are copied."""

    def __init__(self, file: MappedFile, offset: int, dtype: torch.dtype, shape: tuple[int, ...]):
        self.file, self.offset = file, offset
        self.dtype, self.shape = dtype, shape
        self._check: _Check | None = None

    def expect(self, digest: str, name: str) -> None:
        """Compare all bytes with an XXH3-128 digest when they have been read once, one after
        another: the read of the last ones raises ``PartitionError`` where they differ."""
        self._check = _Check(digest, f"{self.file.path}: feature {name!r}")
        if 0 in self.shape:  # nobody reads it
            self.verify()

    def verify(self) -> None:
        """Read all bytes and compare them now, unless they have been compared."""
        if self._check is not None:
            self._check.compare(self.digest())
            self._check = None

    def digest(self) -> str:
        """XXH3-128 of all bytes, in hexadecimal, read block by block."""
        found = xxhash.xxh3_128()
        if 0 not in self.shape:
            for low, high in blocks(len(self), size=rows_in(self.row_bytes)):
                found.update(self._bytes(low, high).data)
                self.release(low, high)
        return found.hexdigest()

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """View of the raw bytes of rows, uint8 ``[stop - start, row_bytes]``."""
        # Touching pages that were lost kills the process.
        file, now = self.file, self.file.map.size()
        what = f"{file.path}: was cut from {file.size} to {now} bytes while in use"
        check(now >= file.size, what)
        width = self.row_bytes
        count = (stop - start) * width
        view = np.frombuffer(self.file.map, np.uint8, count, self.offset + start * width)
        return view.reshape(stop - start, width)

    def release(self, start: int = 0, stop: int | None = None) -> None:
        """Unmap the pages of rows, which otherwise count as this process' memory."""
        stop, width = len(self) if stop is None else stop, self.row_bytes
        self.file.release(self.offset + start * width, self.offset + stop * width)

    def read(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        stop = len(self) if stop is None else stop
        is_good = 0 <= start <= stop <= len(self)
        need(is_good, f"rows: got [{start}, {stop}), expected within [0, {len(self)})")
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        out = torch.empty(shape, dtype=dtype or self.dtype)
        if out.numel() == 0:
            return out
        flat = out.view(stop - start, -1)
        for low, high in blocks(stop - start, size=rows_in(self.row_bytes)):
            target, (first, last) = flat[low:high], (start + low, start + high)
            if out.dtype == self.dtype:
                copied = target.view(torch.uint8).numpy()
                copied[...] = self._bytes(first, last)
            else:
                copied = self._bytes(first, last).copy()
                target.copy_(torch.from_numpy(copied).view(self.dtype))
            expected = self._check  # of the copy: the file may change at any moment
            if expected is not None and expected.add(first, last, len(self), copied):
                self._check = None
            self.release(first, last)
        return out

    def take(self, idx: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh tensor of rows ``idx``, which the caller has checked; their pages stay resident."""
        out = torch.empty((len(idx), *self.shape[1:]), dtype=dtype or self.dtype)
        if out.numel():
            flat, rows = out.view(len(idx), -1), self._bytes(0, len(self))
            for low, high in blocks(len(idx), size=rows_in(self.row_bytes)):
                some = torch.from_numpy(np.take(rows, idx[low:high], axis=0))
                flat[low:high].copy_(some.view(self.dtype))
        return out

    def ints(self, start: int, stop: int) -> np.ndarray:
        """Rows ``[start, stop)`` of a 1-D integer column, as an int64 copy."""
        return self.read(start, stop, torch.int64).numpy()

    def ints_at(self, idx: np.ndarray) -> np.ndarray:
        return self.take(idx, torch.int64).numpy()


class SelectedColumn(Column):
    """Rows ``chosen``, int [n], of all rows of columns of one dtype and row shape."""

    def __init__(self, sources: Sequence[MappedColumn], chosen: np.ndarray) -> None:
        self._sources, self._chosen = sources, chosen
        self._bounds = np.cumsum([0, *map(len, sources)])
        self.dtype, self.shape = sources[0].dtype, (len(chosen), *sources[0].shape[1:])

    def read(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        chosen = self._chosen[start:stop]
        out = torch.empty((len(chosen), *self.shape[1:]), dtype=dtype or self.dtype)
        owner = np.searchsorted(self._bounds, chosen, side="right") - 1
        for number in np.unique(owner):
            mine, source = np.flatnonzero(owner == number), self._sources[number]
            out[torch.from_numpy(mine)] = source.take(chosen[mine] - self._bounds[number], dtype)
            source.release()
        return out


class _Check:
    """A digest of rows that are read one after another, by any thread."""

    def __init__(self, expected: str, what: str) -> None:
        self._expected, self._what = expected, what
        self._lock = threading.Lock()
        self._found, self._next = xxhash.xxh3_128(), 0

    def add(self, start: int, stop: int, num_rows: int, rows: np.ndarray) -> bool:
        """Digest rows ``[start, stop)`` if they are the next; whether all have come."""
        with self._lock:
            if start == 0:
                self._found, self._next = xxhash.xxh3_128(), 0
            elif start != self._next:
                return False
            self._found.update(rows.data)
            self._next = stop
            if stop < num_rows:
                return False
            self.compare(self._found.hexdigest())
            return True

    def compare(self, found: str) -> None:
        what = f"{self._what} is damaged: its digest is {found}, expected {self._expected}"
        check(found == self._expected, what)


class MappedFile:
    """A file mapped privately and read-only, with its path and size for messages and checks."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        try:
            is_file = stat.S_ISREG(os.stat(self.path).st_mode)
            check(is_file, f"{self.path}: not a regular file")
            self._stream = open(self.path, "rb")  # noqa: SIM115 - as long as the map
            weakref.finalize(self, self._stream.close)
            status = os.fstat(self._stream.fileno())
            self.size, self._written = status.st_size, status.st_mtime_ns
            check(self.size, f"{self.path}: empty file")
            # Read-only and private: not charged as memory.
            self.map = mmap.mmap(
                self._stream.fileno(), self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
            )
        except FileNotFoundError as err:
            raise PartitionError(f"{self.path}: no such file") from err
        except (OSError, ValueError) as err:
            raise PartitionError(f"{self.path}: cannot be mapped ({err})") from err

    def digest(self) -> str:
        """XXH3-128 of all bytes, read once, none of which stays resident."""
        return MappedColumn(self, 0, torch.uint8, (self.size,)).digest()

    def release(self, start: int, stop: int) -> None:
        """Unmap the pages of bytes ``[start, stop)`` until they are read again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def check_unchanged(self) -> None:
        """Raise ``PartitionError`` if the open file was written to; its name may be another's."""
        status = os.fstat(self._stream.fileno())
        is_same = (status.st_size, status.st_mtime_ns) == (self.size, self._written)
        check(is_same, f"{self.path}: was changed while it was read")


class RowFile:
    """A tensor in a shared map of a file without a name, which ends with it or with the process.

    The system drops its pages when it needs room. Nobody else can cut the file short, and rows are
    aligned, unlike those in DGL's files. ``parts`` are the rows in runs of any length; ``folder``
    is the system's temporary one by default (one in memory gains nothing). Raises ``OSError`` for a
    full disk.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        parts: Iterable[Tensor],
        folder: str | os.PathLike | None = None,
    ) -> None:
        self._map: mmap.mmap | None = None
        size = math.prod(shape) * dtype.itemsize
        where = None if folder is None else os.fspath(folder)
        with tempfile.TemporaryFile(prefix="sar-", dir=where) as file:
            written = sum(file.write(bytes_of(part.to(dtype))) for part in parts)
            need(written == size, f"blocks: got {written} bytes, expected the {size} of {shape}")
            file.flush()
            if size:
                self._map = mmap.mmap(file.fileno(), size)
        if self._map is None:
            self.tensor = torch.empty(shape, dtype=dtype)
        else:
            self.tensor = torch.frombuffer(self._map, dtype=dtype).view(shape)

    def release(self) -> None:
        """Take the pages out of this process; they are read again, from the file, when needed."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # a shared map: nothing that was written is lost


def bytes_of(rows: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it lies in memory row after row."""
    flat = rows.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def create_array(path: Path, dtype: np.dtype | type, shape: tuple[int, ...]) -> np.ndarray:
    """A new array of zeros in a `.npy` file; what is written into it lands there. All bytes are
    asked for at once: a full disk is an ``OSError`` that names the file here, where a later touch
    of a page would end the process."""
    with naming(path):
        found = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        with open(path, "rb+") as file:
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        return found if found.size else np.zeros(shape, dtype)


def map_array(path: str | os.PathLike) -> np.ndarray:
    """The array in a `.npy` file, mapped privately: writing to it changes a copy of the page.
    Raises `SarError` for what is no `.npy` file of numbers, or one that was cut short."""
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise SarError(f"{os.fspath(path)}: not an array of numbers in .npy: {error}") from error


def map_tensor(path: str | os.PathLike) -> Tensor:
    """:func:`map_array` as a tensor that stays in the file. Raises `SarError`."""
    found = map_array(path)
    try:
        return torch.from_numpy(found)
    except TypeError as error:
        raise SarError(f"{os.fspath(path)}: holds {found.dtype}, expected numbers") from error
