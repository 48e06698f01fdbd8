"""A graph out of tables: ids are numbered, columns are written or mapped, all of it in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.files import naming
from sar.partition.arrays import ORIG_EID, ORIG_ID, EType, GraphArrays, check_dense, need
from sar.partition.progress import Counter, Progress, blocks, silent, watched
from sar.partition.sources.blocks import (
    Block,
    Key,
    WidenError,
    finished,
    numbers,
    rows_at_once,
    together,
)
from sar.partition.sources.idmap import Dense, IdMap
from sar.partition.sources.tables import Table, array


@dataclass(frozen=True)
class Values:
    """One column of nodes or edges: columns of a table; without ``keys``, rows of `.npy` files,
    where ``shape`` is that of a row of more dimensions than a table knows."""

    table: Table
    keys: tuple[Key, ...] | None = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nodes:
    """One type of nodes: dense ids below ``count``; or the external ``ids`` of a table's column; or
    neither: external ids as edges name them, with ``dense`` numbers. ``texts``: ids are texts, even
    if those in CSV look like integers."""

    count: int | None = None
    ids: Values | None = None
    columns: Mapping[str, Values] = field(default_factory=dict)
    dense: bool = False
    texts: bool = False


@dataclass(frozen=True)
class Edges:
    etype: EType
    table: Table
    src: Key
    dst: Key
    columns: Mapping[str, Values] = field(default_factory=dict)


def assemble(
    name: str,
    nodes: Mapping[str, Nodes],
    edges: Sequence[Edges],
    scratch: Path,
    allow_nan: bool = False,
    progress: Progress = silent,
) -> GraphArrays:
    """The graph of tables; types in the order of their names, as DGL has them.

    Columns lie in ``scratch``, and the external `id` of each `node` in `ids/<ntype>.parquet` there.
    Ids without a table are numbered as edges name them: type after type as given, row after row,
    source before destination. Raises ValueError naming file, row and value; FileNotFoundError;
    OSError.
    """
    reader = _Reader(scratch, allow_nan, progress)
    counts, ends, edge_data = reader.edges(nodes, edges)
    node_data = {
        ntype: reader.columns(
            nodes[ntype].columns, counts[ntype], f"{ntype!r} nodes", f"nodes-{number}", ORIG_ID
        )
        for number, ntype in enumerate(sorted(nodes))
    }
    graph = GraphArrays(
        name,
        {ntype: counts[ntype] for ntype in sorted(nodes)},
        {etype: ends[etype] for etype in sorted(ends)},
        node_data,
        {etype: edge_data[etype] for etype in sorted(ends) if edge_data[etype]},
    )
    return graph.with_orig_ids().validate(progress)


_Ends = tuple[Tensor, Tensor]
_Columns = dict[str, Tensor]


@dataclass(frozen=True)
class _Reader:
    scratch: Path
    allow_nan: bool
    progress: Progress

    def blocks(self, what: str, table: Table, keys: Sequence[Key], **types: Any) -> Iterator[Block]:
        found = table.blocks(keys, **types)
        counter = Counter(self.progress, f"reading {what}", table.num_rows())
        return watched(found, counter, lambda block: len(block.columns[0]))

    def edges(
        self, nodes: Mapping[str, Nodes], edges: Sequence[Edges]
    ) -> tuple[dict[str, int], dict[EType, _Ends], dict[EType, _Columns]]:
        """Counts of nodes, and edges; the memory of ids is free when it returns."""
        numberings = {ntype: self._numbering(ntype, one) for ntype, one in nodes.items()}
        ends: dict[EType, _Ends] = {}
        data: dict[EType, _Columns] = {}
        for number, one in enumerate(edges):
            both = numberings[one.etype[0]], numberings[one.etype[2]]
            ends[one.etype], data[one.etype] = self._edges_of(one, *both, f"edges-{number}")
        total = sum(len(src) for src, _ in ends.values())
        for ntype, numbering in numberings.items():
            if isinstance(numbering, IdMap):
                numbering.write(self.scratch / "ids" / f"{ntype}.parquet")
            elif nodes[ntype].count is None:
                where = str(edges[0].table.paths[0])
                check_dense(numbering.count, 2 * total, where, "describe them with 'ids: external'")
        return {ntype: one.count for ntype, one in numberings.items()}, ends, data

    def _numbering(self, ntype: str, nodes: Nodes) -> Dense | IdMap:
        if nodes.count is not None or nodes.dense:
            return Dense(ntype, nodes.count)
        numbering = IdMap(ntype, nodes.texts)
        if nodes.ids:
            (key,) = nodes.ids.keys or (0,)
            texts = [key] if nodes.texts else []
            for block in self.blocks("node ids", nodes.ids.table, [key], ids=[key], texts=texts):
                numbering.add(block, key)
            numbering.closed = True
        return numbering

    def _edges_of(
        self, one: Edges, src: Dense | IdMap, dst: Dense | IdMap, folder: str
    ) -> tuple[_Ends, _Columns]:
        what = f"{':'.join(one.etype)!r} edges"
        _check_names(one.columns, what, ORIG_EID)
        beside = {n: v for n, v in one.columns.items() if v.table is one.table and v.keys}
        rest = {n: v for n, v in one.columns.items() if n not in beside}
        ends, data = self._read("edges", one.table, beside, f"{folder}/column", (one, src, dst))
        data |= self.columns(rest, len(ends[0]), what, folder, ORIG_EID)
        return (ends[0], ends[1]), {name: data[name] for name in one.columns}

    def columns(
        self, columns: Mapping[str, Values], rows: int, what: str, folder: str, reserved: str
    ) -> _Columns:
        """All columns by name, [rows, ...]; those of one table are read together."""
        _check_names(columns, what, reserved)
        kind = "node data" if reserved == ORIG_ID else "edge data"
        found: _Columns = {}
        groups: dict[Table, dict[str, Values]] = {}
        for number, (name, values) in enumerate(columns.items()):
            if values.keys is None:
                counter = Counter(self.progress, f"reading {kind}", rows)
                copy = self.scratch / folder / f"array-{number}"
                found[name] = self._map_or_copy(values, name, copy, counter)
            else:
                groups.setdefault(values.table, {})[name] = values
        for number, (table, group) in enumerate(groups.items()):
            found |= self._read(kind, table, group, f"{folder}/table-{number}")[1]
        for name, values in columns.items():
            tensor, shape = found.pop(name), values.shape
            text = f"column {name!r} has {len(tensor)} rows, expected {rows} ({what})"
            need(len(tensor) == rows, f"{values.table.paths[0]}: {text}")
            fits = shape and math.prod(shape) == math.prod(tensor.shape[1:])
            found[name] = tensor.view(rows, *shape) if fits else tensor
        return found

    def _read(
        self,
        kind: str,
        table: Table,
        group: Mapping[str, Values],
        stem: str,
        edges: tuple[Edges, Dense | IdMap, Dense | IdMap] | None = None,
    ) -> tuple[list[Tensor], _Columns]:
        """Ends of edges, whose ids are the first columns, and columns by name: read once more where
        one that began with integers has to be read as floats."""
        ids = [edges[0].src, edges[0].dst] if edges else []
        keys = [key for values in group.values() for key in values.keys or ()]
        floats: list[Key] = []
        while True:
            with ExitStack() as stack:
                # Names may hold what no file name can, so files have numbers.
                files = [
                    stack.enter_context(_ColumnFile(self.scratch / f"{stem}-{number}", name))
                    for number, name in enumerate(group)
                ]
                folder = (self.scratch / stem).parent
                ends = [
                    stack.enter_context(_ColumnFile(folder / f"end-{number}", name, "int64"))
                    for number, name in enumerate(("src", "dst") if edges else ())
                ]
                texts = _text_ids(*edges) if edges else []
                try:
                    for block in self.blocks(
                        kind, table, [*ids, *keys], ids=ids, texts=texts, floats=floats
                    ):
                        for file, rows in zip(ends, _number(block, *edges) if edges else ()):
                            file.append(rows, block)
                        self._add(files, group, block, len(ids))
                    columns = {name: file.tensor() for name, file in zip(group, files)}
                    return [file.tensor() for file in ends], columns
                except WidenError as error:
                    if error.key in floats:
                        raise ValueError(str(error)) from error
                    floats.append(error.key)

    def _add(
        self,
        files: Sequence[_ColumnFile],
        columns: Mapping[str, Values],
        block: Block,
        first: int,
    ) -> None:
        """Append each file's columns of the block, the first of which has number ``first``."""
        for file, (name, values) in zip(files, columns.items()):
            keys = values.keys or ()
            rows = together(block, first, keys)
            file.append(finished(rows, name, values.dtype, self.allow_nan, block), block)
            first += len(keys)

    def _map_or_copy(self, values: Values, name: str, copy: Path, counter: Counter) -> Tensor:
        """The rows of `.npy` files: mapped where they lie if one file can be used as it is."""
        table = values.table
        single, mapped = len(table.paths) == 1, array(table.paths[0])
        with _ColumnFile(copy, name) as file:
            for number, path in enumerate(table.paths):
                found = array(path)
                count = table.rows[number] if table.rows else len(found)
                need(len(found) == count, f"{path}: holds {len(found)} rows, expected {count}")
                step = rows_at_once(found.nbytes / max(len(found), 1))
                for low, high in blocks(len(found), counter, step):
                    block = Block(path, low, [found[low:high]])
                    rows = numbers(block, 0, name)
                    rows = finished(rows, name, values.dtype, self.allow_nan, block)
                    single = single and rows.dtype == found.dtype and found.flags.c_contiguous
                    if not single:
                        file.append(rows, block)
                if not len(found):
                    file.append(found[:0], Block(path, 0, []))
            if single and mapped.size:
                copy.unlink()
                return torch.from_numpy(mapped)
            return file.tensor()


