"""Shards: the inner edges of a part, grouped by the part of their source.

A part's graph file is streamed in chunks, and each edge goes where its id says. Beside the int32
arrays that stay this needs one chunk, 14 bytes for each inner edge and 10 for each local node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import EType
from sar.partition.book import PartitionBook
from sar.partition.column import MappedColumn
from sar.partition.dgl_format import GraphFile
from sar.partition.progress import blocks

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
        src, dst, eid = self.src.to(device), self.dst.to(device), self.eid.to(device)
        return ShardEdges(src, dst, eid, self.offsets)


def next_places(
    runs: Iterable[tuple[int, np.ndarray]], at: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For runs ``(first position, parts)`` of items: positions of a run's items, by part, and for
    each the next free place in its part. int64 [P] ``at`` has the first places and moves on."""
    for low, parts in runs:
        sizes = np.bincount(parts, minlength=len(at))
        first = at - (sizes.cumsum() - sizes)
        yield low + np.argsort(parts, kind="stable"), np.arange(len(parts)) + first.repeat(sizes)
        at += sizes


def group_by_source(ends: np.ndarray, owner: np.ndarray, num_parts: int) -> ShardEdges:
    """Group edges in ascending id: int32 [2, E] ``ends`` are their rows, int [E] ``owner`` the
    parts of their sources."""
    runs = [(low, owner[low:high]) for low, high in blocks(len(owner), size=CHUNK_EDGES)]
    counts = sum((np.bincount(run, minlength=num_parts) for _, run in runs), np.zeros(num_parts))
    offsets = [0, *np.cumsum(counts, dtype=np.int64).tolist()]
    order = torch.empty(len(owner), dtype=torch.int32)
    for positions, places in next_places(runs, np.array(offsets[:-1])):
        order.numpy()[places] = positions
    src, dst = (torch.from_numpy(one).index_select(0, order) for one in ends)
    return ShardEdges(src, dst, order, offsets)


def check_int32(book: PartitionBook, part: int) -> None:
    """Raise PartitionError for more nodes or edges of a type in a part than int32 counts."""
    if len(book.ntypes) > MAX_NTYPES:
        raise PartitionError(
            f"{book.json_path}: has {len(book.ntypes)} node types, expected at most {MAX_NTYPES}"
        )
    most = {ntype: int(np.diff(ranges).max()) for ntype, ranges in book.node_ranges.items()}
    owned = [("a part", count, f"nodes of type {ntype!r}") for ntype, count in most.items()]
    for etype in book.canonical_etypes:
        owned.append((f"part {part}", book.part_edges(etype, part), f"edges of type {etype}"))
    for who, count, what in owned:
        if count >= MAX_INT32:
            raise PartitionError(
                f"{book.json_path}: {who} owns {count} {what}, expected less than {MAX_INT32}: "
                "cut it into more parts"
            )


def build_shards(book: PartitionBook, part: int, graph: GraphFile) -> dict[EType, ShardEdges]:
    """Shards per canonical edge type from a part's graph file, everything checked against the book.

    Raises PartitionError for ids, flags, types or part ids that contradict the JSON, for edges that
    are missing or doubled, and for a type with 2^31 or more nodes or edges in a part.
    """
    check_int32(book, part)
    _check_columns(graph, book)
    graph.check_pointers(CHUNK_EDGES)
    try:
        return _PartReader(book, part, graph).shards()
    except PartitionError:
        graph.file.check_unchanged()  # what was right before may be wrong now
        raise


def _check_columns(graph: GraphFile, book: PartitionBook) -> None:
    """Check that the columns of DGL's partitioner are there, one integer per row."""
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


