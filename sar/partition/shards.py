"""Building shards: the inner edges of a part's graph file, grouped by the part of their source.

The stored graph is streamed twice in chunks, once to count and once to fill, so beyond the int32
arrays that stay it needs one chunk, one byte per inner edge and a few bytes per local node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.book import EType, PartitionBook
from sar.partition.dgl_format import GraphFile
from sar.partition.mapped import MappedTensor

CHUNK_EDGES = 1 << 16
MAX_INT32 = 2**31
MAX_NTYPES = 2**15 - 1


@dataclass
class ShardEdges:
    """Inner edges of one canonical edge type of one part, grouped by the source's part.

    The edges whose source part ``p`` owns are ``[offsets[p] : offsets[p + 1]]``, in ascending
    ``eid``. ``src``: int32 ``[E]``, row of the source inside (source type, part p). ``dst``: int32
    ``[E]``, row inside (destination type, this part). ``eid``: int32 ``[E]``, position among this
    part's inner edges of the type in ascending global id.
    """

    src: Tensor
    dst: Tensor
    eid: Tensor
    offsets: list[int]

    def to(self, device: torch.device | str) -> ShardEdges:
        """The same edges on ``device``."""
        src, dst, eid = self.src.to(device), self.dst.to(device), self.eid.to(device)
        return ShardEdges(src, dst, eid, self.offsets)


@dataclass
class _NodeTable:
    """Type, part and row of every local node: int16, int32 and int32, ``[num_local_nodes]``."""

    type_id: np.ndarray
    part: np.ndarray
    idx: np.ndarray


@dataclass
class _Chunk:
    """Inner edges of one chunk: local source and destination nodes, type ids, and positions
    among the part's inner edges of the type; int64."""

    src: np.ndarray
    dst: np.ndarray
    type_id: np.ndarray
    eid: np.ndarray


def build_shards(book: PartitionBook, part: int, graph: GraphFile) -> dict[EType, ShardEdges]:
    """Shards per canonical edge type from a part's graph file, everything checked against the book.

    Raises PartitionError for ids, flags, types or part ids that contradict the JSON, for edges
    that are missing or doubled, and for a type with 2^31 or more nodes or edges in a part.
    """
    check_int32(book, part)
    _check_columns(graph, book)
    graph.check_pointers(CHUNK_EDGES)
    builder = _ShardBuilder(book, part, graph, _read_nodes(book, part, graph))
    builder.count()
    return builder.fill()


def check_int32(book: PartitionBook, part: int) -> None:
    """Raises PartitionError for more nodes or edges of a type in a part than int32 counts."""
    if len(book.ntypes) > MAX_NTYPES:
        raise PartitionError(
            f"{book.json_path}: has {len(book.ntypes)} node types, expected at most {MAX_NTYPES}"
        )
    for ntype, ranges in book.node_ranges.items():
        largest = int((ranges[:, 1] - ranges[:, 0]).max())
        if largest >= MAX_INT32:
            raise PartitionError(
                f"{book.json_path}: a part owns {largest} nodes of type {ntype!r},"
                f" expected less than {MAX_INT32}: cut it into more parts"
            )
    for etype in book.canonical_etypes:
        count = book.part_edges(etype, part)
        if count >= MAX_INT32:
            raise PartitionError(
                f"{book.json_path}: part {part} owns {count} edges of type "
                f"{etype}, expected less than {MAX_INT32}: cut it into more parts"
            )


def _check_columns(graph: GraphFile, book: PartitionBook) -> None:
    """The columns that DGL's partitioner writes are there, one integer per row."""
    typed = [] if book.is_homogeneous else ["_TYPE"]
    for what, data, names in (
        ("node", graph.node_data, ["_ID", "inner_node", *typed]),
        ("edge", graph.edge_data, ["_ID", "inner_edge", *typed]),
    ):
        for name in names:
            if name not in data:
                raise PartitionError(
                    f"{graph.path}: {what} data has {sorted(data)} but no "
                    f"{name!r}: not a part of a partitioned graph"
                )
        for name in ("_ID", "inner_node", "inner_edge", "_TYPE", "part_id"):
            if name in data and (len(data[name].shape) != 1 or data[name].dtype.is_floating_point):
                raise PartitionError(
                    f"{graph.path}: {what} data {name!r} is {data[name]}, "
                    "expected one integer per row"
                )


def _read_nodes(book: PartitionBook, part: int, graph: GraphFile) -> _NodeTable:
    """Where every local node lives; inner nodes must come first with exactly the JSON's ids."""
    start, end = book.part_ranges[part]
    count = graph.num_nodes
    if count < end - start:
        raise PartitionError(
            f"{graph.path}: has {count} nodes, expected at least the "
            f"{end - start} that {book.json_path} gives part {part}"
        )
    table = _NodeTable(
        np.empty(count, np.int16), np.empty(count, np.int32), np.empty(count, np.int32)
    )
    for low in range(0, count, CHUNK_EDGES):
        high = min(low + CHUNK_EDGES, count)
        nids = _node_ids(book, part, graph, low, high)
        type_id, owner, idx = (one.numpy() for one in book.locate(torch.from_numpy(nids)))
        _compare(graph, graph.node_data, "_TYPE", low, type_id, "node")
        _compare(graph, graph.node_data, "part_id", low, owner, "node")
        table.type_id[low:high], table.part[low:high], table.idx[low:high] = type_id, owner, idx
    return table


