"""A graph out of tables: ids are numbered, columns are written or mapped, all of it in blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sar.partition.arrays import ORIG_EID, ORIG_ID, CanonicalEtype, GraphArrays
from sar.partition.progress import Counter, Progress, silent, watched
from sar.partition.sources.blocks import Block, Key, WidenError
from sar.partition.sources.columns import (
    ColumnFile,
    cast,
    check_finite,
    map_or_copy,
    standard,
    together,
)
from sar.partition.sources.idmap import Dense, IdMap, Numbering, check_dense
from sar.partition.sources.tables import Table


@dataclass(frozen=True)
class Values:
    """One column of nodes or edges: columns of a table; without ``keys``, rows of `.npy` files.

    shape: of a row, where it is of more dimensions than a table knows.
    """

    table: Table
    keys: tuple[Key, ...] | None = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Nodes:
    """One type of nodes: dense ids below ``count``; or the external ``ids`` of a table's column;
    or neither: external ids in the order in which edges name them, or with ``dense`` numbers.

    texts: external ids are texts, even if those in CSV look like integers.
    """

    count: int | None = None
    ids: Values | None = None
    columns: Mapping[str, Values] = field(default_factory=dict)
    dense: bool = False
    texts: bool = False


@dataclass(frozen=True)
class Edges:
    """One type of edges: columns of its table, and what lies in other tables."""

    etype: CanonicalEtype
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
    """The graph; types in the order of their names, as DGL has them.

    What is written lies in ``scratch``; `ids/<ntype>.parquet` there holds the external `id` of
    each `node`. Ids without a table get numbers in the order in which edges name them, type after
    type as they are given and row after row, the source before the destination.

    Raises ValueError naming file, row and value; FileNotFoundError; OSError for a full disk.
    """
    how = _How(allow_nan, progress)
    counts, ends, edge_data = _read_edges(nodes, edges, scratch, how)
    node_data = {
        ntype: _columns(
            nodes[ntype].columns,
            counts[ntype],
            f"{ntype!r} nodes",
            scratch / f"nodes-{number}",
            how,
            ORIG_ID,
        )
        for number, ntype in enumerate(sorted(nodes))
    }
    etypes = sorted(ends)
    return (
        GraphArrays(
            name,
            {ntype: counts[ntype] for ntype in sorted(nodes)},
            {etype: ends[etype] for etype in etypes},
            node_data,
            {etype: edge_data[etype] for etype in etypes if edge_data[etype]},
        )
        .with_orig_ids()
        .validate(progress)
    )


@dataclass(frozen=True)
class _How:
    """In which way columns are read, all of them."""

    allow_nan: bool
    progress: Progress

    def blocks(self, what: str, table: Table, keys: Sequence[Key], **types: Any) -> Iterator[Block]:
        """:meth:`Table.blocks`, which tell of their progress."""
        blocks = table.blocks(keys, **types)
        counter = Counter(self.progress, f"reading {what}", table.num_rows())
        return watched(blocks, counter, lambda block: len(block.columns[0]))


_Ends = dict[CanonicalEtype, tuple[Tensor, Tensor]]
_EdgeData = dict[CanonicalEtype, dict[str, Tensor]]


def _read_edges(
    nodes: Mapping[str, Nodes], edges: Sequence[Edges], scratch: Path, how: _How
) -> tuple[dict[str, int], _Ends, _EdgeData]:
    """How many nodes there are, and the edges; the memory of ids is free when it returns."""
    numberings = {ntype: _numbering(ntype, one, how) for ntype, one in nodes.items()}
    ends: _Ends = {}
    data: _EdgeData = {}
    for number, one in enumerate(edges):
        copier = _EdgeCopier(one, numberings, scratch / f"edges-{number}", how)
        ends[one.etype], data[one.etype] = copier.copy()
    total = sum(len(src) for src, _ in ends.values())
    for ntype, numbering in numberings.items():
        if isinstance(numbering, IdMap):
            numbering.write(scratch / "ids" / f"{ntype}.parquet")
        elif nodes[ntype].count is None:
            where = str(edges[0].table.paths[0])
            check_dense(numbering.count, 2 * total, where, "describe them with 'ids: external'")
    return {ntype: one.count for ntype, one in numberings.items()}, ends, data


def _numbering(ntype: str, nodes: Nodes, how: _How) -> Numbering:
    if nodes.count is not None or nodes.dense:
        return Dense(ntype, nodes.count)
    numbering = IdMap(ntype, nodes.texts)
    if nodes.ids:
        (key,) = nodes.ids.keys or (0,)
        texts = [key] if nodes.texts else []
        for block in how.blocks("node ids", nodes.ids.table, [key], ids=[key], texts=texts):
            numbering.add(block, key)
        numbering.close()
    return numbering


class _EdgeCopier:
    """Ends and data of one type of edges, out of its tables into files."""

    def __init__(
        self, edges: Edges, numberings: Mapping[str, Numbering], folder: Path, how: _How
    ) -> None:
        self._edges, self._folder, self._how = edges, folder, how
        source, _, destination = edges.etype
        self._src, self._dst = numberings[source], numberings[destination]
        # What lies beside the ends is read with them.
        beside = {n: v for n, v in edges.columns.items() if v.table is edges.table and v.keys}
        self._beside = beside
        self._others = {n: v for n, v in edges.columns.items() if n not in beside}

    def copy(self) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        what = f"{':'.join(self._edges.etype)!r} edges"
        _check_names(self._edges.columns, what, ORIG_EID)
        ends, data = retried(self._copy_once)
        rest = _columns(self._others, len(ends[0]), what, self._folder, self._how, ORIG_EID)
        found = {**data, **rest}
        return ends, {name: found[name] for name in self._edges.columns}

    def _copy_once(self, floats: Sequence[Key]) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        one = self._edges
        keys = [key for values in self._beside.values() for key in values.keys or ()]
        with ExitStack() as stack:
            src, dst = (
                stack.enter_context(ColumnFile(self._folder / f"{end}.npy", end, "int64"))
                for end in ("src", "dst")
            )
            files = _open_files(self._beside, self._folder, stack)
            for block in self._how.blocks(
                "edges",
                one.table,
                [one.src, one.dst, *keys],
                ids=[one.src, one.dst],
                texts=self._texts(),
                floats=floats,
            ):
                rows = self._number(block)
                src.add(rows[0], block)
                dst.add(rows[1], block)
                _add(files, self._beside, block, 2, self._how.allow_nan)
            ends = src.tensor(), dst.tensor()
            return ends, {name: file.tensor() for name, file in files.items()}

    def _texts(self) -> list[Key]:
        """Columns whose ids are texts even if this table's look like integers."""
        one = self._edges
        ends = {one.src: self._src, one.dst: self._dst}
        maps = {key: ids for key, ids in ends.items() if isinstance(ids, IdMap)}
        are_integers = one.table.integers(list(maps))
        texts = {id(ids) for key, ids in maps.items() if ids.has_texts or not are_integers[key]}
        return [key for key, ids in maps.items() if id(ids) in texts and not ids.has_integers]

    def _number(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        one, src, dst = self._edges, self._src, self._dst
        if src is dst and isinstance(src, IdMap) and not src.closed:
            return src.number_ends(block, one.src, one.dst)
        return src.number(block, 0, one.src), dst.number(block, 1, one.dst)


def retried(read):
    """``read(floats)``, again with one more column as floats where it turns out to be of those."""
    floats: list[Key] = []
    while True:
        try:
            return read(floats)
        except WidenError as error:
            if error.key in floats:
                raise ValueError(str(error)) from error
            floats.append(error.key)


def _columns(
    columns: Mapping[str, Values],
    rows: int,
    what: str,
    folder: Path,
    how: _How,
    reserved: str,
) -> dict[str, Tensor]:
    """All columns by name, [rows, ...]; those of one table are read together."""
    _check_names(columns, what, reserved)
    kind = "node data" if reserved == ORIG_ID else "edge data"
    found: dict[str, Tensor] = {}
    groups: dict[Table, dict[str, Values]] = {}
    for number, (name, values) in enumerate(columns.items()):
        if values.keys is None:
            copy = folder / f"array-{number}.npy"
            counter = Counter(how.progress, f"reading {kind}", rows)
            found[name] = map_or_copy(
                values.table, name, copy, values.dtype, how.allow_nan, counter
            )
        else:
            groups.setdefault(values.table, {})[name] = values
    for number, (table, group) in enumerate(groups.items()):
        found |= _read_group(kind, table, group, folder / f"table-{number}", how)
    for name, tensor in found.items():
        if len(tensor) != rows:
            path = columns[name].table.paths[0]
            raise ValueError(
                f"{path}: column {name!r} has {len(tensor)} rows, expected {rows} ({what})"
            )
    return {name: _shaped(found[name], columns[name].shape) for name in columns}


def _shaped(column: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not shape or math.prod(shape) != math.prod(column.shape[1:]):
        return column
    return column.view(len(column), *shape)


def _read_group(
    kind: str, table: Table, group: Mapping[str, Values], folder: Path, how: _How
) -> dict[str, Tensor]:
    keys = [key for values in group.values() for key in values.keys or ()]

    def read(floats: Sequence[Key]) -> dict[str, Tensor]:
        with ExitStack() as stack:
            files = _open_files(group, folder, stack)
            for block in how.blocks(kind, table, keys, floats=floats):
                _add(files, group, block, 0, how.allow_nan)
            return {name: file.tensor() for name, file in files.items()}

    return retried(read)


def _open_files(
    columns: Mapping[str, Values], folder: Path, stack: ExitStack
) -> dict[str, ColumnFile]:
    """Names may hold what no file name can, so files have numbers."""
    return {
        name: stack.enter_context(ColumnFile(folder / f"column-{number}.npy", name))
        for number, name in enumerate(columns)
    }


def _add(
    files: Mapping[str, ColumnFile],
    columns: Mapping[str, Values],
    block: Block,
    first: int,
    allow_nan: bool,
) -> None:
    """Append to each file its columns of the block, which begin at the one of number ``first``."""
    for name, values in columns.items():
        keys = values.keys or ()
        rows = standard(name, cast(together(block, first, keys), values.dtype, block, name))
        if not allow_nan:
            check_finite(rows, block, name)
        files[name].add(rows, block)
        first += len(keys)


def _check_names(columns: Mapping[str, Values], what: str, reserved: str) -> None:
    for name, values in columns.items():
        if name == reserved:
            why = "that is the row of the input, and added"
        elif not name or "/" in name:
            why = "expected a name without '/'"
        else:
            continue
        path = values.table.paths[0]
        raise ValueError(f"{path}: {what} cannot have a column {name!r}: {why}")
