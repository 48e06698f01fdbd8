"""Columns of tables in files, read block by block: Parquet, CSV, TSV (also gzipped) and `.npy`.

No more than a few megabytes of a table are in memory at a time. Rows are counted from 0 in each
file, and a header is no row.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from sar.errors import SarError
from sar.partition import npy
from sar.partition.sources.open import closest

Key = str | int  # the name of a column, or its number
Column = pa.Array | np.ndarray
BLOCK_ROWS, BLOCK_BYTES = 1 << 17, 8 << 20
_CSV_BYTES = 1 << 20
_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
ACCEPTED = ".parquet, .csv, .tsv, .csv.gz, .tsv.gz or .npy"
# What pyarrow, numpy and zlib raise for damaged bytes, besides what they are named for.
_DAMAGE = (
    pa.ArrowException, OSError, EOFError, zlib.error, struct.error, UnicodeError, OverflowError,
    MemoryError,
)  # fmt: skip
# What numpy raises for the header of an .npy file besides.
_HEADER_DAMAGE = (
    SarError, ValueError, TypeError, KeyError, IndexError, SyntaxError, RuntimeError, zipfile.BadZipFile,
    tokenize.TokenError,
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


@dataclass(frozen=True)
class Table:
    """Files whose rows lie one after another.

    kind: "parquet", "csv" or "npy", of all files.
    delimiter: of CSV. header: whether the first line of a CSV file names columns; `None`: it does
        unless it consists of numbers.
    rows: of each file, where the count is known from elsewhere; another count is an error.
    """

    paths: tuple[Path, ...]
    kind: str
    delimiter: str = ","
    header: bool | None = None
    rows: tuple[int, ...] | None = None

    def names(self) -> list[str] | None:
        """Of the columns of the first file, `None` where they have none."""
        path = self.paths[0]
        with reading(path):
            if self.kind == "parquet":
                return list(pa.parquet.read_schema(path, memory_map=True).names)
            return _first_lines(self, path).names if self.kind == "csv" else None

    def width(self) -> int:
        """How many columns the first file has."""
        names = self.names()
        if names is not None:
            return len(names)
        return 2 if self.kind == "npy" else _first_lines(self, self.paths[0]).width

    def kinds(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """Whether each column holds numbers, as its first rows tell."""
        if self.kind == "npy":
            return dict.fromkeys(keys, True)
        path = self.paths[0]
        with reading(path):
            if self.kind == "parquet":
                schema = pa.parquet.read_schema(path, memory_map=True)
            else:
                lines = _first_lines(self, path)
                names = lines.names or [f"f{number}" for number in range(lines.width)]
                with _open_csv(self, path, lines, [], {}) as reader:
                    schema = pa.schema([pa.field(n, t) for n, t in zip(names, reader.schema.types)])
        return {
            key: not _is_text(schema.field(position(key, schema.names, path)).type) for key in keys
        }

    def _rows_of(self, path: Path) -> int:
        if self.kind == "npy":
            return array(path).shape[0]
        with reading(path):
            return pa.parquet.read_metadata(path, memory_map=True).num_rows

    def blocks(
        self, keys: Sequence[Key], *, ids: Sequence[Key] = (), floats: Sequence[Key] = ()
    ) -> Iterator[Block]:
        """The columns ``keys`` of all files, in blocks.

        ids: those that name nodes: text where they are no integers.
        floats: those of a CSV file that are read as floats, even if they begin with integers.

        Raises ValueError naming file, row and value; FileNotFoundError; :class:`WidenError`.
        """
        types: dict[Key, pa.DataType] = {}
        for number, path in enumerate(self.paths):
            row = 0
            if self.kind == "csv":
                found = _csv_blocks(self, path, keys, types, ids, floats)
            else:
                found = (_parquet_blocks if self.kind == "parquet" else _npy_blocks)(path, keys)
            for block in found:
                yield block
                row = block.row + len(block.columns[0])
            want = self._rows_of(path) if self.kind == "parquet" else row
            want = want if self.rows is None else self.rows[number]
            if row != want:
                raise ValueError(f"{path}: holds {row} rows, expected {want}")


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return not (pa.types.is_null(kind) or pa.types.is_primitive(kind) or pa.types.is_nested(kind))


def table_of(
    paths: Sequence[Path],
    *,
    kind: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    rows: tuple[int, ...] | None = None,
) -> Table:
    """The table of these files, of one kind: by their names, unless it is given.

    Raises ValueError for names of no known kind, FileNotFoundError.
    """
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
    kinds = {kind or _kind(path) for path in paths}
    if len(kinds) != 1:
        raise ValueError(f"{paths[0]}: expected files of one kind, got {sorted(kinds)}")
    if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii()):
        raise ValueError(f"{paths[0]}: delimiter is {delimiter!r}, expected one character")
    if delimiter is None:
        delimiter = "\t" if ".tsv" in paths[0].suffixes else ","
    return Table(tuple(paths), kinds.pop(), delimiter, header, rows)


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that match, in the order of the patterns and, for each of them, of their names.

    Digits count as numbers: `part-10` comes after `part-9`. Raises FileNotFoundError naming the
    pattern without match.
    """
    found: list[Path] = []
    for pattern in patterns:
        # A name that exists is no pattern, whatever characters it has.
        path = folder / pattern
        matches = [str(path)] if path.is_file() else glob.glob(str(path), recursive=True)
        matches = [match for match in matches if os.path.isfile(match)]
        if not matches:
            raise FileNotFoundError(f"{path}: no file matches")
        found += map(Path, sorted(matches, key=_natural))
    if len(set(found)) != len(found):
        again = next(path for path in found if found.count(path) > 1)
        raise ValueError(f"{again}: is named twice in {list(patterns)}")
    return found


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(d) if d else 0, t) for d, t in re.findall(r"(\d+)|(\D+)", text)]