class _ColumnFile:
    """A file that blocks of rows are appended to, and that :meth:`tensor` maps; ``nothing`` is the
    dtype without rows. Raises ``OSError`` naming the file where the disk is full."""

    def __init__(self, path: Path, name: str, nothing: str = "float32") -> None:
        self._path, self._name, self._count = path, name, 0
        self._kind: tuple[np.dtype, tuple[int, ...]] | None = None
        self._nothing = np.dtype(nothing)
        with naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> _ColumnFile:
        return self

    def __exit__(self, *_: object) -> None:
        with naming(self._path):
            self._file.close()

    def append(self, values: np.ndarray, block: Block) -> None:
        """Append rows. Raises ``ValueError`` where dtype or width changes."""
        kind = values.dtype, values.shape[1:]
        before = self._kind = self._kind or kind
        if kind != before:
            text = f"rows are {kind[0]} {list(kind[1])}, expected {before[0]} {list(before[1])}"
            raise block.error(0, self._name, f"{text} as before")
        with naming(self._path):
            np.ascontiguousarray(values).tofile(self._file)
        self._count += len(values)

    def tensor(self) -> Tensor:
        self.__exit__()
        dtype, width = self._kind or (self._nothing, ())
        shape = (self._count, *width)
        if not math.prod(shape):
            return torch.from_numpy(np.zeros(shape, dtype))
        return torch.from_numpy(np.memmap(self._path, dtype, "c", 0, shape))


def _text_ids(one: Edges, src: Dense | IdMap, dst: Dense | IdMap) -> list[Key]:
    """Columns whose ids are texts even if this table's look like integers."""
    maps = {key: ids for key, ids in ((one.src, src), (one.dst, dst)) if isinstance(ids, IdMap)}
    are_integers = one.table.integers(list(maps))
    texts = {id(ids) for key, ids in maps.items() if ids.are_texts or not are_integers[key]}
    return [key for key, ids in maps.items() if id(ids) in texts and ids.are_texts is not False]


def _number(
    block: Block, one: Edges, src: Dense | IdMap, dst: Dense | IdMap
) -> tuple[np.ndarray, np.ndarray]:
    if src is dst and isinstance(src, IdMap) and not src.closed:
        return src.number_ends(block, one.src, one.dst)
    return src.number(block, 0, one.src), dst.number(block, 1, one.dst)


def _check_names(columns: Mapping[str, Values], what: str, reserved: str) -> None:
    for name, values in columns.items():
        where = f"{values.table.paths[0]}: {what} cannot have a column {name!r}"
        need(name != reserved, f"{where}: that is the row of the input, and added")
        need(name and "/" not in name, f"{where}: expected a name without '/'")
