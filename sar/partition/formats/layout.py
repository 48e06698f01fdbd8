"""Where every node and edge of a graph goes when it is cut, and the loops that put them there.

Nodes are ordered by (part, type, original id) and edges by (part of the destination, type, original
id), so each part owns one range of either. Kept are a part and a new id for each node, and counts
of edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sar.partition.arrays import EType, GraphArrays
from sar.partition.book import ranges_of
from sar.partition.compiled import compiled, inlined
from sar.partition.progress import BLOCK, Counter, Progress, blocks, silent

WORD = 64  # bits of an element of a bitmap
_ONE, _SIX, _LOW = np.uint64(1), np.uint64(6), np.uint64(WORD - 1)
COPIED_BYTES = 2 << 20  # in memory at once: fits a cache, and the allocator keeps little of it


@dataclass(frozen=True)
class Layout:
    """Parts and new ids of all nodes, and the ranges of new ids that each part owns.

    ``part_of``: per node type, [N] of the smallest unsigned dtype that holds ``num_parts``.
    ``new_ids``: per node type, int32 [N], int64 where 2^31 nodes are not enough. ``node_ranges``,
    ``edge_ranges``: per type, int64 [P, 2].
    """

    num_parts: int
    part_of: dict[str, np.ndarray]
    new_ids: dict[str, np.ndarray]
    node_ranges: dict[str, np.ndarray]
    edge_ranges: dict[EType, np.ndarray]

    @property
    def num_nodes(self) -> int:
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
    columns = list(ranges.values()) or [np.zeros((num_parts, 2), np.int64)]
    return np.stack([columns[0][:, 0], columns[-1][:, 1]], axis=1)


def lay_out(
    graph: GraphArrays, parts: np.ndarray, num_parts: int, progress: Progress = silent
) -> Layout:
    """The layout of a valid graph and int [N] parts of its nodes, types one after another."""
    part_of = parts_by_type(graph, parts, num_parts)
    counts = np.zeros((len(part_of), num_parts), np.int64)
    for own, found in zip(part_of.values(), counts, strict=True):
        count_each(own, found)
    node_ranges = dict(zip(part_of, ranges_of(counts.T), strict=True))
    wide = np.int32 if graph.total_nodes < 2**31 else np.int64
    new_ids = {}
    for ntype, own in part_of.items():
        new_ids[ntype] = np.empty(len(own), wide)
        number_nodes(own, node_ranges[ntype][:, 0].copy(), new_ids[ntype])
    counter = Counter(progress, "counting edges", graph.total_edges)
    counts = np.zeros((len(graph.edges), num_parts), np.int64)
    row_of = dict(zip(graph.edges, counts, strict=True))
    for etype, _, _, dst in graph.edge_blocks(counter):
        count_parts(dst, part_of[etype[2]], row_of[etype])
    edge_ranges = dict(zip(graph.edges, ranges_of(counts.T), strict=True))
    return Layout(num_parts, part_of, new_ids, node_ranges, edge_ranges)


def parts_by_type(graph: GraphArrays, parts: np.ndarray, num_parts: int) -> dict[str, np.ndarray]:
    """[N] per node type, of the smallest unsigned dtype that holds ``num_parts``."""
    dtype, firsts = np.min_scalar_type(num_parts - 1), graph.node_offsets()
    return {t: parts[firsts[t] : firsts[t] + n].astype(dtype) for t, n in graph.num_nodes.items()}


@dataclass
class Group:
    """Rows [low, high) of a type, part after part, which begin at ``bounds`` [P + 1]. ``order``,
    int32 [n], has positions from ``low`` on; of edges ``src`` and ``dst``, int64 [n], are new ids
    of sources, and rows of destinations in their part."""

    low: int
    high: int
    bounds: list[int]
    order: np.ndarray
    src: np.ndarray
    dst: np.ndarray

    def parts(self) -> Iterator[tuple[int, slice]]:
        for part, (begin, end) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            if begin < end:
                yield part, slice(begin, end)


_NONE = np.empty(0, np.int64)


def node_groups(layout: Layout, ntype: str, counter: Counter) -> Iterator[Group]:
    """The nodes of a type, block after block; each block's arrays are reused for the next."""
    parts = layout.part_of[ntype]
    order = np.empty(min(BLOCK, len(parts)), np.int32)
    for low, high in blocks(len(parts), counter):
        bounds = order_by_part(parts[low:high], layout.num_parts, order)
        yield Group(low, high, bounds.tolist(), order, _NONE, _NONE)


