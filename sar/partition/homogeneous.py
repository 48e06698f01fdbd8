"""A part of a graph of several types as one of a single type, for layers that are told types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from sar import expect
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, ORIG_EID, ORIG_ID
from sar.partition.book import PartitionBook
from sar.partition.column import Column, check
from sar.partition.features import FeatureStore
from sar.partition.load import TYPE_KEY, PartitionData
from sar.partition.shards import MAX_INT32, ShardEdges


def to_homogeneous(partition_data: PartitionData) -> PartitionData:
    """The part with all node types as one and all edge types as one; local, no communication.

    What ``dgl.to_homogeneous`` gives, cut: rows are sorted by type, global ids stay as they are.
    ``node_features["_N/_TYPE"]`` and ``edge_features["_N:_E:_N/_TYPE"]`` are the int64 type ids.
    ``orig_id`` and ``orig_eid`` number the types one behind the other. Of the other features those
    are kept that all types have in one dtype and width; they are read when asked for.

    Raises:
        TypeError: not what :func:`sar.load_partition_data` returns.
        PartitionError: a part has 2^31 nodes or edges or more.
    """
    expected = "load_partition_data's result"
    data = expect.instance(partition_data, "partition_data", PartitionData, expected)
    book = _joint_book(data.book)
    joined = {"nodes": book.node_ranges[NTYPE_HOMO], "edges": book.edge_ranges[ETYPE_HOMO]}
    for what, ranges in joined.items():
        largest = int((ranges[:, 1] - ranges[:, 0]).max())
        text = f"a part owns {largest} {what} of all types, expected less than {MAX_INT32}"
        check(largest < MAX_INT32, f"{book.json_path}: {text}: cut it into more parts")
    ntypes = {ntype: data.num_nodes(ntype) for ntype in data.book.ntypes}
    etypes = {":".join(etype): data.num_edges(etype) for etype in data.book.canonical_etypes}
    joint = ":".join(ETYPE_HOMO)
    nodes = _joint_features(data.node_features, ntypes, NTYPE_HOMO)
    edges = _joint_features(data.edge_features, etypes, joint)
    nodes.synthesize(TYPE_KEY, lambda: data.node_features[TYPE_KEY])
    for store, name, keys, types in (
        (nodes, f"{NTYPE_HOMO}/{ORIG_ID}", data.keys.nodes, data.book.ntypes),
        (edges, f"{joint}/{ORIG_EID}", data.keys.edges, data.book.canonical_etypes),
    ):
        if name in store:
            store.synthesize(name, partial(_numbers, keys, types))
    shards = {ETYPE_HOMO: _joint_edges(data)}
    return PartitionData(book, data.part_id, shards, nodes, edges, data.device)


def _numbers(read: Callable[..., Tensor], types: Sequence) -> Tensor:
    return torch.cat([read(one).long() for one in types])


def _joint_book(book: PartitionBook) -> PartitionBook:
    tables = [book.edge_ranges[etype] for etype in book.canonical_etypes]
    edges = np.stack([tables[0][:, 0], tables[-1][:, 1]], axis=1)
    return replace(
        book,
        ntypes=[NTYPE_HOMO],
        canonical_etypes=[ETYPE_HOMO],
        node_ranges={NTYPE_HOMO: np.asarray(book.part_ranges, dtype=np.int64)},
        edge_ranges={ETYPE_HOMO: edges},
    )


def _joint_edges(data: PartitionData) -> ShardEdges:
    """Edges grouped by the source's part, then by type, then by ascending position."""
    book, part = data.book, data.part_id
    edge_start = int(book.edge_ranges[book.canonical_etypes[0]][part, 0])
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    offsets = [0]
    for peer in range(book.num_parts):
        for etype in book.canonical_etypes:
            shard = data.edges[etype]
            span = slice(shard.offsets[peer], shard.offsets[peer + 1])
            src = shard.src[span] + _start(book, etype[0], peer)
            dst = shard.dst[span] + _start(book, etype[2], part)
            eid = shard.eid[span] + (int(book.edge_ranges[etype][part, 0]) - edge_start)
            rows.append((src, dst, eid))
        offsets.append(sum(len(one[0]) for one in rows))
    src, dst, eid = (torch.cat(column) for column in zip(*rows, strict=True))
    return ShardEdges(src, dst, eid, offsets)


def _start(book: PartitionBook, ntype: str, part: int) -> int:
    """First row of a type among all rows of a part."""
    return int(book.node_ranges[ntype][part, 0]) - book.part_ranges[part][0]


def _joint_features(store: FeatureStore, counts: dict[str, int], joint: str) -> FeatureStore:
    """Features that all types with rows share in dtype and width, and the type of each row."""
    found = FeatureStore()
    features = [key.rpartition("/")[2] for key in store if "/" in key]
    for feature in dict.fromkeys(features):
        keys = [f"{kind}/{feature}" for kind, count in counts.items() if count]
        empty = [f"{kind}/{feature}" for kind, count in counts.items() if not count]
        keys += [key for key in empty if key in store]
        if all(key in store for key in keys) and len({_kind(store, key) for key in keys}) == 1:
            found.map(f"{joint}/{feature}", _Joined(store, keys))
    sizes = torch.tensor(list(counts.values()))
    types = torch.arange(len(sizes))
    found.synthesize(f"{joint}/{TYPE_KEY}", lambda: types.repeat_interleave(sizes))
    return found


class _Joined(Column):
    """One feature of several types, one behind the other."""

    def __init__(self, store: FeatureStore, keys: list[str]) -> None:
        self._store, self._keys = store, keys
        self._sizes = [store.info(key)[1][0] for key in keys]
        self.dtype, width = _kind(store, keys[0])
        self.shape = (sum(self._sizes), *width)

    def read(
        self, start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        stop, dtype = len(self) if stop is None else stop, dtype or self.dtype
        parts, first = [self._store.rows(self._keys[0], 0, 0).to(dtype)], 0
        for key, size in zip(self._keys, self._sizes, strict=True):
            low, high = max(start - first, 0), min(stop - first, size)
            if low < high:
                parts.append(self._store.rows(key, low, high).to(dtype))
            first += size
        return torch.cat(parts)


def _kind(store: FeatureStore, key: str) -> tuple:
    dtype, shape = store.info(key)
    return dtype, shape[1:]
