"""An existing partitioning as a graph again, so that it can be cut anew or written otherwise.

Part after part is read, and its rows are put where their original ids say: into files, which
are mapped. In memory are the edges of one part, 20 to 40 bytes each, and 12 bytes for each node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import ORIG_EID, ORIG_ID, EType, GraphArrays
from sar.partition.book import PartitionBook
from sar.partition.column import check, create_array, map_tensor
from sar.partition.features import FeatureStore
from sar.partition.foreign import open_folder, own_ids
from sar.partition.load import (
    PartitionData,
    load_partition,
    read_book,
    read_features,
    read_node_features,
)
from sar.partition.progress import Counter, Progress, blocks, rows_in, silent


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
    etypes = [
        _EdgesOfType(book, etype, scratch / f"edge-{number}")
        for number, etype in enumerate(book.canonical_etypes)
    ]
    counter = Counter(progress, "reading edges", 2 * book.num_edges())
    for part in range(book.num_parts):
        data = load_partition(book.json_path, part)
        for one in etypes:
            one.add(data, nodes, counter)
    edges = {one.etype: one.ends() for one in etypes}
    edge_data = {one.etype: one.columns.tensors() for one in etypes}
    graph = GraphArrays(book.graph_name, num_nodes, edges, node_data, edge_data)
    graph.with_orig_ids().validate(progress)
    parts, starts = np.empty(graph.total_nodes, np.int32), graph.node_offsets()
    for ntype, numbers in nodes.items():
        own = parts[starts[ntype] :]
        for part in range(book.num_parts):
            own[numbers.of_part(part)] = part
    return graph, parts


class _NodeIds(NamedTuple):
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


def _node_ids(book: PartitionBook, ntype: str, scratch: Path, counter: Counter) -> _NodeIds:
    bounds, name = _bounds(book.node_ranges[ntype]), f"{ntype}/{ORIG_ID}"
    total, parts = int(bounds[-1]), range(book.num_parts)
    ids = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    runs: Iterable[tuple[int, int, np.ndarray]] = ()
    if book.is_foreign:
        folder = open_folder(book.json_path)
        runs = ((part, 0, own_ids(folder, ntype, part)) for part in parts)
    elif _is_numbering(lambda part: read_node_features(book, part), parts, name, total, scratch):
        runs = (
            (part, low, rows)
            for part in parts
            for low, rows in _runs(read_node_features(book, part), name)
        )
    else:
        counter.add(total)
    for part, low, own in runs:
        start = int(bounds[part]) + low
        ids[start : start + len(own)] = own
        counter.add(len(own))
    return _NodeIds(ids, bounds)


def _is_numbering(
    store_of: Callable[[int], FeatureStore], parts: range, name: str, total: int, scratch: Path
) -> bool:
    """Whether a column of all parts holds each id below ``total`` once."""
    seen, count = create_array(scratch / "seen.npy", np.bool_, (total,)), 0
    for store in map(store_of, parts):
        dtype, shape = store.info(name) if name in store else (torch.bool, ())
        if len(shape) != 1 or dtype not in (torch.int32, torch.int64):
            return False
        for _, ids in _runs(store, name):
            if len(ids) and not 0 <= ids.min() <= ids.max() < total:
                return False
            seen[ids] = True
            count += len(ids)
    return count == total and _all(seen)


def _all(seen: np.ndarray) -> bool:
    return all(seen[low:high].all() for low, high in blocks(len(seen)))


def _runs(store: FeatureStore, name: str) -> Iterator[tuple[int, np.ndarray]]:
    """First row and rows of a column of integers, a few MB at a time."""
    (dtype, shape), read = store.info(name), store.reader(name)
    for low, high in blocks(shape[0], size=rows_in(dtype.itemsize)):
        yield low, read(low, high).numpy()


class _Columns:
    """The columns of a type, the same in each part, in files that are filled in any order.

    torch's bfloat16, which numpy does not know, lies there as integers.

    Args:
        prefix: of their names in the parts: the type and a slash.
        without: the name of the column that ids were taken from, if it is not one of them.
    """

    def __init__(self, book: PartitionBook, prefix: str, total: int, stem: Path, without: str = ""):
        self._book, self._prefix, self._total, self._stem = book, prefix, total, stem
        self._without = prefix + without
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
        self._files: dict[str, np.ndarray] = {}

    def _path(self, number: int) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{number}.npy")

    def add(self, store: FeatureStore, part: int, ids: np.ndarray, counter: Counter) -> None:
        """A part's rows, and the id of each. Raises ``PartitionError``."""
        prefix, kinds = self._prefix, {}
        for name in store:
            if name.startswith(prefix) and name != self._without:
                dtype, shape = store.info(name)
                kinds[name.removeprefix(prefix)] = dtype, shape[1:]
        if self._kinds is None:
            self._kinds = kinds
            for number, (name, (dtype, shape)) in enumerate(kinds.items()):
                kind = _stored(torch.empty(0, dtype=dtype)).dtype
                self._files[name] = create_array(self._path(number), kind, (self._total, *shape))
        what = f"{self._book.json_path}: part {part} has of {prefix[:-1]!r} the columns {kinds}"
        check(kinds == self._kinds, f"{what}, expected {self._kinds}, as in part 0")
        readers = {name: store.reader(prefix + name) for name in kinds}
        widths = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values()]
        for low, high in blocks(len(ids), counter, rows_in(max([1, *widths]))):
            for name, read in readers.items():
                self._files[name][ids[low:high]] = _stored(read(low, high))

    def tensors(self) -> dict[str, Tensor]:
        """What was put, from the files."""
        self._files, found = {}, {}
        for number, (name, (dtype, _)) in enumerate((self._kinds or {}).items()):
            column = map_tensor(self._path(number))
            found[name] = column.view(dtype) if dtype == torch.bfloat16 else column
        return found