def _node_ids(book: PartitionBook, part: int, graph: GraphFile, low: int, high: int) -> np.ndarray:
    """Checked global ids of local nodes ``[low, high)``."""
    start, end = book.part_ranges[part]
    nids = graph.node_data["_ID"].ints(low, high)
    inner = np.arange(low, high) < end - start
    if (graph.node_data["inner_node"].ints(low, high).astype(bool) != inner).any():
        raise PartitionError(
            f"{graph.path}: inner_node does not mark the first {end - start} "
            f"nodes, which {book.json_path} gives part {part}"
        )
    if (nids[inner] != np.arange(low, high)[inner] + start).any():
        raise PartitionError(
            f"{graph.path}: ids of the inner nodes are not {start} to {end - 1}, "
            f"the range of part {part} in {book.json_path}"
        )
    total = book.num_nodes()
    if nids.min() < 0 or nids.max() >= total:
        raise PartitionError(
            f"{graph.path}: node ids run from {nids.min()} to {nids.max()}, "
            f"expected 0 to {total - 1}"
        )
    halo = nids[~inner]
    if ((halo >= start) & (halo < end)).any():
        raise PartitionError(f"{graph.path}: a halo node has an id of part {part} itself")
    return nids


def _compare(
    graph: GraphFile,
    data: dict[str, MappedTensor],
    name: str,
    low: int,
    expected: np.ndarray,
    what: str,
) -> None:
    """A stored column, where there is one, equals what the book's ranges say."""
    if name not in data:
        return
    found = data[name].ints(low, low + len(expected))
    if (found != expected).any():
        row = int(np.flatnonzero(found != expected)[0])
        raise PartitionError(
            f"{graph.path}: {name} of {what} {low + row} is {found[row]}, "
            f"expected {expected[row]} from its id and the JSON's ranges"
        )


