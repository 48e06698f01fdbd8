"""An existing partitioning as a graph again, so that it can be cut anew or written otherwise.

Part after part is read, and its rows are put where their original ids say: into files, which
are mapped. In memory are the edges of one part, 20 to 40 bytes each, and 12 bytes for each node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition import npy
from sar.partition.arrays import ORIG_EID, ORIG_ID, CanonicalEtype, GraphArrays
from sar.partition.book import PartitionBook
from sar.partition.book_file import read_book
from sar.partition.features import FeatureStore
from sar.partition.foreign import open_folder
from sar.partition.load import (
    PartitionData,
    load_partition,
    read_edge_features,
    read_node_features,
)
from sar.partition.mapped import BLOCK_BYTES
from sar.partition.progress import Counter, Progress, silent
from sar.partition.renumber import own_ids

_BLOCK = 1 << 20


def read_partitions(
    path: str | os.PathLike, scratch: Path, progress: Progress = silent
) -> tuple[GraphArrays, np.ndarray]:
    """The graph whose partitions lie at ``path``, and int32 [N] the part of each node, types one
    after another.

    Ids are the original ones where the partitions hold them: ``orig_id`` and ``orig_eid``, if each
    id from 0 on comes once; else the partitioning's own, and what they hold stays as a column.
    Partitions without them get the ids that they have here as `orig_id`.

    Args:
        path: a JSON that DGL or this library wrote, or a folder of PyG's or GraphLearn's.
        scratch: a folder for the graph's arrays, which are read from there as long as it is used.

    Raises ``PartitionError`` for files that are missing, damaged or contradict each other, and
    ``OSError`` that names a file of ``scratch``.
    """
    book = read_book(path)
    num_nodes = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    total = sum(num_nodes.values())
    counter = Counter(progress, "reading node ids", total)
    nodes = {ntype: _node_ids(book, ntype, scratch, counter) for ntype in book.ntypes}
    node_data = _node_columns(book, nodes, scratch, Counter(progress, "reading node data", total))
    edges, edge_data = _edges(book, nodes, scratch, progress)
    graph = GraphArrays(book.graph_name, num_nodes, edges, node_data, edge_data)
    graph.with_orig_ids().validate(progress)
    parts, starts = np.empty(graph.total_nodes, np.int32), graph.node_offsets()
    for ntype, numbers in nodes.items():
        own = parts[starts[ntype] :]
        for part in range(book.num_parts):
            own[numbers.of_part(part)] = part
    return graph, parts


@dataclass
class _Numbers:
    """The ids that nodes of a type get.

    Attributes:
        ids: int32 or int64 [N], in the order of the parts' rows.
        bounds: int64 [P + 1], where each part's rows begin there.
    """

    ids: np.ndarray
    bounds: np.ndarray

    def of_part(self, part: int) -> np.ndarray:
        return self.ids[self.bounds[part] : self.bounds[part + 1]]


def _bounds(ranges: np.ndarray) -> np.ndarray:
    """int64 [P + 1] of ranges [P, 2]: rows before each part, of one type."""
    return np.concatenate(([0], np.cumsum(ranges[:, 1] - ranges[:, 0])))


def _node_ids(book: PartitionBook, ntype: str, scratch: Path, counter: Counter) -> _Numbers:
    bounds, name = _bounds(book.node_ranges[ntype]), f"{ntype}/{ORIG_ID}"
    total = int(bounds[-1])
    ids = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    if book.is_foreign:
        folder = open_folder(book.json_path)
        runs = ((part, 0, own_ids(folder, ntype, part)) for part in range(book.num_parts))
    elif _is_numbering(book, read_node_features, name, total, scratch):
        runs = (
            (part, low, rows.numpy())
            for part in range(book.num_parts)
            for low, rows in _runs(read_node_features(book, part), name)
        )
    else:
        counter.add(total)
        return _Numbers(ids, bounds)
    for part, low, own in runs:
        start = int(bounds[part]) + low
        ids[start : start + len(own)] = own
        counter.add(len(own))
    return _Numbers(ids, bounds)


def _is_numbering(
    book: PartitionBook,
    read: Callable[[PartitionBook, int], FeatureStore],
    name: str,
    total: int,
    scratch: Path,
) -> bool:
    """Whether a column of all parts holds each id below ``total`` once."""
    seen, count = npy.create(scratch / "seen.npy", np.bool_, (total,)), 0
    for part in range(book.num_parts):
        store = read(book, part)
        if name not in store or not _is_column_of_ids(store, name):
            return False
        for _, rows in _runs(store, name):
            ids = rows.numpy()
            if len(ids) and not 0 <= ids.min() <= ids.max() < total:
                return False
            seen[ids] = True
            count += len(ids)
    return count == total and _all(seen)


def _all(seen: np.ndarray) -> bool:
    return all(seen[low : low + _BLOCK].all() for low in range(0, len(seen), _BLOCK))


def _is_column_of_ids(store: FeatureStore, name: str) -> bool:
    dtype, shape = store.info(name)
    return len(shape) == 1 and dtype in (torch.int32, torch.int64)


def _runs(store: FeatureStore, name: str) -> Iterator[tuple[int, Tensor]]:
    """First row and rows of a column, a few MB at a time."""
    (dtype, shape), read = store.info(name), store.reader(name)
    step = max(1, BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for low in range(0, shape[0], step):
        yield low, read(low, min(low + step, shape[0]))


class _Column:
    """A column in a file, filled in any order.

    torch's bfloat16, which numpy does not know, lies there as integers.
    """

    def __init__(self, path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._path, self._dtype = path, dtype
        self.kind = dtype, shape[1:]
        stored = torch.int16 if dtype == torch.bfloat16 else dtype
        self._rows = npy.create(path, torch.empty(0, dtype=stored).numpy().dtype, shape)

    def put(self, ids: np.ndarray, rows: Tensor) -> None:
        if self._dtype == torch.bfloat16:
            rows = rows.view(torch.int16)
        self._rows[ids] = rows.numpy()

    def tensor(self) -> Tensor:
        """What was put, from the file."""
        self._rows = np.empty(0)
        found = npy.tensor(self._path)
        return found.view(torch.bfloat16) if self._dtype == torch.bfloat16 else found


class _Columns:
    """The columns of a type, the same in each part.

    Args:
        prefix: of their names in the parts: the type and a slash.
        without: the name of the column that ids were taken from, if it is not one of them.
    """

    def __init__(self, book: PartitionBook, prefix: str, total: int, stem: Path, without: str = ""):
        self._book, self._prefix, self._total, self._stem = book, prefix, total, stem
        self._without = without
        self._found: dict[str, _Column] | None = None

    def add(self, store: FeatureStore, part: int, ids: np.ndarray, counter: Counter) -> None:
        """A part's rows, and the id of each. Raises ``PartitionError``."""
        kinds = {
            name.removeprefix(self._prefix): store.info(name)
            for name in store
            if name.startswith(self._prefix) and name != self._prefix + self._without
        }
        if self._found is None:
            self._found = {
                name: _Column(self._path(number), dtype, (self._total, *shape[1:]))
                for number, (name, (dtype, shape)) in enumerate(kinds.items())
            }
        expected = {name: one.kind for name, one in self._found.items()}
        got = {name: (dtype, shape[1:]) for name, (dtype, shape) in kinds.items()}
        if got != expected:
            raise PartitionError(
                f"{self._book.json_path}: part {part} has of {self._prefix[:-1]!r} the columns "
                f"{got}, expected {expected}, as in part 0"
            )
        readers = {name: store.reader(self._prefix + name) for name in self._found}
        widths = [math.prod(shape) * dtype.itemsize for dtype, shape in expected.values()]
        step = max(1, BLOCK_BYTES // max([1, *widths]))
        for low in range(0, len(ids), step):
            own = ids[low : low + step]
            for name, column in self._found.items():
                column.put(own, readers[name](low, low + len(own)))
            counter.add(len(own))

    def _path(self, number: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{number}.npy")

    def tensors(self) -> dict[str, Tensor]:
        return {name: one.tensor() for name, one in (self._found or {}).items()}


def _node_columns(
    book: PartitionBook, nodes: dict[str, _Numbers], scratch: Path, counter: Counter
) -> dict[str, dict[str, Tensor]]:
    found = {
        ntype: _Columns(book, f"{ntype}/", book.num_nodes(ntype), scratch / f"node-{number}")
        for number, ntype in enumerate(nodes)
    }
    for part in range(book.num_parts):
        store = read_node_features(book, part)
        for ntype, columns in found.items():
            columns.add(store, part, nodes[ntype].of_part(part), counter)
    return {ntype: columns.tensors() for ntype, columns in found.items()}


_Ends = dict[CanonicalEtype, tuple[Tensor, Tensor]]


def _edges(
    book: PartitionBook, nodes: dict[str, _Numbers], scratch: Path, progress: Progress
) -> tuple[_Ends, dict[CanonicalEtype, dict[str, Tensor]]]:
    found = [
        _EdgesOfType(book, etype, scratch / f"edge-{number}")
        for number, etype in enumerate(book.canonical_etypes)
    ]
    total = sum(book.num_edges(etype) for etype in book.canonical_etypes)
    counter = Counter(progress, "reading edges", 2 * total)
    for part in range(book.num_parts):
        data = load_partition(book.json_path, part)
        for one in found:
            one.add(data, nodes, counter)
    ends = {one.etype: one.ends() for one in found}
    return ends, {one.etype: one.columns.tensors() for one in found}


class _EdgesOfType:
    """Ends of edges in files, int64 [E] each, and their columns."""

    def __init__(self, book: PartitionBook, etype: CanonicalEtype, stem: Path) -> None:
        self.etype, self._book, self._total = etype, book, book.num_edges(etype)
        self._bounds, self._prefix = _bounds(book.edge_ranges[etype]), ":".join(etype) + "/"
        self._by_original = book.is_foreign or self._has_numbers(stem)
        without = ORIG_EID if self._by_original else ""
        self.columns = _Columns(book, self._prefix, self._total, stem, without)
        paths = [stem.with_name(f"{stem.name}-{name}.npy") for name in ("src", "dst", "seen")]
        self._paths = paths[:2]
        self._src, self._dst = (npy.create(one, np.int64, (self._total,)) for one in self._paths)
        self._seen = npy.create(paths[2], np.bool_, (self._total,))

    def _has_numbers(self, stem: Path) -> bool:
        name = self._prefix + ORIG_EID
        return _is_numbering(self._book, read_edge_features, name, self._total, stem.parent)

    def add(self, data: PartitionData, nodes: dict[str, _Numbers], counter: Counter) -> None:
        """The edges that end in a part; they count with their ends, and with their columns."""
        part, shard = data.part_id, data.edges[self.etype]
        ids = self._ids(data.edge_features, part)
        sources, dst_ids = nodes[self.etype[0]], nodes[self.etype[2]].of_part(part)
        for source in range(self._book.num_parts):
            src_ids = sources.of_part(source)
            for low in range(shard.offsets[source], shard.offsets[source + 1], _BLOCK):
                some = slice(low, min(low + _BLOCK, shard.offsets[source + 1]))
                rows = ids[shard.eid[some].numpy()]
                self._src[rows] = src_ids[shard.src[some].numpy()]
                self._dst[rows] = dst_ids[shard.dst[some].numpy()]
                self._seen[rows] = True
                counter.add(len(rows))
        self.columns.add(data.edge_features, part, ids, counter)

    def _ids(self, store: FeatureStore, part: int) -> np.ndarray:
        """int64 [e] of a part's edges."""
        if not self._by_original:
            return np.arange(self._bounds[part], self._bounds[part + 1])
        ids = store[self._prefix + ORIG_EID].numpy().astype(np.int64, copy=False)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._total:
            raise PartitionError(
                f"{self._book.json_path}: {ORIG_EID} of {self.etype} spans [{ids.min()}, "
                f"{ids.max()}] in part {part}, expected [0, {self._total - 1}]"
            )
        return ids

    def ends(self) -> tuple[Tensor, Tensor]:
        """From the files. Raises ``PartitionError`` where an edge is missing."""
        if not _all(self._seen):
            raise PartitionError(
                f"{self._book.json_path}: an edge of {self.etype} is in two parts, another in none"
            )
        self._src = self._dst = np.empty(0, np.int64)
        src, dst = map(npy.tensor, self._paths)
        return src, dst
