"""Rows that stay in a temporary file: a tensor whose pages the system may drop at any time."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterable

import torch
from torch import Tensor


class RowFile:
    """A tensor in a shared map of a file without a name, which ends with it or with the process.

    Only what is read becomes resident, as pages of the file that the system drops when it needs
    room. The file is this process' own, so nobody can cut it short under the map, and rows are
    aligned, which those in DGL's files are not.

    Args:
        shape, dtype: of the tensor.
        blocks: its rows from first to last, in runs of any length.
        folder: where the file is made; the system's folder for temporary files by default. In a
            folder that lies in memory (tmpfs) nothing is gained.

    Attributes:
        tensor: the rows, to be read like any other tensor.

    Raises ``OSError`` when there is no room in the folder.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        blocks: Iterable[Tensor],
        folder: str | os.PathLike | None = None,
    ) -> None:
        self._map: mmap.mmap | None = None
        size = math.prod(shape) * dtype.itemsize
        where = None if folder is None else os.fspath(folder)
        with tempfile.TemporaryFile(prefix="sar-", dir=where) as file:
            written = sum(file.write(_bytes(block.to(dtype))) for block in blocks)
            if written != size:
                raise ValueError(f"blocks: got {written} bytes, expected the {size} of {shape}")
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


def _bytes(block: Tensor) -> memoryview:
    return block.contiguous().view(-1).view(torch.uint8).numpy().data
