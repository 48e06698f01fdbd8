"""Columns of tables in files, read block by block: Parquet, CSV, TSV (also gzipped) and `.npy`.

No more than a few megabytes of a table are in memory at a time. Rows are counted from 0 in each
file, and a header is no row.
"""

from __future__ import annotations

import glob
import re
import tokenize
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from sar.errors import SarError
from sar.partition.column import map_array
from sar.partition.sources.blocks import (
    BLOCK_ROWS,
    DAMAGE,
    Block,
    Key,
    position,
    reading,
    rows_at_once,
)
from sar.partition.sources.csv_table import CsvFile

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
_SAMPLE_ROWS = 256
ACCEPTED = ".parquet, .csv, .tsv, .csv.gz, .tsv.gz or .npy"
# What numpy raises for the header of an .npy file besides.
_HEADER_DAMAGE = (
    SarError, ValueError, TypeError, KeyError, IndexError, SyntaxError, RuntimeError,
    zipfile.BadZipFile, tokenize.TokenError,
)  # fmt: skip


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
        if self.kind == "csv":
            return self._csv(path).names
        with reading(path):
            is_parquet = self.kind == "parquet"
            return list(pa.parquet.read_schema(path, memory_map=True).names) if is_parquet else None

    def width(self) -> int:
        """How many columns the first file has."""
        names = self.names()
        if names is not None:
            return len(names)
        return 2 if self.kind == "npy" else self._csv(self.paths[0]).width

    def numbers(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """Whether each column holds numbers, as its first rows tell."""
        return {key: _holds_numbers(kind) for key, kind in self._types(keys).items()}

    def integers(self, keys: Sequence[Key]) -> dict[Key, bool]:
        """Whether each column holds integers, or nothing."""
        return {
            key: pa.types.is_integer(kind) or pa.types.is_null(kind)
            for key, kind in self._types(keys).items()
        }

    def _types(self, keys: Sequence[Key]) -> dict[Key, pa.DataType]:
        path = self.paths[0]
        if self.kind == "npy":
            return dict.fromkeys(keys, pa.from_numpy_dtype(array(path).dtype))
        if self.kind == "csv":
            types = self._csv_types(keys, (), {})
            return {key: types.get(key, pa.null()) for key in keys}
        with reading(path):
            schema = pa.parquet.read_schema(path, memory_map=True)
        return {key: schema.field(position(key, schema.names, path)).type for key in keys}

    def num_rows(self) -> int:
        """Of all files, as :meth:`blocks` gives them; 0 where one does not tell, or is damaged."""
        try:
            return sum(map(self._rows_of, self.paths))
        except (ValueError, OSError):  # told by who reads them
            return 0

    def _rows_of(self, path: Path) -> int:
        """Raises ``ValueError`` for CSV, where they would have to be counted."""
        if self.kind == "parquet":
            return _parquet_rows(path)
        if self.kind == "npy":
            return len(_matrix(path))
        raise ValueError(f"{path}: does not tell how many rows it has")

    def blocks(
        self,
        keys: Sequence[Key],
        *,
        ids: Sequence[Key] = (),
        texts: Sequence[Key] = (),
        floats: Sequence[Key] = (),
    ) -> Iterator[Block]:
        """The columns ``keys`` of all files, in blocks.

        ids: those that name nodes: of CSV text, where they are no integers.
        texts: those of CSV that are text, even if they look like integers.
        floats: those of CSV that are read as floats, even if they begin with integers.

        Raises ValueError naming file, row and value; FileNotFoundError; `WidenError`.
        """
        types = {**dict.fromkeys(floats, pa.float64()), **dict.fromkeys(texts, pa.string())}
        types = self._csv_types(keys, ids, types) if self.kind == "csv" else {}
        widens = [key for key, kind in types.items() if kind == pa.int64() and key not in ids]
        for number, path in enumerate(self.paths):
            if self.kind == "csv":
                found = self._csv(path).blocks(keys, types, widens)
            else:
                found = (_parquet_blocks if self.kind == "parquet" else _npy_blocks)(path, keys)
            rows = 0
            for block in found:
                yield block
                rows = block.row + len(block.columns[0])
            want = _parquet_rows(path) if self.kind == "parquet" else rows
            want = want if self.rows is None else self.rows[number]
            if rows != want:
                raise ValueError(f"{path}: holds {rows} rows, expected {want}")

    def _csv(self, path: Path) -> CsvFile:
        return CsvFile(path, self.delimiter, self.header)

    def _csv_types(
        self, keys: Sequence[Key], ids: Sequence[Key], given: Mapping[Key, pa.DataType]
    ) -> dict[Key, pa.DataType]:
        """Of columns, as the first file that holds something begins: the same for all files."""
        types = dict(given)
        for key in keys:
            for path in self.paths if key not in types else ():
                kind = self._csv(path).type_of(key)
                if not pa.types.is_null(kind):
                    is_text = key in ids and not pa.types.is_integer(kind)
                    types[key] = pa.string() if is_text else kind
                    break
        return types


def _parquet_rows(path: Path) -> int:
    with reading(path):
        return pa.parquet.read_metadata(path, memory_map=True).num_rows


def _holds_numbers(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_numbers(kind.value_type)
    if pa.types.is_fixed_size_list(kind):
        return _holds_numbers(kind.value_type)
    return pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)


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
    pattern without match, ValueError for a `**` that would look elsewhere than below `folder`.
    """
    found: list[Path] = []
    for pattern in patterns:
        # A name that exists is no pattern, whatever characters it has.
        names = [pattern]
        if not (folder / pattern).is_file():
            names = sorted(_matches(folder, pattern), key=_natural)
        matches = [folder / name for name in names if (folder / name).is_file()]
        if not matches:
            raise FileNotFoundError(f"{folder / pattern}: no file matches")
        found += matches
    if len(set(found)) != len(found):
        again = next(path for path in found if found.count(path) > 1)
        raise ValueError(f"{again}: is named twice in {list(patterns)}")
    return found


def _matches(folder: Path, pattern: str) -> list[str]:
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern, root_dir=folder)
    if Path(pattern).is_absolute() or ".." in parts:
        raise ValueError(f"{pattern}: has '**', expected a pattern below the description's folder")
    found = (path.relative_to(folder) for path in folder.glob(pattern))  # follows no links
    return [str(name) for name in found if not any(part[0] == "." for part in name.parts)]


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(d) if d else 0, t) for d, t in re.findall(r"(\d+)|(\D+)", text)]


def _kind(path: Path) -> str:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kind = _SUFFIXES.get(suffix.lower())
    if kind is None or (path.suffix == ".gz" and kind != "csv"):
        raise ValueError(f"{path}: is of no known kind, expected {ACCEPTED}")
    return kind


def array(path: Path) -> np.ndarray:
    """A mapped `.npy` file of numbers with rows. Raises ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        found = map_array(path)
    except (*DAMAGE, *_HEADER_DAMAGE) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, np.ndarray) or found.ndim == 0 or found.dtype.kind not in "biuf":
        kind = getattr(found, "dtype", "an archive")
        raise ValueError(f"{path}: holds {kind}, expected an array of numbers with rows")
    return found