class _PartReader:
    """One part's graph file, compared with the book as it is read."""

    def __init__(self, book: PartitionBook, part: int, graph: GraphFile) -> None:
        self.book, self.part, self.graph, self.etypes = book, part, graph, book.canonical_etypes
        ranges = np.stack([book.edge_ranges[etype][part] for etype in self.etypes])
        # Types follow each other inside a part: these bounds map an edge id to its type.
        self.bounds = np.append(ranges[:, 0], ranges[-1, 1])
        types = [[book.ntypes.index(etype[side]) for etype in self.etypes] for side in (0, 2)]
        self.end_types = {0: np.array(types[0]), 2: np.array(types[1])}
        self.start, end = book.part_ranges[part]
        self.num_inner = end - self.start
        # Of every local node.
        dtypes = np.int16, np.int32, np.int32
        self.type_id, self.owner, self.row = (np.empty(graph.num_nodes, one) for one in dtypes)
        self._read_nodes()

    def _error(self, text: str) -> PartitionError:
        return PartitionError(f"{self.graph.path}: {text}")

    def _read_nodes(self) -> None:
        """Fill type, part and row of local nodes; inner nodes come first, with the JSON's ids."""
        count = self.graph.num_nodes
        if count < self.num_inner:
            raise self._error(
                f"has {count} nodes, expected at least the {self.num_inner} that "
                f"{self.book.json_path} gives part {self.part}"
            )
        for low, high in blocks(count, size=CHUNK_EDGES):
            ids = torch.from_numpy(self._node_ids(low, high))
            found = [one.numpy() for one in self.book.locate(ids)]
            for name, expected in zip(("_TYPE", "part_id"), found):
                self._compare(name, low, expected)
            for column, values in zip((self.type_id, self.owner, self.row), found):
                column[low:high] = values

    def _node_ids(self, low: int, high: int) -> np.ndarray:
        """Checked global ids of local nodes ``[low, high)``."""
        data, start, end = self.graph.node_data, self.start, self.start + self.num_inner
        nids, inner = data["_ID"].ints(low, high), np.arange(low, high) < self.num_inner
        if (data["inner_node"].ints(low, high).astype(bool) != inner).any():
            raise self._error(
                f"inner_node does not mark the first {self.num_inner} nodes, which "
                f"{self.book.json_path} gives part {self.part}"
            )
        if (nids[inner] != np.arange(low, high)[inner] + start).any():
            raise self._error(
                f"ids of the inner nodes are not {start} to {end - 1}, the range of part "
                f"{self.part} in {self.book.json_path}"
            )
        total = self.book.num_nodes()
        if nids.min() < 0 or nids.max() >= total:
            raise self._error(
                f"node ids run from {nids.min()} to {nids.max()}, expected 0 to {total - 1}"
            )
        halo = nids[~inner]
        if ((halo >= start) & (halo < end)).any():
            raise self._error(f"a halo node has an id of part {self.part} itself")
        return nids

    def _compare(self, name: str, low: int, expected: np.ndarray) -> None:
        """Check a stored column of nodes, where there is one, against the book's ranges."""
        column: MappedColumn | None = self.graph.node_data.get(name)
        if column is None:
            return
        found = column.ints(low, low + len(expected))
        if (found != expected).any():
            row = int(np.flatnonzero(found != expected)[0])
            raise self._error(
                f"{name} of node {low + row} is {found[row]}, "
                f"expected {expected[row]} from its id and the JSON's ranges"
            )

    def shards(self) -> dict[EType, ShardEdges]:
        """Place edges by ascending id, then group each type's."""
        low, count = int(self.bounds[0]), int(self.bounds[-1] - self.bounds[0])
        ends = np.empty((2, count), np.int32)
        # The fewer its bits, the faster parts are sorted.
        owner = np.full(count, -1, np.min_scalar_type(-max(2, self.book.num_parts)))
        total = 0
        for src, dst, eids in self._inner_edges():
            at = eids - low
            ends[0, at], ends[1, at] = self.row[src], self.row[dst]
            owner[at] = self.owner[src]
            total += len(at)
        seen = int((owner >= 0).sum())
        if total != count or seen != count:
            raise self._error(
                f"has {total} inner edges with {seen} different ids, expected the {count} that "
                f"{self.book.json_path} gives part {self.part}; a graph cut without its halo "
                "(num_hops=0) must be cut again"
            )
        self._check_stored_types()
        self.graph.file.check_unchanged()
        found = {}
        for etype, first, last in zip(self.etypes, self.bounds[:-1] - low, self.bounds[1:] - low):
            own = slice(first, last)
            found[etype] = group_by_source(ends[:, own], owner[own], self.book.num_parts)
        return found

    def _inner_edges(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Local sources and destinations and global ids of inner edges, checked, chunk by chunk."""
        data = self.graph.edge_data
        for src, dst, ids in self.graph.edge_chunks(CHUNK_EDGES):
            keep = data["inner_edge"].ints_at(ids) != 0
            if not keep.all():
                src, dst, ids = src[keep], dst[keep], ids[keep]
            if not len(ids):
                continue
            eids = data["_ID"].ints_at(ids)
            type_id = self._types(eids)
            if dst.max() >= self.num_inner:
                raise self._error(
                    f"an inner edge ends in local node {dst.max()}, expected one of the "
                    f"{self.num_inner} inner nodes"
                )
            for what, ends, side in (("source", src, 0), ("destination", dst, 2)):
                wrong = np.flatnonzero(self.type_id[ends] != self.end_types[side][type_id])
                if len(wrong):
                    row = int(wrong[0])
                    raise self._error(
                        f"the {what} of an edge of type {self.etypes[type_id[row]]} has type "
                        f"{self.book.ntypes[self.type_id[ends[row]]]!r}"
                    )
            yield src, dst, eids

    def _types(self, eids: np.ndarray) -> np.ndarray:
        low, high = int(self.bounds[0]), int(self.bounds[-1])
        if eids.min() < low or eids.max() >= high:
            raise self._error(
                f"ids of inner edges run from {eids.min()} to {eids.max()}, expected {low} to "
                f"{high - 1}, the range of part {self.part} in {self.book.json_path}"
            )
        return np.searchsorted(self.bounds[:-1], eids, side="right") - 1

    def _check_stored_types(self) -> None:
        data = self.graph.edge_data
        if "_TYPE" not in data:
            return
        for low, high in blocks(self.graph.num_edges, size=CHUNK_EDGES):
            inner = data["inner_edge"].ints(low, high) != 0
            stored, eids = (data[name].ints(low, high)[inner] for name in ("_TYPE", "_ID"))
            if len(eids) and (stored != self._types(eids)).any():
                raise self._error(
                    f"_TYPE of an inner edge contradicts the edge ranges of {self.book.json_path}"
                )
