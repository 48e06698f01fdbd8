"""Blocks of rows of tables: columns as numbers, and errors that name file, row and column.

One CSV or TSV file, plain or gzipped, is read here. Lines at its top that begin with `#` are left
out; rows are counted from 0, and a header is no row.
"""

from __future__ import annotations

import contextlib
import gzip
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.csv

from sar.options import closest_name
from sar.partition.arrays import as_named, need, storable

Key = str | int  # the name of a column, or its number
Column: TypeAlias = "pa.Array | np.ndarray"
BLOCK_ROWS, BLOCK_BYTES = 1 << 17, 8 << 20
_CSV_BYTES = 1 << 20
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
# What pyarrow, numpy and zlib raise for damaged bytes, besides what they are named for.
DAMAGE = (
    pa.ArrowException, OSError, EOFError, zlib.error, struct.error, UnicodeError, OverflowError,
    MemoryError,
)  # fmt: skip


class WidenError(Exception):
    """A CSV column begins with integers but holds other numbers: read it anew as :attr:`key` of
    floats."""

    def __init__(self, key: Key, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True)
class Block:
    """Rows of one file: where they lie, and the columns that were asked for, [n, ...] each."""

    path: Path
    row: int
    columns: list[Column]

    def error(self, row: int, key: Key | None, text: str) -> ValueError:
        return ValueError(f"{self.path}: row {self.row + row}, column {key!r}: {text}")

    def refuse(self, wrong: np.ndarray, key: Key, text: str) -> None:
        """Raise ``ValueError`` naming the first row where ``wrong``, bool [n, ...], is true."""
        if wrong.any():
            row = int(wrong.reshape(len(wrong), -1).any(1).argmax())
            raise self.error(row, key, text)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of libraries about a damaged file become a ``ValueError`` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        raise ValueError(f"{path}: cannot be read: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def position(key: Key, names: Sequence[str], path: Path) -> int:
    """Index of column ``key``. Raises ``ValueError`` listing the columns that there are."""
    if isinstance(key, int):
        is_good = 0 <= key < len(names)
        need(is_good, f"{path}: has no column number {key}, it has {len(names)}")
        return key
    shown = ", ".join(map(repr, names[:20])) + (", ..." if len(names) > 20 else "")
    near = closest_name(key, names) if key not in names else ""
    need(key in names, f"{path}: has no column {key!r}{near}; it has {shown}")
    count = list(names).count(key)
    need(count == 1, f"{path}: column {key!r} is there {count} times")
    return list(names).index(key)


def rows_at_once(row_bytes: float) -> int:
    return max(256, min(BLOCK_ROWS, int(BLOCK_BYTES / max(row_bytes, 1))))


def numbers(block: Block, at: int, key: Key) -> np.ndarray:
    """A column of a block, [n], or [n, ...] where it holds lists of one length; times become
    integers, decimal numbers float64. ``ValueError`` names the row of anything else."""
    return as_stored(_plain(block, block.columns[at], key), block, key)


def as_stored(values: np.ndarray, block: Block, key: Key) -> np.ndarray:
    try:
        return storable(values)
    except OverflowError:
        row = int((values.reshape(len(values), -1) > np.iinfo(np.int64).max).any(1).argmax())
        raise block.error(row, key, f"is {values[row]}, expected less than 2**63") from None
    except TypeError:
        kind = values.dtype.newbyteorder("=")
        text = f"holds {kind}, expected numbers of at most 64 bits"
        raise block.error(0, key, text) from None


def check_nulls(block: Block, column: pa.Array, key: Key) -> None:
    if column.null_count:
        block.refuse(column.is_null().to_numpy(zero_copy_only=False), key, "the value is missing")


def example_of(column: pa.Array) -> str:
    return f"{column.type}" + (f" such as {column[0].as_py()!r}" if len(column) else "")


def _plain(block: Block, column: Column, key: Key) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    check_nulls(block, column, key)
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _plain(block, column.dictionary_decode(), key)
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _lists(block, column, key)
    if pa.types.is_decimal(kind):
        return column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    if pa.types.is_temporal(kind) and kind.bit_width in (32, 64):
        return column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_numpy()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise block.error(0, key, f"holds {example_of(column)}, expected numbers")
    return column.to_numpy(zero_copy_only=False)


def _lists(block: Block, column: pa.Array, key: Key) -> np.ndarray:
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
    else:
        sizes = column.value_lengths().to_numpy(zero_copy_only=False)
        width = int(sizes[0]) if len(sizes) else 0
        wrong = sizes != width
        size = sizes[wrong.argmax()] if len(sizes) else 0
        block.refuse(wrong, key, f"holds {size} numbers, expected {width} as before")
    inner = column.flatten()
    if inner.null_count:
        missing = inner.is_null().to_numpy(zero_copy_only=False).reshape(len(column), width)
        block.refuse(missing, key, "a number of the list is missing")
    values = _plain(block, inner, key)
    return values.reshape(len(column), width, *values.shape[1:])


def together(block: Block, first: int, keys: Sequence[Key]) -> np.ndarray:
    """One column as it is, several as [n, k] of the dtype that holds them all."""
    found = [numbers(block, first + number, key) for number, key in enumerate(keys)]
    if len(found) == 1:
        return found[0]
    for key, one in zip(keys, found):
        if one.ndim != 1:
            raise block.error(0, key, "holds lists, which stand alone")
    return np.stack(found, axis=1)


def finished(
    values: np.ndarray, name: str, dtype: str | None, allow_nan: bool, block: Block
) -> np.ndarray:
    """Cast numbers to ``dtype``, or as ``name`` tells. ``ValueError`` names the row of an integer
    that would become another, a NaN or an infinity."""
    if dtype is not None and values.dtype != dtype:
        with np.errstate(all="ignore"):
            made = values.astype(dtype)
            if np.dtype(dtype).kind != "f" and (made != values).any():
                wrong = (made != values).reshape(len(values), -1).any(1)
                text = f"is {values[wrong.argmax()]}, which no {dtype} holds"
                block.refuse(wrong, name, text)
        values = made
    values = as_named(name, values)
    if not allow_nan and values.dtype.kind == "f" and values.size:
        wrong = ~np.isfinite(values)
        first = values[wrong][:1].tolist()
        block.refuse(wrong, name, f"is {(first or [0])[0]}, expected finite numbers")
    return values


@dataclass(frozen=True)
class CsvFile:
    """A CSV or TSV file; ``header``: its first line names columns (`None`: if not all numbers)."""

    path: Path
    delimiter: str
    header: bool | None

    @cached_property
    def _top(self) -> tuple[int, bool, list[str]]:
        """Lines of comments, whether columns have names, and these, or numbers."""
        opener: Callable = gzip.open if self.path.suffix == ".gz" else open
        with reading(self.path), opener(self.path, "rb") as file:
            skipped, line = 0, file.readline(_CSV_BYTES)
            while line.startswith(b"#"):
                skipped, line = skipped + 1, file.readline(_CSV_BYTES)
            first, second = (
                _fields(text.decode("utf-8-sig").rstrip("\r\n"), self.delimiter)
                for text in (line, file.readline(_CSV_BYTES))
            )
        header = self.header
        if header is None:
            header = first != [""] and not all(map(_is_number, first))
        is_table = self.header is False and any(  # texts above numbers
            _is_number(below) and not _is_number(above) for above, below in zip(first, second)
        )
        what = f"begins with {self.delimiter.join(first)!r}, which names columns"
        need(not is_table, f"{self.path}: {what}; name them, instead of their numbers")
        return skipped, header, first if header else [f"f{n}" for n in range(len(first))]

    def keys(self) -> list[Key]:
        _, are_named, names = self._top
        return list(names) if are_named else list(range(len(names)))

    def type_of(self, key: Key) -> pa.DataType:
        """The type of a column by its first rows; the null type where they hold nothing."""
        if not self.path.stat().st_size:
            return pa.null()
        name = self._name(key)
        with reading(self.path), self._open([name], {}) as reader:
            return reader.schema.field(0).type

    def _name(self, key: Key) -> str:
        what = f"{self.path}: has no column {key!r}: its first line names none"
        need(self._top[1] or isinstance(key, int), f"{what}; give the column's number")
        return self._top[2][position(key, self._top[2], self.path)]

    def blocks(
        self, keys: Sequence[Key], types: Mapping[Key, pa.DataType], widens: Sequence[Key]
    ) -> Iterator[Block]:
        """Columns ``keys``, of ``types`` where given. ``ValueError`` names what is of another type,
        or `WidenError` for a column of ``widens``."""
        if not self.path.stat().st_size:
            return
        names = [self._name(key) for key in keys]
        given = {name: types[key] for key, name in zip(keys, names) if key in types}
        try:
            with self._open(names, given) as reader:
                row = 0
                for batch in reader:
                    if batch.num_rows:
                        yield Block(self.path, row, [batch.column(name) for name in names])
                    row += batch.num_rows
        except DAMAGE as error:
            columns = {self._top[2].index(name): key for key, name in zip(keys, names)}
            raise self._named(error, columns, widens) from error

    def _open(
        self, names: Sequence[str], types: Mapping[str, pa.DataType]
    ) -> pa.csv.CSVStreamingReader:
        stream = pa.OSFile(str(self.path), "rb")
        if self.path.suffix == ".gz":
            stream = pa.CompressedInputStream(stream, "gzip")
        return pa.csv.open_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                use_threads=False,
                block_size=_CSV_BYTES,
                skip_rows=self._top[0],
                autogenerate_column_names=not self._top[1],
            ),
            parse_options=pa.csv.ParseOptions(delimiter=self.delimiter),
            convert_options=pa.csv.ConvertOptions(
                include_columns=list(dict.fromkeys(names)),
                column_types=dict(types),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    def _named(self, error: Exception, keys: Mapping[int, Key], widens: Sequence[Key]) -> Exception:
        """pyarrow's error in our words; it counts columns from 0, and lines from 1."""
        text = first_line(error)
        line, column = re.search(r"Row #(\d+): ", text), re.match(r"In CSV column #(\d+): ", text)
        key = keys.get(int(column[1])) if column else None
        first = self._top[0] + 1 + self._top[1]
        where = [f"row {int(line[1]) - first}"] if line else []
        where += [f"column {key!r}"] if key is not None else []
        reason = text[line.end() :] if line else text
        message = f"{self.path}: {', '.join(where) or 'cannot be read'}: {reason}"
        if key is not None and key in widens:
            return WidenError(key, message)
        return ValueError(message)


def _fields(line: str, delimiter: str) -> list[str]:
    end = re.escape(delimiter)
    parts = re.findall(rf'(?:^|{end})("(?:[^"]|"")*"|[^{end}]*)', line)
    return [p[1:-1].replace('""', '"') if len(p) > 1 and p[0] == p[-1] == '"' else p for p in parts]


def _is_number(text: str) -> bool:
    try:
        return float(text) is not None
    except ValueError:
        return False