# --- .npy


def _matrix(path: Path) -> np.ndarray:
    """A matrix [n, 2], also of one [2, n], which one with two rows is; or a vector's [n, 1]."""
    found = array(path)
    if found.ndim == 2 and found.shape[0] == 2:
        found = found.T
    elif found.ndim == 1:
        found = found[:, None]
    if found.ndim != 2 or found.shape[1] > 2:
        raise ValueError(f"{path}: has shape {found.shape}, expected [E, 2] or [2, E]")
    return found


def _npy_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    """Columns by number."""
    found = _matrix(path)
    for key in keys:
        position(key, ["0", "1"][: found.shape[1]], path)
    for low in range(0, len(found), BLOCK_ROWS):
        part = found[low : low + BLOCK_ROWS]
        yield Block(path, low, [np.ascontiguousarray(part[:, int(key)]) for key in keys])


# --- Parquet


def _parquet_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    with reading(path):
        with pa.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            names = list(file.schema_arrow.names)
    wanted = [position(key, names, path) for key in keys]
    yield from _guarded(path, _batches(path, [names[at] for at in wanted]))


def _batches(path: Path, names: list[str]) -> Iterator[Block]:
    row, unique = 0, list(dict.fromkeys(names))
    with pa.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
        # Rows of lists may be long. What the file tells of its columns is not asked for: where that
        # is damaged, pyarrow ends the process.
        first = next(file.iter_batches(_SAMPLE_ROWS, columns=unique, use_threads=False), None)
        size = rows_at_once(first.nbytes / max(first.num_rows, 1)) if first else BLOCK_ROWS
        for batch in file.iter_batches(size, columns=unique, use_threads=False):
            yield Block(path, row, [batch.column(name) for name in names])
            row += batch.num_rows


def _guarded(path: Path, blocks: Iterator[Block]) -> Iterator[Block]:
    """Errors that arise while the next block is read, and none of who takes it."""
    while True:
        with reading(path):
            block = next(blocks, None)
        if block is None:
            return
        yield block
