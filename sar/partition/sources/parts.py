"""An existing partitioning as a graph again, so that it can be cut anew or written otherwise.

The rows of each part are put where their original ids say, into mapped files. In memory are the
edges of one part, 20 to 40 bytes each, and 12 bytes for each node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.partition.arrays import ORIG_EID, ORIG_ID, EType, GraphArrays
from sar.partition.book import PartitionBook
from sar.partition.column import check, create_array, map_tensor
from sar.partition.features import FeatureStore
from sar.partition.load import (
    PartitionData,
    load_partition,
    read_book,
    read_features,
    read_node_features,
)
from sar.partition.progress import NOBODY, Counter, Progress, blocks, rows_in, silent


def read_partitions(
    path: str | os.PathLike, scratch: Path, progress: Progress = silent
) -> tuple[GraphArrays, np.ndarray]:
    """The graph whose partitions lie at ``path`` (a JSON, or a folder of PyG's or GraphLearn's),
    and int32 [N] the part of each node, types one after another. Its arrays are maps of files in
    ``scratch``.

    Ids are ``orig_id`` and ``orig_eid``, if the partitions hold each id from 0 on once; else the
    partitioning's own, and a stored column stays. Nodes without an `orig_id` get these.

    Raises ``PartitionError`` for files that are missing, damaged or contradict each other, and
    ``OSError`` that names a file of ``scratch``.
    """
    book = read_book(path)
    num_nodes = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
    total, num_parts = sum(num_nodes.values()), range(book.num_parts)
    counter = Counter(progress, "reading node ids", total)
    nodes = {}
    for number, ntype in enumerate(book.ntypes):
        nodes[ntype] = _Rows(book, ntype, ORIG_ID, scratch / f"node-{number}")
        nodes[ntype].find_numbers(partial(read_node_features, book), counter)
    counter = Counter(progress, "reading node data", total)
    ids: dict[str, list[np.ndarray]] = {ntype: [] for ntype in nodes}  # of each part's rows
    wide = np.int32 if max(num_nodes.values()) < 2**31 else np.int64
    for part in num_parts:
        store = read_node_features(book, part)
        for ntype, rows in nodes.items():
            own = rows.ids(store, part)
            rows.add(store, part, own, counter)
            ids[ntype].append(own.astype(wide))
    etypes = [
        _Edges(book, etype, scratch / f"edge-{number}")
        for number, etype in enumerate(book.canonical_etypes)
    ]
    counter = Counter(progress, "reading edges", 2 * book.num_edges())
    for part in num_parts:
        data = load_partition(book.json_path, part)
        for one in etypes:
            one.add_ends(data, ids, counter)
    graph = GraphArrays(
        book.graph_name,
        num_nodes,
        {one.etype: one.ends() for one in etypes},
        {ntype: rows.tensors() for ntype, rows in nodes.items()},
        {one.etype: one.tensors() for one in etypes},
    )
    graph.with_orig_ids().validate(progress)
    parts, starts = np.empty(graph.total_nodes, np.int32), graph.node_offsets()
    for ntype, owned in ids.items():
        for part, own in enumerate(owned):
            parts[starts[ntype] :][own] = part
    return graph, parts


class _Rows:
    """Nodes or edges of a type: their ids, and their columns (the same in each part), in files that
    are filled in any order. bfloat16, which numpy does not know, lies there as integers. ``kind``
    is the type, as names of features begin; ``number`` the feature of original ids."""

    def __init__(self, book: PartitionBook, kind: str, number: str, stem: Path) -> None:
        ranges = book.node_ranges if number == ORIG_ID else book.edge_ranges
        own: Any = kind if number == ORIG_ID else tuple(kind.split(":"))
        self._book, self._kind, self._number, self._stem = book, kind, f"{kind}/{number}", stem
        self._bounds = np.concatenate(([0], np.cumsum(np.diff(ranges[own])[:, 0])))
        self.total = int(self._bounds[-1])
        self._by_original = False
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
        self._files: dict[str, np.ndarray] = {}

    def path(self, what: object) -> Path:
        return self._stem.with_name(f"{self._stem.name}-{what}.npy")

    def find_numbers(
        self, store_of: Callable[[int], FeatureStore], counter: Counter = NOBODY
    ) -> None:
        """Find out whether all parts together hold each original id below the total once."""
        self._by_original = self._book.is_foreign or self._are_numbered(store_of)
        counter.add(self.total)

    def _are_numbered(self, store_of: Callable[[int], FeatureStore]) -> bool:
        seen, count = create_array(self.path("seen"), np.bool_, (self.total,)), 0
        for store in map(store_of, range(self._book.num_parts)):
            there = self._number in store
            dtype, shape = store.info(self._number) if there else (torch.bool, ())
            if len(shape) != 1 or dtype not in (torch.int32, torch.int64):
                return False
            read = store.reader(self._number)
            for low, high in blocks(shape[0], size=rows_in(dtype.itemsize)):
                ids = read(low, high).numpy()
                if len(ids) and not 0 <= ids.min() <= ids.max() < self.total:
                    return False
                seen[ids] = True
                count += len(ids)
        return count == self.total and _all(seen)

    def ids(self, store: FeatureStore, part: int) -> np.ndarray:
        if not self._by_original:
            return np.arange(self._bounds[part], self._bounds[part + 1])
        ids = store[self._number].numpy()
        low, high = (ids.min(), ids.max()) if len(ids) else (0, -1)
        what = f"{self._book.json_path}: {self._number} spans [{low}, {high}] in part {part}"
        check(low >= 0 and high < self.total, f"{what}, expected [0, {self.total - 1}]")
        return ids

    def add(self, store: FeatureStore, part: int, ids: np.ndarray, counter: Counter) -> None:
        """Write a part's columns. Raises ``PartitionError`` where part 0 has others."""
        prefix, kinds = f"{self._kind}/", {}
        without = self._number if self._by_original and self._number.endswith(ORIG_EID) else ""
        for name in store:
            if name.startswith(prefix) and name != without:
                dtype, shape = store.info(name)
                kinds[name.removeprefix(prefix)] = dtype, shape[1:]
        if self._kinds is None:
            self._kinds = kinds
            for number, (name, (dtype, shape)) in enumerate(kinds.items()):
                kind = _stored(torch.empty(0, dtype=dtype)).dtype
                self._files[name] = create_array(self.path(number), kind, (self.total, *shape))
        what = f"{self._book.json_path}: part {part} has of {self._kind!r} the columns {kinds}"
        check(kinds == self._kinds, f"{what}, expected {self._kinds}, as in part 0")
        readers = {name: store.reader(prefix + name) for name in kinds}
        widths = [math.prod(shape) * dtype.itemsize for dtype, shape in kinds.values()]
        for low, high in blocks(len(ids), counter, rows_in(max([1, *widths]))):
            for name, read in readers.items():
                self._files[name][ids[low:high]] = _stored(read(low, high))

    def tensors(self) -> dict[str, Tensor]:
        self._files, found = {}, {}
        for number, (name, (dtype, _)) in enumerate((self._kinds or {}).items()):
            column = map_tensor(self.path(number))
            found[name] = column.view(dtype) if dtype == torch.bfloat16 else column
        return found