class _ShardBuilder:
    """Two passes over the inner edges: `count` sizes the groups, `fill` places the edges."""

    def __init__(self, book: PartitionBook, part: int, graph: GraphFile, nodes: _NodeTable):
        self.book, self.part, self.graph, self.nodes = book, part, graph, nodes
        self.etypes = book.canonical_etypes
        ranges = np.stack([book.edge_ranges[etype][part] for etype in self.etypes])
        # Types follow each other inside a part: these bounds map an edge id to its type.
        self.bounds = np.append(ranges[:, 0], ranges[-1, 1])
        ids = {ntype: i for i, ntype in enumerate(book.ntypes)}
        self.src_types = np.array([ids[etype[0]] for etype in self.etypes])
        self.dst_types = np.array([ids[etype[2]] for etype in self.etypes])
        first, last = book.part_ranges[part]
        self.num_inner = last - first
        self.counts = np.zeros((len(self.etypes), book.num_parts), np.int64)

    def _chunks(self) -> Iterator[_Chunk]:
        """Inner edges, chunk by chunk, with types; drops the edges of other parts."""
        data = self.graph.edge_data
        for src, dst, ids in self.graph.edge_chunks(CHUNK_EDGES):
            keep = data["inner_edge"].take(ids) != 0
            if not keep.all():
                src, dst, ids = src[keep], dst[keep], ids[keep]
            if not len(ids):
                continue
            eids = data["_ID"].take(ids)
            type_id = self._types(eids)
            yield _Chunk(src, dst, type_id, eids - self.bounds[type_id])

    def _types(self, eids: np.ndarray) -> np.ndarray:
        low, high = int(self.bounds[0]), int(self.bounds[-1])
        if eids.min() < low or eids.max() >= high:
            raise PartitionError(
                f"{self.graph.path}: ids of inner edges run from {eids.min()} to {eids.max()}, "
                f"expected {low} to {high - 1}, the range of part {self.part} in "
                f"{self.book.json_path}"
            )
        if len(self.etypes) == 1:
            return np.zeros(len(eids), np.int64)
        return np.searchsorted(self.bounds[:-1], eids, side="right") - 1

    def count(self) -> None:
        """Edges per (type, source part), and every check that an edge needs."""
        low = int(self.bounds[0])
        seen = np.zeros(int(self.bounds[-1]) - low, bool)
        total = 0
        for chunk in self._chunks():
            self._check_chunk(chunk)
            seen[chunk.eid + self.bounds[chunk.type_id] - low] = True
            total += len(chunk.eid)
            key = chunk.type_id * self.book.num_parts + self.nodes.part[chunk.src]
            self.counts += np.bincount(key, minlength=self.counts.size).reshape(self.counts.shape)
        if total != len(seen) or not seen.all():
            raise PartitionError(
                f"{self.graph.path}: has {total} inner edges with {int(seen.sum())} different ids, "
                f"expected the {len(seen)} that {self.book.json_path} gives part {self.part}; a "
                "graph cut without its halo (num_hops=0) must be cut again"
            )
        if "_TYPE" in self.graph.edge_data:
            self._check_stored_types()

    def _check_chunk(self, chunk: _Chunk) -> None:
        if chunk.dst.max() >= self.num_inner:
            raise PartitionError(
                f"{self.graph.path}: an inner edge ends in local node "
                f"{chunk.dst.max()}, expected one of the {self.num_inner} inner "
                "nodes"
            )
        if len(self.book.ntypes) > 1:
            self._check_ends(chunk)

    def _check_ends(self, chunk: _Chunk) -> None:
        """Both ends are of the node types that the edge's type names."""
        for ends, types, what in (
            (chunk.src, self.src_types, "source"),
            (chunk.dst, self.dst_types, "destination"),
        ):
            found, expected = self.nodes.type_id[ends], types[chunk.type_id]
            if (found != expected).any():
                row = int(np.flatnonzero(found != expected)[0])
                raise PartitionError(
                    f"{self.graph.path}: the {what} of an edge of type "
                    f"{self.etypes[chunk.type_id[row]]} has type {self.book.ntypes[found[row]]!r}"
                )

    def _check_stored_types(self) -> None:
        """Stored types of inner edges agree with their ids."""
        data = self.graph.edge_data
        for low in range(0, self.graph.num_edges, CHUNK_EDGES):
            high = min(low + CHUNK_EDGES, self.graph.num_edges)
            inner = data["inner_edge"].ints(low, high) != 0
            stored = data["_TYPE"].ints(low, high)[inner]
            eids = data["_ID"].ints(low, high)[inner]
            if len(eids) and (stored != self._types(eids)).any():
                raise PartitionError(
                    f"{self.graph.path}: _TYPE of an inner edge contradicts the "
                    f"edge ranges of {self.book.json_path}"
                )

    def fill(self) -> dict[EType, ShardEdges]:
        """The shards; chunks are placed in stored order, then groups are sorted where needed."""
        sizes = self.counts.sum(axis=1)
        out = [[np.empty(size, np.int32) for _ in range(3)] for size in sizes]
        offsets = np.zeros((len(self.etypes), self.book.num_parts + 1), np.int64)
        np.cumsum(self.counts, axis=1, out=offsets[:, 1:])
        cursor = offsets[:, :-1].copy()
        try:
            for chunk in self._chunks():
                self._check_chunk(chunk)
                self._place(chunk, out, cursor, offsets[:, 1:])
        except PartitionError as error:  # of what was right before
            raise self._changed() from error
        if not np.array_equal(cursor, offsets[:, 1:]):
            raise self._changed()
        self.graph.file.check_unchanged()
        shards = {}
        for i, etype in enumerate(self.etypes):
            bounds = offsets[i].tolist()
            _sort_groups(out[i], bounds)
            src, dst, eid = (torch.from_numpy(one) for one in out[i])
            shards[etype] = ShardEdges(src, dst, eid, bounds)
        return shards

    def _changed(self) -> PartitionError:
        return PartitionError(f"{self.graph.path}: was changed while it was read")

    def _place(
        self, chunk: _Chunk, out: list[list[np.ndarray]], cursor: np.ndarray, ends: np.ndarray
    ) -> None:
        """Copies a chunk behind what its groups hold already, keeping the stored order."""
        parts = self.book.num_parts
        key = chunk.type_id * parts + self.nodes.part[chunk.src]
        order = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[order], prepend=-1))
        for low, high in zip(starts, np.append(starts[1:], len(key))):
            type_id, owner = divmod(int(key[order[low]]), parts)
            rows = order[low:high]
            at = cursor[type_id, owner]
            if at + len(rows) > ends[type_id, owner]:
                raise self._changed()
            where = slice(at, at + len(rows))
            src, dst, eid = out[type_id]
            src[where] = self.nodes.idx[chunk.src[rows]]
            dst[where] = self.nodes.idx[chunk.dst[rows]]
            eid[where] = chunk.eid[rows]
            cursor[type_id, owner] += len(rows)


def _sort_groups(arrays: list[np.ndarray], bounds: list[int]) -> None:
    """Sorts each group of [src, dst, eid] by eid in place; files in id order need no work."""
    eid = arrays[2]
    for low, high in zip(bounds[:-1], bounds[1:]):
        group = eid[low:high]
        if (group[1:] < group[:-1]).any():
            order = np.argsort(group)  # ids differ, so no stable sort and its workspace is needed
            for one in arrays:
                one[low:high] = one[low:high][order]
