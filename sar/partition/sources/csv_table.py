"""Columns of one CSV or TSV file, plain or gzipped, read block by block.

Lines at the top that begin with `#` are left out. Rows are counted from 0, and a header is no row.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from sar.partition.sources.blocks import DAMAGE, Block, Key, WidenError, position, reading

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class CsvFile:
    """header: whether the first line names columns; `None`: it does unless it is all numbers."""

    path: Path
    delimiter: str
    header: bool | None

    @cached_property
    def _top(self) -> tuple[int, list[str] | None, int]:
        """Lines of comments, the names of columns if there are some, and how many columns."""
        opener: Callable = gzip.open if self.path.suffix == ".gz" else open
        with reading(self.path), opener(self.path, "rb") as file:
            skipped, line = 0, file.readline(_BLOCK_BYTES)
            while line.startswith(b"#"):
                skipped, line = skipped + 1, file.readline(_BLOCK_BYTES)
            first, second = (
                _fields(text.decode("utf-8-sig").rstrip("\r\n"), self.delimiter)
                for text in (line, file.readline(_BLOCK_BYTES))
            )
        header = self.header
        if header is None:
            header = first != [""] and not all(map(_is_number, first))
        if self.header is False and any(  # texts above numbers
            _is_number(below) and not _is_number(above) for above, below in zip(first, second)
        ):
            raise ValueError(
                f"{self.path}: begins with {self.delimiter.join(first)!r}, which names columns; "
                "name them, instead of their numbers"
            )
        return skipped, first if header else None, len(first)

    @property
    def names(self) -> list[str] | None:
        """Of the columns, `None` where the file has none."""
        return self._top[1]

    @property
    def width(self) -> int:
        return self._top[2]

    def _labels(self) -> list[str]:
        return self.names or [f"f{number}" for number in range(self.width)]

    def type_of(self, key: Key) -> pa.DataType:
        """Of a column, as its first rows tell; the null type where they hold nothing."""
        if not self._is_filled():
            return pa.null()
        name = self._name(key)
        with reading(self.path), self._open([name], {}) as reader:
            return reader.schema.field(0).type

    def _is_filled(self) -> bool:
        return bool(self.path.stat().st_size) and (self.names is not None or self.width > 0)

    def _name(self, key: Key) -> str:
        if self.names is None and isinstance(key, str):
            raise ValueError(
                f"{self.path}: has no column {key!r}: its first line names none; "
                "give the column's number"
            )
        labels = self._labels()
        return labels[position(key, labels, self.path)]

    def blocks(
        self, keys: Sequence[Key], types: Mapping[Key, pa.DataType], widens: Sequence[Key]
    ) -> Iterator[Block]:
        """The columns ``keys``, of these types where they are given.

        Raises ValueError naming file, row, column and value; of those in ``widens`` `WidenError`.
        """
        if not self._is_filled():
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
            labels = self._labels()
            columns = {labels.index(name): key for key, name in zip(keys, names)}
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
                block_size=_BLOCK_BYTES,
                skip_rows=self._top[0],
                autogenerate_column_names=self.names is None,
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
        """pyarrow's error in our words. It counts columns from 0, and lines from 1."""
        text = (str(error).splitlines() or [type(error).__name__])[0]
        line, column = re.search(r"Row #(\d+): ", text), re.match(r"In CSV column #(\d+): ", text)
        key = keys.get(int(column[1])) if column else None
        first = self._top[0] + (1 if self.names is None else 2)
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
        float(text)
    except ValueError:
        return False
    return True