def _stored(rows: Tensor) -> np.ndarray:
    return (rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _all(seen: np.ndarray) -> bool:
    return all(seen[low:high].all() for low, high in blocks(len(seen)))


class _Edges(_Rows):
    """:class:`_Rows` with the ends of the edges in files, int64 [E] each."""

    def __init__(self, book: PartitionBook, etype: EType, stem: Path) -> None:
        super().__init__(book, ":".join(etype), ORIG_EID, stem)
        self.etype = etype
        self.find_numbers(lambda part: FeatureStore(read_features(book, part, "edge_feats")))
        self._src, self._dst = (
            create_array(self.path(name), np.int64, (self.total,)) for name in ("src", "dst")
        )
        self._seen = create_array(self.path("seen"), np.bool_, (self.total,))

    def add_ends(
        self, data: PartitionData, nodes: dict[str, list[np.ndarray]], counter: Counter
    ) -> None:
        """Write the edges that end in a part; they count with their ends and with their columns."""
        part, shard = data.part_id, data.edges[self.etype]
        ids = self.ids(data.edge_features, part)
        dst_ids = nodes[self.etype[2]][part]
        for source, src_ids in enumerate(nodes[self.etype[0]]):
            first = shard.offsets[source]
            for low, high in blocks(shard.offsets[source + 1] - first, counter):
                some = slice(first + low, first + high)
                rows = ids[shard.eid[some].numpy()]
                self._src[rows] = src_ids[shard.src[some].numpy()]
                self._dst[rows] = dst_ids[shard.dst[some].numpy()]
                self._seen[rows] = True
        self.add(data.edge_features, part, ids, counter)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The ends, mapped. Raises ``PartitionError`` where an edge is missing."""
        what = f"{self._book.json_path}: an edge of {self.etype} is in two parts"
        check(_all(self._seen), f"{what}, another in none")
        self._src = self._dst = np.empty(0, np.int64)
        return map_tensor(self.path("src")), map_tensor(self.path("dst"))
