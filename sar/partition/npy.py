"""Arrays in `.npy` files that are larger than memory: made in place, mapped when they are read.

Pages of a mapped file count as the system's cache, not as this process's memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sar.errors import SarError
from sar.files import naming


def create(path: Path, dtype: np.dtype | type, shape: tuple[int, ...]) -> np.ndarray:
    """A new array of zeros in a file; what is written into it lands there.

    The disk is asked for all of its bytes at once: a full disk is an `OSError` that names the file
    here, where touching a page of a mapped file later would end the process.
    """
    with naming(path):
        with open(path, "wb") as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
                "fortran_order": False,
                "shape": shape,
            }
            np.lib.format.write_array_header_2_0(file, header)
            start, size = file.tell(), int(np.prod(shape)) * np.dtype(dtype).itemsize
            file.flush()
            if size:
                os.posix_fallocate(file.fileno(), start, size)
        if not size:
            return np.zeros(shape, dtype)
        return np.memmap(path, np.dtype(dtype), "r+", start, shape)


def read(path: str | os.PathLike) -> np.ndarray:
    """The array in a file, mapped privately: writing to it changes a copy of the page.

    Raises `SarError` for what is no `.npy` file of numbers, or one that was cut short.
    """
    try:
        return np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError, SyntaxError) as error:
        raise SarError(f"{os.fspath(path)}: not an array of numbers in .npy: {error}") from error


def tensor(path: str | os.PathLike) -> Tensor:
    """:func:`read` as a tensor that stays in the file. Raises `SarError`."""
    found = read(path)
    try:
        return torch.from_numpy(found)
    except TypeError as error:
        raise SarError(f"{os.fspath(path)}: holds {found.dtype}, expected numbers") from error