def _kind(path: Path) -> str:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kind = _SUFFIXES.get(suffix.lower())
    if kind is None or (path.suffix == ".gz" and kind != "csv"):
        raise ValueError(f"{path}: is of no known kind, expected {ACCEPTED}")
    return kind


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What libraries raise for a damaged file becomes a ValueError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _DAMAGE as error:
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


def array(path: Path) -> np.ndarray:
    """A mapped `.npy` file of numbers with rows. Raises ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        found = npy.read(path)
    except (*_DAMAGE, *_HEADER_DAMAGE) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim == 0 or found.dtype.kind not in "biuf":
        kind = getattr(found, "dtype", "an archive")
        raise ValueError(f"{path}: holds {kind}, expected an array of numbers with rows")
    return found


def rows_at_once(row_bytes: float) -> int:
    return max(256, min(BLOCK_ROWS, int(BLOCK_BYTES / max(row_bytes, 1))))


# --- .npy


def _npy_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    """Columns of a matrix by number: [E, k], or [k, E] where its rows are few and the others many.

    A square one of two rows is [2, E].
    """
    matrix = array(path)
    if matrix.ndim != 2:
        raise ValueError(f"{path}: has shape {matrix.shape}, expected [E, 2] or [2, E]")
    if matrix.shape[0] == 2:
        matrix = matrix.T
    elif matrix.shape[1] != 2:
        raise ValueError(f"{path}: has shape {matrix.shape}, expected [E, 2] or [2, E]")
    for key in keys:
        position(key, ["0", "1"], path)
    for low in range(0, len(matrix), BLOCK_ROWS):
        part = matrix[low : low + BLOCK_ROWS]
        yield Block(path, low, [np.ascontiguousarray(part[:, int(key)]) for key in keys])


# --- Parquet


def _parquet_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    with reading(path):
        with pa.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            names = list(file.schema_arrow.names)
    wanted = [position(key, names, path) for key in keys]
    yield from _guarded(path, _batches(path, [names[at] for at in wanted]))


def _batches(path: Path, names: list[str]) -> Iterator[Block]:
    row = 0
    with pa.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
        size = rows_at_once(_row_bytes(file.metadata, names))
        unique = list(dict.fromkeys(names))
        for batch in file.iter_batches(size, columns=unique, use_threads=False):
            yield Block(path, row, [batch.column(name) for name in names])
            row += batch.num_rows


def _row_bytes(metadata: pa.parquet.FileMetaData, names: list[str]) -> float:
    """Of the columns, as the file counts them."""
    if not metadata.num_row_groups or not metadata.num_rows:
        return 1
    group, total = metadata.row_group(0), 0
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema.split(".")[0] in names or column.path_in_schema in names:
            # Dictionaries make a column small on disk, not in memory.
            total += max(column.total_uncompressed_size, 8 * column.num_values)
    return total / max(group.num_rows, 1)


def _guarded(path: Path, blocks: Iterator[Block]) -> Iterator[Block]:
    """Errors that arise while the next block is read, and none of who takes it."""
    while True:
        with reading(path):
            block = next(blocks, None)
        if block is None:
            return
        yield block


# --- CSV


@dataclass(frozen=True)
class _Lines:
    """How a CSV file begins: comments, then perhaps names."""

    skipped: int
    names: list[str] | None
    width: int


def _first_lines(table: Table, path: Path) -> _Lines:
    opener: Callable = gzip.open if path.suffix == ".gz" else open
    with reading(path), opener(path, "rb") as file:
        skipped, line = 0, file.readline(_CSV_BYTES)
        while line.startswith(b"#"):
            skipped, line = skipped + 1, file.readline(_CSV_BYTES)
        text = line.decode("utf-8-sig").rstrip("\r\n")
    fields = _fields(text, table.delimiter)
    header = table.header
    if header is None:
        header = bool(text) and not all(map(_is_number, fields))
    return _Lines(skipped, fields if header else None, len(fields))


def _fields(line: str, delimiter: str) -> list[str]:
    parts = re.findall(
        rf'(?:^|{re.escape(delimiter)})("(?:[^"]|"")*"|[^{re.escape(delimiter)}]*)', line
    )
    return [p[1:-1].replace('""', '"') if len(p) > 1 and p[0] == p[-1] == '"' else p for p in parts]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _open_csv(
    table: Table, path: Path, lines: _Lines, names: list[str], types: Mapping[str, pa.DataType]
) -> pa.csv.CSVStreamingReader:
    stream = pa.OSFile(str(path), "rb")
    if path.suffix == ".gz":
        stream = pa.CompressedInputStream(stream, "gzip")
    return pa.csv.open_csv(
        stream,
        read_options=pa.csv.ReadOptions(
            use_threads=False,
            block_size=_CSV_BYTES,
            skip_rows=lines.skipped,
            autogenerate_column_names=lines.names is None,
        ),
        parse_options=pa.csv.ParseOptions(delimiter=table.delimiter),
        convert_options=pa.csv.ConvertOptions(
            include_columns=list(dict.fromkeys(names)),  # none: all
            column_types=dict(types),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _csv_blocks(
    table: Table,
    path: Path,
    keys: Sequence[Key],
    types: dict[Key, pa.DataType],
    ids: Sequence[Key],
    floats: Sequence[Key],
) -> Iterator[Block]:
    """``types``: of the columns as the files before had them; filled here."""
    lines = _first_lines(table, path)
    known = lines.names or [f"f{number}" for number in range(lines.width)]
    if lines.names is None and lines.width <= 1 and not path.stat().st_size:
        return
    names = [known[_csv_position(key, lines, path)] for key in keys]
    for key, name in zip(keys, names):
        if key in floats:
            types.setdefault(key, pa.float64())
        elif key not in types:
            with reading(path), _open_csv(table, path, lines, [name], {}) as probe:
                found = probe.schema.field(0).type
            if pa.types.is_null(found):  # no row, or nothing in the first ones
                continue
            types[key] = _csv_type(found, key in ids)
    given = {name: types[key] for key, name in zip(keys, names) if key in types}
    first = lines.skipped + (2 if lines.names is not None else 1)
    try:
        with _open_csv(table, path, lines, names, given) as reader:
            yield from _csv_rows(path, reader, names)
    except _DAMAGE as error:
        columns = {known.index(name): key for key, name in zip(keys, names)}
        raise _csv_error(error, path, first, columns, types, ids) from error


def _csv_rows(path: Path, reader: pa.csv.CSVStreamingReader, names: list[str]) -> Iterator[Block]:
    row = 0
    for batch in reader:
        if batch.num_rows:
            yield Block(path, row, [batch.column(name) for name in names])
        row += batch.num_rows


def _csv_position(key: Key, lines: _Lines, path: Path) -> int:
    if lines.names is None and isinstance(key, str):
        raise ValueError(
            f"{path}: has no column {key!r}: its first line names none; give the column's number"
        )
    return position(key, lines.names or [f"f{n}" for n in range(lines.width)], path)


def _csv_type(found: pa.DataType, is_id: bool) -> pa.DataType:
    if is_id:
        return found if pa.types.is_integer(found) else pa.string()
    return found


def _csv_error(
    error: Exception,
    path: Path,
    first: int,
    keys: Mapping[int, Key],
    types: Mapping[Key, pa.DataType],
    ids: Sequence[Key],
) -> Exception:
    """pyarrow's error in our words. It counts columns from 0, and lines from 1: ``first`` is the
    number of the first that is a row."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    line, column = re.search(r"Row #(\d+): ", text), re.match(r"In CSV column #(\d+): ", text)
    key = keys.get(int(column[1])) if column else None
    where = [f"row {int(line[1]) - first}"] if line else []
    where += [f"column {key!r}"] if key is not None else []
    reason = text[line.end() :] if line else text
    message = f"{path}: {', '.join(where) or 'cannot be read'}: {reason}"
    if key is not None and types.get(key) == pa.int64() and key not in ids:
        return WidenError(key, message)
    return ValueError(message)