def _stored(rows: Tensor) -> np.ndarray:
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _node_columns(
    book: PartitionBook, nodes: dict[str, _NodeIds], scratch: Path, counter: Counter
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


class _EdgesOfType:
    """Ends of edges in files, int64 [E] each, and their columns."""

    def __init__(self, book: PartitionBook, etype: EType, stem: Path) -> None:
        self.etype, self._book, self._total = etype, book, book.num_edges(etype)
        self._bounds, prefix = _bounds(book.edge_ranges[etype]), ":".join(etype) + "/"
        self._numbers = prefix + ORIG_EID
        self._by_original = book.is_foreign or _is_numbering(
            lambda part: FeatureStore(read_features(book, part, "edge_feats")),
            range(book.num_parts), self._numbers, self._total, stem.parent,
        )  # fmt: skip
        without = ORIG_EID if self._by_original else ""
        self.columns = _Columns(book, prefix, self._total, stem, without)
        self._paths = [stem.with_name(f"{stem.name}-{name}.npy") for name in ("src", "dst")]
        self._src, self._dst = (create_array(one, np.int64, (self._total,)) for one in self._paths)
        seen = stem.with_name(f"{stem.name}-seen.npy")
        self._seen = create_array(seen, np.bool_, (self._total,))

    def add(self, data: PartitionData, nodes: dict[str, _NodeIds], counter: Counter) -> None:
        """The edges that end in a part; they count with their ends, and with their columns."""
        part, shard = data.part_id, data.edges[self.etype]
        ids = np.arange(self._bounds[part], self._bounds[part + 1])
        if self._by_original:
            ids = data.edge_features[self._numbers].numpy().astype(np.int64, copy=False)
            low, high = (ids.min(), ids.max()) if len(ids) else (0, -1)
            what = f"{self._book.json_path}: {ORIG_EID} of {self.etype} spans [{low}, {high}]"
            is_good = low >= 0 and high < self._total
            check(is_good, f"{what} in part {part}, expected [0, {self._total - 1}]")
        sources, dst_ids = nodes[self.etype[0]], nodes[self.etype[2]].of_part(part)
        for source in range(self._book.num_parts):
            src_ids, first = sources.of_part(source), shard.offsets[source]
            for low, high in blocks(shard.offsets[source + 1] - first, counter):
                some = slice(first + low, first + high)
                rows = ids[shard.eid[some].numpy()]
                self._src[rows] = src_ids[shard.src[some].numpy()]
                self._dst[rows] = dst_ids[shard.dst[some].numpy()]
                self._seen[rows] = True
        self.columns.add(data.edge_features, part, ids, counter)

    def ends(self) -> tuple[Tensor, Tensor]:
        """From the files. Raises ``PartitionError`` where an edge is missing."""
        what = f"{self._book.json_path}: an edge of {self.etype} is in two parts"
        check(_all(self._seen), f"{what}, another in none")
        self._src = self._dst = np.empty(0, np.int64)
        src, dst = map(map_tensor, self._paths)
        return src, dst
