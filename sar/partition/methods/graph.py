"""The graph for methods of cutting: undirected, no loops or multi-edges, mapped from files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from sar.partition.arrays import GraphArrays
from sar.partition.buckets import Rows, count_ids, sort_rows
from sar.partition.compiled import compiled, mix
from sar.partition.progress import BLOCK, Counter, Progress, silent

MAX_NODES, MAX_TYPES = 2**31 - 1, 2**15


@dataclass(frozen=True)
class CutGraph:
    """All node types in one id space, one type after another, and what a part bears for a node.

    ``rows`` are the neighbors of each node, ascending; ``types`` int16 [N]; ``in_edges`` int32 [N],
    of the directed graph; ``train`` bool [N], or ``None`` where no node type has a ``train_mask``.
    """

    rows: Rows
    types: np.ndarray
    in_edges: np.ndarray
    train: np.ndarray | None

    @property
    def num_nodes(self) -> int:
        return len(self.types)


def cut_graph(graph: GraphArrays, folder: Path, progress: Progress = silent) -> CutGraph:
    """``graph`` for a method; its rows come to lie in ``folder``. Raises ``ValueError`` for 2^31
    nodes and more, or more than 2^15 types of them."""
    if graph.total_nodes > MAX_NODES:
        raise ValueError(
            f"graph of {graph.total_nodes:,} nodes: a cut numbers nodes in 32 bits, expected at "
            f"most {MAX_NODES:,}"
        )
    counts = list(graph.num_nodes.values())
    if len(counts) > MAX_TYPES:
        raise ValueError(f"graph has {len(counts):,} node types, a cut takes at most {MAX_TYPES:,}")
    types = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    in_edges = _in_edges(graph, progress)
    total = graph.total_edges
    turns = not _is_symmetric(graph, Counter(progress, "comparing directions", total))
    rows = sort_rows(
        lambda what: _pairs(graph, turns, Counter(progress, what, total)),
        graph.total_nodes,
        folder,
        progress,
    )
    return CutGraph(rows, types, in_edges, train_nodes(graph))


def _in_edges(graph: GraphArrays, progress: Progress) -> np.ndarray:
    found, offsets = np.zeros(graph.total_nodes, np.int32), graph.node_offsets()
    counter = Counter(progress, "counting in-edges", graph.total_edges)
    for etype, _, _, dst in graph.edge_blocks(counter):
        count_ids(dst, offsets[etype[2]], found)
    return found


def _pairs(
    graph: GraphArrays, turns: bool, counter: Counter
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ends of every edge but loops, int32 ids over all types; with ``turns`` also turned."""
    offsets, ends = graph.node_offsets(), np.empty((2, BLOCK), np.int32)
    for etype, _, src, dst in graph.edge_blocks(counter):
        kept = _shift(src, dst, offsets[etype[0]], offsets[etype[2]], *ends)
        first, second = ends[:, :kept]
        yield second, first
        if turns:
            yield first, second


def _is_symmetric(graph: GraphArrays, counter: Counter) -> bool:
    """Whether every edge comes as often in the other direction.

    Told by sums of hashes of the edges that go up and of those that go down, 128 bits: chance is no
    concern, and a mistake would make the cut worse, not wrong.
    """
    sums = np.zeros(4, np.uint64)
    for first, second in _pairs(graph, False, counter):
        _add_hashes(first, second, sums)
    return bool((sums[:2] == sums[2:]).all())


def train_nodes(graph: GraphArrays) -> np.ndarray | None:
    """bool [N] of all types, or ``None`` where no type has a ``train_mask``."""
    masks = [graph.node_data.get(ntype, {}).get("train_mask") for ntype in graph.num_nodes]
    if all(mask is None for mask in masks):
        return None
    sizes = graph.num_nodes.values()
    return np.concatenate(
        [np.zeros(n, bool) if mask is None else marked(mask) for n, mask in zip(sizes, masks)]
    )


def marked(mask: Tensor) -> np.ndarray:
    """bool [N]: rows of a mask [N, ..] that have anything in them."""
    rows = mask.numpy().reshape(len(mask), math.prod(mask.shape[1:]))
    return np.asarray(rows.any(axis=1))


@compiled
def _shift(src, dst, src_offset, dst_offset, first, second):
    kept = 0
    for i in range(len(src)):
        u, v = src[i] + src_offset, dst[i] + dst_offset
        if u != v:
            first[kept] = u
            second[kept] = v
            kept += 1
    return kept


@compiled
def _add_hashes(first, second, sums):
    for i in range(len(first)):
        u, v = np.uint64(first[i]), np.uint64(second[i])
        up = u < v
        x = mix((u << np.uint64(32) | v) if up else (v << np.uint64(32) | u))
        at = 0 if up else 2
        sums[at] += x
        sums[at + 1] += (x * x) ^ (x >> np.uint64(32))
