"""Columns of tables as arrays of numbers, checked, and written as `.npy` in a scratch folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from sar.files import naming
from sar.partition.column import map_tensor
from sar.partition.progress import Counter
from sar.partition.sources.blocks import Block, Column, Key, rows_at_once
from sar.partition.sources.tables import Table, array

DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# Unsigned integers that DGL's files do not know become signed ones that hold them.
_SIGNED = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
_HEADER = 256
_MAX_INT64 = np.iinfo(np.int64).max


def numbers(block: Block, at: int, key: Key) -> np.ndarray:
    """A column of a block, [n], or [n, ...] where it holds lists of one length.

    Times become integers of their unit, decimal numbers float64.

    Raises ValueError naming file, row and column for nulls, lists of several lengths, and what is
    no number.
    """
    return storable(_plain(block, block.columns[at], key), block, key)


def _plain(block: Block, column: Column, key: Key) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    check_nulls(block, column, key)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain(block, column.dictionary_decode(), key)
    if pa.types.is_fixed_size_list(kind):
        return _lists(block, column, key, kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        sizes = column.value_lengths().to_numpy(zero_copy_only=False)
        width = int(sizes[0]) if len(sizes) else 0
        if (sizes != width).any():
            row = int((sizes != width).argmax())
            raise ValueError(
                f"{block.at(row, key)}: holds {sizes[row]} numbers, expected {width} as before"
            )
        return _lists(block, column, key, width)
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if pa.types.is_temporal(kind) and kind.bit_width in (32, 64):
        return column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_numpy()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        example = f" such as {column[0].as_py()!r}" if len(column) else ""
        raise ValueError(f"{block.at(0, key)}: holds {kind}{example}, expected numbers")
    return column.to_numpy(zero_copy_only=False)


def _lists(block: Block, column: pa.Array, key: Key, width: int) -> np.ndarray:
    inner = column.flatten()
    if inner.null_count:
        row = int(np.flatnonzero(inner.is_null().to_numpy(zero_copy_only=False))[0]) // width
        raise ValueError(f"{block.at(row, key)}: a number of the list is missing")
    values = _plain(block, inner, key)
    return values.reshape(len(column), width, *values.shape[1:])


def check_nulls(block: Block, column: pa.Array, key: Key) -> None:
    """Raises ValueError naming the row of the first missing value."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{block.at(row, key)}: the value is missing")


def storable(values: np.ndarray, block: Block, key: Key | None) -> np.ndarray:
    """In this machine's byte order, and as what partitions hold."""
    dtype = values.dtype.newbyteorder("=")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ValueError(f"{block.at(0, key)}: holds {dtype}, expected numbers of at most 64 bits")
    if dtype == np.uint64 and values.size and int(values.max()) > _MAX_INT64:
        row = int((values.reshape(len(values), -1) > _MAX_INT64).any(1).argmax())
        raise ValueError(f"{block.at(row, key)}: is {values[row]}, expected less than 2**63")
    return values.astype(_SIGNED.get(dtype.name, dtype), copy=False)


def together(block: Block, first: int, keys: Sequence[Key]) -> np.ndarray:
    """One column as it is, several as [n, k] of the type that holds them all."""
    found = [numbers(block, first + number, key) for number, key in enumerate(keys)]
    if len(found) == 1:
        return found[0]
    for key, one in zip(keys, found):
        if one.ndim != 1:
            raise ValueError(f"{block.at(0, key)}: holds lists, which stand alone")
    return np.stack(found, axis=1)


def standard(name: str, values: np.ndarray) -> np.ndarray:
    """Masks are bool, labels of one column int64 unless they are floats."""
    if name.endswith(("_mask", "_masks")):
        return values.astype(bool)
    if name == "label" and values.ndim == 1 and values.dtype.kind in "biu":
        return values.astype(np.int64)
    return values


