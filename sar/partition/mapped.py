"""Files mapped privately and read-only, and tensors whose bytes stay in them until read.

Payloads in DGL's files start at any byte offset, so they are viewed as bytes and copied in blocks.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import weakref

import numpy as np
import torch
import xxhash
from torch import Tensor

from sar.errors import PartitionError

BLOCK_BYTES = 8 << 20


class MappedTensor:
    """A tensor whose bytes lie in a mapped file; nothing is read before rows are asked for.

    ``dtype`` is a torch dtype, ``shape`` a tuple; the first dimension counts rows.
    """

    def __init__(self, file: MappedFile, offset: int, dtype: torch.dtype, shape: tuple[int, ...]):
        self.file = file
        self.offset = offset
        self.dtype = dtype
        self.shape = shape
        self._check: _Check | None = None

    def expect(self, digest: str, name: str) -> None:
        """Compare the bytes with an XXH3-128 digest when all have been read for the first time.

        Reading the last of them then raises ``PartitionError`` where they differ. They are read one
        after another for that, in runs of any length.
        """
        self._check = _Check(digest, f"{self.file.path}: feature {name!r}")
        if 0 in self.shape:  # nobody reads it
            self.verify()

    def verify(self) -> None:
        """Read all bytes for that now, if they are still to be compared."""
        if self._check is not None:
            self._check.compare(self.digest())
            self._check = None

    def digest(self) -> str:
        """XXH3-128 of all bytes, in hexadecimal, read block by block."""
        found = xxhash.xxh3_128()
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for at in range(0, 0 if 0 in self.shape else len(self), step):
            end = min(at + step, len(self))
            found.update(self._bytes(at, end).data)
            self._release(at, end)
        return found.hexdigest()

    def _digest(self, start: int, stop: int, rows: np.ndarray) -> None:
        """Rows that were read, as bytes, go into the digest, if they are the next."""
        check = self._check
        if check is not None and check.add(start, stop, len(self), rows):
            self._check = None

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 1

    def __repr__(self) -> str:
        return f"MappedTensor({self.dtype}, shape={self.shape})"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        width = self.dtype.itemsize
        for size in self.shape[1:]:
            width *= size
        return width

    def _bytes(self, start: int, stop: int) -> np.ndarray:
        """View of the raw bytes of rows, uint8 ``[stop - start, row_bytes]``."""
        self.file.check_size()
        width = self.row_bytes
        count = (stop - start) * width
        view = np.frombuffer(self.file.map, np.uint8, count, self.offset + start * width)
        return view.reshape(stop - start, width)

    def _release(self, start: int, stop: int) -> None:
        """Give the pages of rows back, which otherwise count as this process' memory."""
        width = self.row_bytes
        self.file.release(self.offset + start * width, self.offset + stop * width)

    def _check_rows(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"rows: got [{start}, {stop}), expected within [0, {len(self)})")

    def rows(self, start: int, stop: int, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh tensor of rows ``[start, stop)``, copied (and converted) block by block."""
        self._check_rows(start, stop)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        out = torch.empty(shape, dtype=dtype or self.dtype)
        if out.numel() == 0:
            return out
        flat = out.view(stop - start, -1)
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for at in range(start, stop, step):
            end = min(at + step, stop)
            target = flat[at - start : end - start]
            if out.dtype == self.dtype:
                copied = target.view(torch.uint8).numpy()
                copied[...] = self._bytes(at, end)
            else:
                copied = self._bytes(at, end).copy()
                target.copy_(torch.from_numpy(copied).view(self.dtype))
            self._digest(at, end, copied)  # of the copy: the file may change at any moment
            self._release(at, end)
        return out

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor, fresh."""
        return self.rows(0, len(self), dtype)

    def take(self, idx: np.ndarray) -> np.ndarray:
        """Values at ``idx`` (int64, checked by the caller) of a 1-D integer tensor, as int64."""
        self.file.check_size()
        raw = np.take(self._bytes(0, len(self)), idx, axis=0)
        return raw.view(_numpy_dtype(self.dtype)).ravel().astype(np.int64, copy=False)

    def pick(self, idx: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """Fresh tensor of the rows at ``idx`` (int64, checked by the caller), block by block."""
        out = torch.empty((len(idx), *self.shape[1:]), dtype=dtype or self.dtype)
        if out.numel() == 0:
            return out
        flat, all_rows = out.view(len(idx), -1), self._bytes(0, len(self))
        step = max(1, BLOCK_BYTES // max(1, self.row_bytes))
        for at in range(0, len(idx), step):
            rows = torch.from_numpy(all_rows[idx[at : at + step]]).view(self.dtype)
            flat[at : at + step].copy_(rows)
        self._release(0, len(self))
        return out

    def ints(self, start: int, stop: int) -> np.ndarray:
        """Rows ``[start, stop)`` of a 1-D integer tensor, as an int64 copy."""
        raw = self._bytes(start, stop).copy()
        self._release(start, stop)
        return raw.view(_numpy_dtype(self.dtype)).ravel().astype(np.int64, copy=False)


class _Check:
    """A digest of rows that are read one after another, by any thread."""

    def __init__(self, expected: str, what: str) -> None:
        self._expected, self._what = expected, what
        self._lock = threading.Lock()
        self.restart()

    def restart(self) -> None:
        self._found, self._next = xxhash.xxh3_128(), 0

    def add(self, start: int, stop: int, num_rows: int, rows: np.ndarray) -> bool:
        """Take rows ``[start, stop)``, if they are the next; whether all have come."""
        with self._lock:
            if start == 0:
                self.restart()
            elif start != self._next:
                return False
            self._found.update(rows.data)
            self._next = stop
            if stop < num_rows:
                return False
            self.compare(self._found.hexdigest())
            return True

    def compare(self, found: str) -> None:
        """Raise ``PartitionError`` for another digest than is expected."""
        if found != self._expected:
            raise PartitionError(
                f"{self._what} is damaged: its digest is {found}, expected {self._expected}"
            )


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


class MappedFile:
    """A file mapped privately and read-only, with its path and size for messages and checks."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        try:
            if not stat.S_ISREG(os.stat(self.path).st_mode):
                raise PartitionError(f"{self.path}: not a regular file")
            self._stream = open(self.path, "rb")  # noqa: SIM115 - as long as the map
            weakref.finalize(self, self._stream.close)
            status = os.fstat(self._stream.fileno())
            self.size, self._written = status.st_size, status.st_mtime_ns
            if self.size == 0:
                raise PartitionError(f"{self.path}: empty file")
            # Read-only and private: not charged as memory.
            self.map = mmap.mmap(
                self._stream.fileno(), self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ
            )
        except PartitionError:
            raise
        except FileNotFoundError as err:
            raise PartitionError(f"{self.path}: no such file") from err
        except (OSError, ValueError) as err:
            raise PartitionError(f"{self.path}: cannot be mapped ({err})") from err

    def release(self, start: int, stop: int) -> None:
        """Unmap the pages of bytes ``[start, stop)`` until they are read again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self.map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def check_unchanged(self) -> None:
        """Raises PartitionError when somebody wrote into the file since it was opened.

        One that took its name meanwhile is another file, and none of this one's concern.
        """
        status = os.fstat(self._stream.fileno())
        if (status.st_size, status.st_mtime_ns) != (self.size, self._written):
            raise PartitionError(f"{self.path}: was changed while it was read")

    def check_size(self) -> None:
        """Raises PartitionError when the file shrank: touching lost pages kills the process."""
        now = self.map.size()
        if now < self.size:
            raise PartitionError(
                f"{self.path}: was cut from {self.size} to {now} bytes while in use"
            )