def order_by_part(parts: np.ndarray, num_parts: int, order: np.ndarray) -> np.ndarray:
    """Fill int32 [n] ``order`` with rows by part; returns int64 [P + 1] bounds of the parts."""
    counts = np.zeros(num_parts, np.int64)
    count_each(parts, counts)
    bounds = _bounds(counts)
    group_nodes(parts, bounds[:-1].copy(), order)
    return bounds


def edge_groups(
    graph: GraphArrays, layout: Layout, etype: EType, counter: Counter
) -> Iterator[Group]:
    """The edges of a type, block after block; each block's arrays are reused for the next."""
    part_of, first = layout.part_of[etype[2]], layout.node_spans[:, 0].copy()
    src_ids, dst_ids = layout.new_ids[etype[0]], layout.new_ids[etype[2]]
    one = GraphArrays(graph.name, graph.num_nodes, {etype: graph.edges[etype]})
    size = min(BLOCK, one.total_edges)
    order, ends = np.empty(size, np.int32), np.empty((2, size), np.int64)
    for _, low, src, dst in one.edge_blocks(counter):
        counts = np.zeros(layout.num_parts, np.int64)
        count_parts(dst, part_of, counts)
        bounds = _bounds(counts)
        group_edges(src, dst, part_of, src_ids, dst_ids, first, bounds[:-1].copy(), *ends, order)
        yield Group(low, low + len(src), bounds.tolist(), order, ends[0], ends[1])


def _bounds(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], counts.cumsum()))


@compiled
def number_nodes(parts, following, new_ids):
    """Give each node the next id of its part: int64 [P] ``following``, which moves on."""
    for i in range(len(parts)):
        new_ids[i] = following[parts[i]]
        following[parts[i]] += 1


@compiled
def count_each(parts, counts):
    """Add to int64 [P] ``counts`` how often each part comes; numpy's copies them to int64."""
    for i in range(len(parts)):
        counts[parts[i]] += 1


@compiled
def count_parts(ids, part_of, counts):
    """Add to int64 [P] ``counts`` the part of each of ``ids``."""
    for i in range(len(ids)):
        counts[part_of[ids[i]]] += 1


@compiled
def group_nodes(parts, at, order):
    """Fill int32 [n] ``order`` with rows part after part, ascending inside each. int64 [P] ``at``
    has where each part's begin, and moves on."""
    for i in range(len(parts)):
        place = at[parts[i]]
        at[parts[i]] = place + 1
        order[place] = i


@compiled
def group_edges(
    src, dst, part_of, src_ids, dst_ids, first, at,
    out_src, out_dst, order,
):  # fmt: skip
    """Put edges [e], by the part of their destination and in their order inside each part, into the
    arrays of a :class:`Group`. ``first``, int64 [P], has the first node of each part; ``at`` is as
    in :func:`group_nodes`."""
    for e in range(len(src)):
        node = dst[e]
        part = part_of[node]
        place = at[part]
        at[part] = place + 1
        out_src[place] = src_ids[src[e]]
        out_dst[place] = dst_ids[node] - first[part]
        order[place] = e


@compiled
def mark_remote(ids, start: int, stop: int, bitmap):
    """Set the bits of ids outside [start, stop)."""
    for i in range(len(ids)):
        one = ids[i]
        if one < start or one >= stop:
            bit = np.uint64(one)
            bitmap[bit >> _SIX] |= _ONE << (bit & _LOW)


@inlined
def _ones(word):
    """The number of set bits; LLVM makes one instruction of it."""
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + (
        (word >> np.uint64(2)) & np.uint64(0x3333333333333333)
    )
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return (word * np.uint64(0x0101010101010101)) >> np.uint64(56)


@compiled
def count_before(bitmap, before):
    """Fill int64 [words + 1] with the number of set bits before each word, and of all."""
    total = np.int64(0)
    for i in range(len(bitmap)):
        before[i] = total
        total += np.int64(_ones(bitmap[i]))
    before[len(bitmap)] = total


@compiled
def make_local(ids, start: int, stop: int, bitmap, before):
    """Replace ids in place by local ones: inner nodes from 0, then those in the bitmap."""
    for i in range(len(ids)):
        one = ids[i]
        if start <= one < stop:
            ids[i] = one - start
        else:
            bit = np.uint64(one)
            below = bitmap[bit >> _SIX] & ((_ONE << (bit & _LOW)) - _ONE)
            ids[i] = stop - start + before[bit >> _SIX] + np.int64(_ones(below))


@compiled
def list_bits(words, first: int, out):
    """Fill int64 [n] with the set bits, ascending, counted from ``first``."""
    at = 0
    for i in range(len(words)):
        word, bit = words[i], first + i * WORD
        while word:
            if word & _ONE:
                out[at] = bit
                at += 1
            word >>= _ONE
            bit += 1
