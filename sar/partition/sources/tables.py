"""Columns of tables in files, a few megabytes at a time: Parquet, CSV, TSV (also gzipped), `.npy`.

Rows are counted from 0 in each file, and a header is no row.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from sar.partition.arrays import need
from sar.partition.column import map_array
from sar.partition.progress import blocks
from sar.partition.sources.blocks import (
    BLOCK_ROWS,
    Block,
    CsvFile,
    Key,
    position,
    reading,
    rows_at_once,
)

_SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
_SAMPLE_ROWS = 256
_NESTED = (pa.DictionaryType, pa.ListType, pa.LargeListType, pa.FixedSizeListType)
ACCEPTED = ".parquet, .csv, .tsv, .csv.gz, .tsv.gz or .npy"


@dataclass(frozen=True)
class Table:
    """Files of one ``kind`` ("parquet", "csv", "npy") whose rows lie one after another.

    header: the first line of a CSV file names columns; `None`: unless it consists of numbers.
    rows: of each file, where the count is known from elsewhere; another count is an error.
    """

    paths: tuple[Path, ...]
    kind: str
    delimiter: str = ","
    header: bool | None = None
    rows: tuple[int, ...] | None = None

    def keys(self) -> list[Key]:
        """Names of the columns of the first file, or numbers where they have none."""
        if self.kind == "csv":
            return self._csv(self.paths[0]).keys()
        return list(parquet_schema(self.paths[0]).names) if self.kind == "parquet" else [0, 1]

    def numbers(self, keys: Sequence[Key]) -> dict[Key, bool]:
        return {key: _holds_numbers(kind) for key, kind in self._types(keys).items()}

    def integers(self, keys: Sequence[Key]) -> dict[Key, bool]:
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
        schema = parquet_schema(path)
        return {key: schema.field(position(key, schema.names, path)).type for key in keys}

    def num_rows(self) -> int:
        """Rows of all files; 0 where one does not tell, or is damaged."""
        if self.kind == "csv":
            return 0
        count = _parquet_rows if self.kind == "parquet" else lambda path: len(_matrix(path))
        try:
            return sum(map(count, self.paths))
        except (ValueError, OSError):  # told by who reads them
            return 0

    def blocks(
        self,
        keys: Sequence[Key],
        *,
        ids: Sequence[Key] = (),
        texts: Sequence[Key] = (),
        floats: Sequence[Key] = (),
    ) -> Iterator[Block]:
        """The columns ``keys`` of all files, in blocks. In CSV, ``ids`` name nodes and are text
        where not integers, ``texts`` are text and ``floats`` floats whatever they begin with."""
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
            need(rows == want, f"{path}: holds {rows} rows, expected {want}")

    def _csv(self, path: Path) -> CsvFile:
        return CsvFile(path, self.delimiter, self.header)

    def _csv_types(
        self, keys: Sequence[Key], ids: Sequence[Key], given: Mapping[Key, pa.DataType]
    ) -> dict[Key, pa.DataType]:
        """Types of columns by the first file that holds something: the same for all files."""
        types = dict(given)
        for key in keys:
            for path in self.paths if key not in types else ():
                kind = self._csv(path).type_of(key)
                if not pa.types.is_null(kind):
                    is_text = key in ids and not pa.types.is_integer(kind)
                    types[key] = pa.string() if is_text else kind
                    break
        return types


def _holds_numbers(kind: pa.DataType) -> bool:
    while isinstance(kind, _NESTED):
        kind = kind.value_type
    return pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)


def table_of(
    paths: Sequence[Path],
    *,
    kind: str | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    rows: tuple[int, ...] | None = None,
) -> Table:
    """The table of these files, of one kind, which their names tell unless it is given."""
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: there is no such file")
    kinds = {kind or _kind(path) for path in paths}
    need(len(kinds) == 1, f"{paths[0]}: expected files of one kind, got {sorted(kinds)}")
    if delimiter is None:
        delimiter = "\t" if ".tsv" in paths[0].suffixes else ","
    is_good = len(delimiter) == 1 and delimiter.isascii()
    need(is_good, f"{paths[0]}: delimiter is {delimiter!r}, expected one character")
    return Table(tuple(paths), kinds.pop(), delimiter, header, rows)


def _kind(path: Path) -> str:
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    kind = _SUFFIXES.get(suffix.lower(), "")
    is_good = kind and (path.suffix != ".gz" or kind == "csv")
    need(is_good, f"{path}: is of no known kind, expected {ACCEPTED}")
    return kind


def find_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files that match, in the order of the patterns and, for each, of their names: `part-10` after
    `part-9`. Raises FileNotFoundError naming a pattern without match, ValueError for a `**` that
    would look elsewhere than below `folder`."""

    def natural(text: str) -> list[tuple[int, str]]:
        return [(int(d) if d else 0, t) for d, t in re.findall(r"(\d+)|(\D+)", text)]

    found: list[Path] = []
    for pattern in patterns:
        # A name that exists is no pattern, whatever characters it has.
        is_name = (folder / pattern).is_file()
        names = [pattern] if is_name else sorted(_matches(folder, pattern), key=natural)
        matches = [folder / name for name in names if (folder / name).is_file()]
        if not matches:
            raise FileNotFoundError(f"{folder / pattern}: no file matches")
        found += matches
    again = next((path for path, count in Counter(found).items() if count > 1), None)
    need(again is None, f"{again}: is named twice in {list(patterns)}")
    return found


