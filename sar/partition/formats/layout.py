"""Where every node and edge of a graph goes when it is cut.

Nodes are ordered by (part, type, original id) and edges by (part of the destination, type, original
id), so each part owns one range of either. What is kept is a part and a new id for each node; of
edges only counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sar.partition.arrays import CanonicalEtype, GraphArrays
from sar.partition.formats.loops import (
    count_each,
    count_parts,
    group_edges,
    group_nodes,
    number_nodes,
)
from sar.partition.progress import BLOCK, Counter, Progress, blocks, silent

COPIED_BYTES = 2 << 20  # in memory at once: fits a cache, and the allocator keeps little of it


@dataclass(frozen=True)
class Layout:
    """Parts and new ids.

    Attributes:
        part_of: per node type, [N] of the smallest unsigned dtype that holds ``num_parts``.
        new_ids: per node type, int32 [N], int64 where 2^31 nodes are not enough.
        node_ranges, edge_ranges: per type, int64 [P, 2], the new ids in each part.
    """

    num_parts: int
    part_of: dict[str, np.ndarray]
    new_ids: dict[str, np.ndarray]
    node_ranges: dict[str, np.ndarray]
    edge_ranges: dict[CanonicalEtype, np.ndarray]

    @property
    def num_nodes(self) -> int:
        """Of all types."""
        return sum(map(len, self.new_ids.values()))

    @property
    def node_spans(self) -> np.ndarray:
        """int64 [P, 2]: the new ids of each part's nodes, types together."""
        return _spans(self.node_ranges, self.num_parts)

    @property
    def edge_spans(self) -> np.ndarray:
        """int64 [P, 2]: the new ids of each part's edges, types together."""
        return _spans(self.edge_ranges, self.num_parts)


def _spans(ranges: dict, num_parts: int) -> np.ndarray:
    if not ranges:
        return np.zeros((num_parts, 2), np.int64)
    columns = list(ranges.values())
    return np.stack([columns[0][:, 0], columns[-1][:, 1]], axis=1)


def lay_out(
    graph: GraphArrays, parts: np.ndarray, num_parts: int, progress: Progress = silent
) -> Layout:
    """Of a valid graph and int [N] parts of its nodes, types one after another."""
    starts, dtype = graph.node_offsets(), smallest(num_parts)
    part_of = {
        t: parts[starts[t] : starts[t] + n].astype(dtype) for t, n in graph.num_nodes.items()
    }
    counts = [count(own, num_parts) for own in part_of.values()]
    node_ranges = dict(zip(part_of, _ranges(counts, num_parts), strict=True))
    wide = np.int32 if graph.total_nodes < 2**31 else np.int64
    new_ids = {}
    for ntype, own in part_of.items():
        new_ids[ntype] = np.empty(len(own), wide)
        number_nodes(own, node_ranges[ntype][:, 0].copy(), new_ids[ntype])
    counts = _count_edges(graph, part_of, num_parts, progress)
    edge_ranges = dict(zip(graph.edges, _ranges(counts, num_parts), strict=True))
    return Layout(num_parts, part_of, new_ids, node_ranges, edge_ranges)


def smallest(num_parts: int) -> np.dtype:
    """The unsigned dtype of parts."""
    return np.min_scalar_type(num_parts - 1)


def count(parts: np.ndarray, num_parts: int) -> np.ndarray:
    """int64 [P]: how often each part comes; numpy's ``bincount`` copies them to int64."""
    found = np.zeros(num_parts, np.int64)
    count_each(parts, found)
    return found


def _count_edges(
    graph: GraphArrays, part_of: dict[str, np.ndarray], num_parts: int, progress: Progress
) -> list[np.ndarray]:
    """Per type, int64 [P]: the edges that end in each part."""
    found, counter = [], Counter(progress, "counting edges", graph.total_edges)
    for etype, (_, dst) in graph.edges.items():
        counts = np.zeros(num_parts, np.int64)
        for low, high in blocks(len(dst), counter):
            count_parts(np.ascontiguousarray(dst[low:high]), part_of[etype[2]], counts)
        found.append(counts)
    return found


def _ranges(counts: list[np.ndarray], num_parts: int) -> Iterator[np.ndarray]:
    """Per type int64 [P, 2], of the counts [P] of each type, in the order (part, type)."""
    table = np.array(counts, np.int64).reshape(len(counts), num_parts).T
    ends = table.ravel().cumsum().reshape(table.shape)
    for column in range(len(counts)):
        yield np.stack([ends[:, column] - table[:, column], ends[:, column]], axis=1)


@dataclass
class Group:
    """Rows [low, high) of a type, part after part.

    Attributes:
        bounds: list [P + 1], where each part's rows begin and the last end.
        order: int32 [n], positions from ``low`` on.
        src, dst: int64 [n], of edges: new ids of sources, and rows of destinations in their part.
    """

    low: int
    high: int
    bounds: list[int]
    order: np.ndarray
    src: np.ndarray
    dst: np.ndarray

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Parts that have rows here, and where."""
        for part, (begin, end) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            if begin < end:
                yield part, slice(begin, end)


_NONE = np.empty(0, np.int64)


def node_groups(layout: Layout, ntype: str, counter: Counter) -> Iterator[Group]:
    """The nodes of a type, block after block. The arrays of one are those of the next."""
    parts = layout.part_of[ntype]
    order = np.empty(min(BLOCK, len(parts)), np.int32)
    for low, high in blocks(len(parts), counter):
        bounds = _bounds(count(parts[low:high], layout.num_parts))
        group_nodes(parts[low:high], bounds[:-1].copy(), order)
        yield Group(low, high, bounds.tolist(), order, _NONE, _NONE)


def edge_groups(
    graph: GraphArrays, layout: Layout, etype: CanonicalEtype, counter: Counter
) -> Iterator[Group]:
    """The edges of a type, block after block. The arrays of one are those of the next."""
    src, dst = (ids.detach() for ids in graph.edges[etype])
    part_of, first = layout.part_of[etype[2]], layout.node_spans[:, 0].copy()
    src_ids, dst_ids = layout.new_ids[etype[0]], layout.new_ids[etype[2]]
    size = min(BLOCK, len(src))
    order, ends = np.empty(size, np.int32), np.empty((2, size), np.int64)
    for low, high in blocks(len(src), counter):
        own = [np.ascontiguousarray(ids[low:high]) for ids in (src, dst)]
        counts = np.zeros(layout.num_parts, np.int64)
        count_parts(own[1], part_of, counts)
        bounds = _bounds(counts)
        group_edges(
            *own, part_of, src_ids, dst_ids, first, bounds[:-1].copy(), ends[0], ends[1], order
        )
        yield Group(low, high, bounds.tolist(), order, ends[0], ends[1])


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], counts.cumsum()))
