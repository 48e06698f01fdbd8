"""External ids of nodes, 64-bit integers or texts, and their numbers 0, 1, ... as rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from sar.files import naming
from sar.partition.progress import blocks
from sar.partition.sources import hashing
from sar.partition.sources.blocks import (
    BLOCK_ROWS,
    Block,
    Column,
    Key,
    as_stored,
    check_nulls,
    example_of,
)

_FULL = 0.75  # of a table, at most
_MOST = (1 << 32) - 2  # nodes, in half a word
_ROW_GROUP = 1 << 20


def external(block: Block, at: int, key: Key) -> np.ndarray | pa.LargeStringArray:
    """A column of ids: int64 [n], or texts."""
    column: Column = block.columns[at]
    if isinstance(column, pa.Array):
        check_nulls(block, column, key)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
            check_nulls(block, column, key)
        kind = column.type
        views = [pa.string_view()] if hasattr(pa, "string_view") else []
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind in views:
            return column.cast(pa.large_string())
        if not pa.types.is_integer(kind):
            raise block.error(0, key, f"holds {example_of(column)}, expected integers or texts")
        column = column.to_numpy(zero_copy_only=False)
    if column.dtype.kind not in "iu":
        raise block.error(0, key, f"holds {column.dtype}, expected integers")
    return as_stored(column, block, key).astype(np.int64, copy=False)


class Dense:
    """Ids that are row numbers already, below ``expected`` unless that is `None`."""

    def __init__(self, ntype: str, expected: int | None) -> None:
        self._ntype, self._expected, self._above = ntype, expected, 0

    @property
    def count(self) -> int:
        return self._above if self._expected is None else self._expected

    def number(self, block: Block, at: int, key: Key) -> np.ndarray:
        """int64 [n] of the ids of a column. Raises ``ValueError`` naming file, row and value."""
        ids = external(block, at, key)
        if not isinstance(ids, np.ndarray):
            others = pyarrow.compute.match_substring_regex(ids, r"^-?\d+$")
            row = max(pyarrow.compute.index(others, False).as_py(), 0)
            text = f"is {ids[row].as_py()!r}, expected numbers of {self._ntype!r} nodes"
            raise block.error(row, key, text)
        if not len(ids):
            return ids
        low, high = int(ids.min()), int(ids.max())
        limit = high + 1 if self._expected is None else self._expected
        if low < 0 or high >= limit:
            row = int(((ids < 0) | (ids >= limit)).argmax())
            below = "" if self._expected is None else f" and below {limit}"
            text = f"is {ids[row]}, expected 0 or more{below} ({self._ntype!r} nodes)"
            raise block.error(row, key, text)
        self._above = max(self._above, high + 1)
        return ids


class IdMap:
    """External ids, numbered as they come first; where it is ``closed`` others are errors.

    Memory: 11 to 22 bytes an id for the table, 8 for an integer, 8 and its length for a text.
    """

    def __init__(self, ntype: str, texts: bool = False) -> None:
        self._ntype, self.closed = ntype, False
        self._known: _Ints | _Texts | None = _Texts() if texts else None
        self._first: Block | None = None

    @property
    def count(self) -> int:
        return self._known.count if self._known else 0

    @property
    def are_texts(self) -> bool | None:
        return None if self._known is None else isinstance(self._known, _Texts)

    def number(self, block: Block, at: int, key: Key) -> np.ndarray:
        ids = external(block, at, key)
        found = self._table(ids, block, key).number(ids, add=not self.closed)
        if self.closed and len(found) and found.min() < 0:
            row = int(found.argmin())
            text = f"is {_value(ids, row)!r}, which is not among the ids of {self._ntype!r} nodes"
            raise block.error(row, key, text)
        return found

    def number_ends(self, block: Block, src: Key, dst: Key) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`number` of columns 0 and 1, both of this type: row after row, the source before
        the destination, so that numbers do not depend on how a file is cut."""
        ends = external(block, 0, src), external(block, 1, dst)
        for ids, key in zip(ends, (src, dst)):
            table = self._table(ids, block, key)
        both = np.empty(2 * len(ends[0]), np.int64)
        if isinstance(ends[0], np.ndarray):
            both[0::2], both[1::2] = ends
            found = table.number(both, add=True)
        else:
            both[0::2] = np.arange(len(ends[0]))
            both[1::2] = both[0::2] + len(ends[0])
            found = table.number(pa.concat_arrays(ends).take(pa.array(both)), add=True)
        return found[0::2], found[1::2]

    def add(self, block: Block, key: Key) -> None:
        """Number the ids of column 0, which have none yet. Raises ValueError for one that has."""
        before = self.count
        ids = external(block, 0, key)
        found = self._table(ids, block, key).number(ids, add=True)
        wrong = found != np.arange(before, before + len(found))
        if wrong.any():
            row = int(wrong.argmax())
            text = f"id {_value(ids, row)!r} of {self._ntype!r} nodes is there twice"
            raise block.error(row, key, f"{text}, first as node {found[row]}")

    def write(self, path: Path) -> None:
        """A Parquet file of `id` and `node`, int64, in the order of the nodes."""
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            known = self._known or _Ints()
            kind = pa.int64() if isinstance(known, _Ints) else pa.large_string()
            schema = pa.schema([("id", kind), ("node", pa.int64())])
            with pa.parquet.ParquetWriter(path, schema, use_dictionary=False) as file:
                for low, ids in known.parts():
                    node = pa.array(np.arange(low, low + len(ids)))
                    file.write_batch(pa.record_batch([ids, node], schema=schema))

    def _table(self, ids: np.ndarray | pa.Array, block: Block, key: Key) -> _Ints | _Texts:
        kind = _Ints if isinstance(ids, np.ndarray) else _Texts
        if self._known is None:
            self._known, self._first = kind(), block
        if not isinstance(self._known, kind):
            names = {_Ints: "integers", _Texts: "texts"}
            where = f" in {self._first.path}" if self._first else ""
            text = f"holds {names[kind]}, but the ids of {self._ntype!r} nodes{where} are"
            raise block.error(0, key, f"{text} {names[type(self._known)]}")
        return self._known