def _matches(folder: Path, pattern: str) -> list[str]:
    parts = Path(pattern).parts
    if "**" not in parts:
        return glob.glob(pattern, root_dir=folder)
    is_below = not Path(pattern).is_absolute() and ".." not in parts
    need(is_below, f"{pattern}: has '**', expected a pattern below the description's folder")
    found = (path.relative_to(folder) for path in folder.glob(pattern))  # follows no links
    return [str(name) for name in found if not any(part[0] == "." for part in name.parts)]


def array(path: Path) -> np.ndarray:
    """A mapped `.npy` file of numbers with rows. Raises ValueError naming the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        found = map_array(path)
    except Exception as error:  # damaged headers raise anything
        raise ValueError(f"{path}: cannot be read: {error}") from error
    is_good = isinstance(found, np.ndarray) and found.ndim and found.dtype.kind in "biuf"
    kind = getattr(found, "dtype", "an archive")
    need(is_good, f"{path}: holds {kind}, expected an array of numbers with rows")
    return found


def _matrix(path: Path) -> np.ndarray:
    """A matrix [n, 2], also of one [2, n], which one with two rows is; a vector as [n, 1]."""
    found = array(path)
    if found.ndim == 2 and found.shape[0] == 2:
        found = found.T
    elif found.ndim == 1:
        found = found[:, None]
    is_good = found.ndim == 2 and found.shape[1] <= 2
    need(is_good, f"{path}: has shape {found.shape}, expected [E, 2] or [2, E]")
    return found


def _npy_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    found = _matrix(path)
    for key in keys:
        position(key, ["0", "1"][: found.shape[1]], path)
    for low, high in blocks(len(found), size=BLOCK_ROWS):
        part = found[low:high]
        yield Block(path, low, [np.ascontiguousarray(part[:, int(key)]) for key in keys])


def parquet_schema(path: Path) -> pa.Schema:
    with reading(path):
        return pa.parquet.read_schema(path, memory_map=True)


def _parquet_rows(path: Path) -> int:
    with reading(path):
        return pa.parquet.read_metadata(path, memory_map=True).num_rows


def _parquet_blocks(path: Path, keys: Sequence[Key]) -> Iterator[Block]:
    with reading(path):
        file = pa.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
    with file:
        known, row = list(file.schema_arrow.names), 0
        names = [known[position(key, known, path)] for key in keys]
        unique = list(dict.fromkeys(names))
        with reading(path):
            # Rows of lists may be long. What the file tells of its columns is not asked for: where
            # that is damaged, pyarrow ends the process.
            first = next(file.iter_batches(_SAMPLE_ROWS, columns=unique, use_threads=False), None)
            size = rows_at_once(first.nbytes / max(first.num_rows, 1)) if first else BLOCK_ROWS
            batches = file.iter_batches(size, columns=unique, use_threads=False)
        while True:
            with reading(path):  # not what is raised by who takes the block
                batch = next(batches, None)
            if batch is None:
                return
            yield Block(path, row, [batch.column(name) for name in names])
            row += batch.num_rows