def check_finite(values: np.ndarray, block: Block, name: str) -> None:
    """Raises ValueError naming the first row with a NaN or an infinity."""
    if values.dtype.kind != "f" or not values.size:
        return
    wrong = ~np.isfinite(values).reshape(len(values), -1)
    if wrong.any():
        row = int(wrong.any(1).argmax())
        value = values[row].reshape(-1)[int(wrong[row].argmax())]
        raise ValueError(f"{block.at(row, name)}: is {value}, expected finite numbers")


def cast(values: np.ndarray, dtype: str | None, block: Block, name: str) -> np.ndarray:
    """As the type that was asked for. Raises ValueError where integers would become others."""
    if dtype is None or values.dtype == dtype:
        return values
    with np.errstate(all="ignore"):
        made = values.astype(dtype)
        if np.dtype(dtype).kind != "f":
            wrong = (made != values).reshape(len(values), -1).any(1)
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(f"{block.at(row, name)}: is {values[row]}, which no {dtype} holds")
    return made


class ColumnFile:
    """A `.npy` file that blocks of rows are appended to; its header is written at the end.

    Used as a context; :meth:`tensor` gives the whole column, mapped. ``nothing`` is the type of a
    column without rows. Raises OSError naming the file where the disk is full.
    """

    def __init__(self, path: Path, name: str, nothing: str = "float32") -> None:
        self.path, self.name, self.rows = path, name, 0
        self._dtype = np.dtype(nothing)
        self._shape: tuple[int, ...] | None = None
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb")
            self._file.write(bytes(_HEADER))

    def add(self, values: np.ndarray, block: Block) -> None:
        """Append rows. Raises ValueError where they have another type or width than before."""
        if self._shape is None:
            self._dtype, self._shape = values.dtype, values.shape[1:]
        shape = self._shape
        if (values.dtype, values.shape[1:]) != (self._dtype, shape):
            raise ValueError(
                f"{block.at(0, self.name)}: rows are {values.dtype} {list(values.shape[1:])}, "
                f"expected {self._dtype} {list(shape)} as before"
            )
        with naming(self.path):
            np.ascontiguousarray(values).tofile(self._file)
        self.rows += len(values)

    def tensor(self) -> Tensor:
        """[rows, ...] mapped."""
        shape = (self.rows, *(self._shape or ()))
        with naming(self.path):
            self._file.seek(0)
            self._file.write(_header(self._dtype, shape))
            self._file.close()
        if not np.prod(shape):
            return torch.from_numpy(np.zeros(shape, self._dtype))
        return map_tensor(self.path)

    def __enter__(self) -> ColumnFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with naming(self.path):
            self._file.close()


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """Version 1.0 of numpy's format, filled up to a fixed length."""
    text = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    filled = f"{text!r}".ljust(_HEADER - 11).encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(filled).to_bytes(2, "little") + filled


def map_or_copy(
    table: Table, name: str, copy: Path, dtype: str | None, allow_nan: bool, counter: Counter
) -> Tensor:
    """The rows of `.npy` files: where they lie if it is one that can be used as it is.

    Raises ValueError naming file and row.
    """
    with ColumnFile(copy, name) as file:
        single, mapped = len(table.paths) == 1, array(table.paths[0])
        for number, path in enumerate(table.paths):
            found = array(path)
            if table.rows and table.rows[number] != len(found):
                raise ValueError(f"{path}: holds {len(found)} rows, expected {table.rows[number]}")
            step = rows_at_once(found.nbytes / max(len(found), 1))
            for low in range(0, len(found), step):
                block = Block(path, low, [found[low : low + step]])
                rows = standard(name, cast(numbers(block, 0, name), dtype, block, name))
                if not allow_nan:
                    check_finite(rows, block, name)
                single = single and rows.dtype == found.dtype and found.flags.c_contiguous
                if not single:
                    file.add(rows, block)
                counter.add(len(rows))
            if not len(found):
                file.add(found[:0], Block(path, 0, []))
        if single and mapped.size:
            copy.unlink()
            return torch.from_numpy(mapped)
        return file.tensor()