def _value(ids: np.ndarray | pa.Array, row: int) -> int | str:
    return int(ids[row]) if isinstance(ids, np.ndarray) else ids[row].as_py()


class _Table:
    def __init__(self) -> None:
        self.count, self._bits = 0, 10
        self._words = np.zeros(1 << self._bits, np.uint64)

    def _place(self, ids: Any, out: np.ndarray, count: int, add: bool) -> int:
        """Numbers of ``ids`` into ``out``; of ``count`` ids with one before, returns how many have
        now."""
        raise NotImplementedError

    def _known(self, low: int, high: int) -> Any:
        """The ids of numbers ``[low, high)``."""
        raise NotImplementedError

    def _make_room(self, more: int) -> None:
        if self.count + more > _MOST:
            raise ValueError(f"more than {_MOST} ids of one type are not supported")
        bits = self._bits
        while (self.count + more) > _FULL * (1 << bits):
            bits += 1
        if bits > self._bits:
            self._words = np.zeros(0, np.uint64)  # the old one goes before the new one comes
            self._bits, self._words = bits, np.zeros(1 << bits, np.uint64)
            for low, high in blocks(self.count, size=BLOCK_ROWS):  # they get the same numbers
                self._place(self._known(low, high), np.empty(high - low, np.int64), low, add=True)


def _grow(array: np.ndarray, size: int) -> None:
    """In place, by a quarter at least: the system moves large arrays without a copy."""
    if size > len(array):
        array.resize(max(size, len(array) + len(array) // 4), refcheck=False)


class _Ints(_Table):
    def __init__(self) -> None:
        super().__init__()
        self._ids = np.zeros(1 << 10, np.int64)

    def number(self, ids: np.ndarray, *, add: bool) -> np.ndarray:
        out = np.empty(len(ids), np.int64)
        if add:
            self._make_room(len(ids))
            _grow(self._ids, self.count + len(ids) + 1)
        self.count = self._place(np.ascontiguousarray(ids), out, self.count, add)
        return out

    def _known(self, low: int, high: int) -> np.ndarray:
        return self._ids[low:high]

    def _place(self, ids: np.ndarray, out: np.ndarray, count: int, add: bool) -> int:
        shift = np.uint64(64 - self._bits)
        return hashing.number_ints(self._words, shift, self._ids, count, ids, out, add)

    def parts(self) -> Iterator[tuple[int, pa.Array]]:
        for low, high in blocks(self.count, size=_ROW_GROUP):
            yield low, pa.array(self._ids[low:high])


class _Texts(_Table):
    def __init__(self) -> None:
        super().__init__()
        self._bytes, self._ends = np.zeros(1 << 14, np.uint8), np.zeros(1 << 10, np.int64)

    def number(self, ids: pa.LargeStringArray, *, add: bool) -> np.ndarray:
        out = np.empty(len(ids), np.int64)
        if not len(ids):
            return out
        _, bounds, data = ids.buffers()
        ends = np.frombuffer(bounds, np.int64)[ids.offset : ids.offset + len(ids) + 1]
        texts = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
        if add:
            self._make_room(len(ids))
            _grow(self._ends, self.count + len(ids) + 2)
            _grow(self._bytes, int(self._ends[self.count] + ends[-1] - ends[0]) + 1)
        self.count = self._place((texts, ends), out, self.count, add)
        return out

    def _known(self, low: int, high: int) -> tuple[np.ndarray, ...]:
        known = self._bytes[:], self._ends[low : high + 1]
        for one in known:  # as arrow's buffers: loops are compiled for one kind
            one.flags.writeable = False
        return known

    def _place(self, ids: Any, out: np.ndarray, count: int, add: bool) -> int:
        shift = np.uint64(64 - self._bits)
        known = self._bytes, self._ends, count
        return hashing.number_texts(self._words, shift, *known, *ids, out, add)[0]

    def parts(self) -> Iterator[tuple[int, pa.Array]]:
        for low, high in blocks(self.count, size=_ROW_GROUP):
            ends = self._ends[low : high + 1]
            text = self._bytes[ends[0] : ends[-1]]
            bounds, data = pa.py_buffer(ends - ends[0]), pa.py_buffer(np.ascontiguousarray(text))
            yield low, pa.LargeStringArray.from_buffers(len(ends) - 1, bounds, data)
