"""The graph as methods see it: undirected, without loops and multi-edges, mapped from files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.buckets import BLOCK, Rows, sort_rows
from sar.partition.compiled import compiled

MAX_NODES, MAX_TYPES = 2**31 - 1, 2**15


@dataclass(frozen=True)
class CutGraph:
    """All node types in one id space, one type after another, and what a part bears for a node.

    Attributes:
        rows: the neighbors of each node, ascending; int32 in a mapped file.
        types: int16 [N].
        in_edges: int32 [N], edges of the directed graph that end in a node.
        train: bool [N], or ``None`` where no node type has a ``train_mask``.
    """

    rows: Rows
    types: np.ndarray
    in_edges: np.ndarray
    train: np.ndarray | None

    @property
    def num_nodes(self) -> int:
        return len(self.types)


def cut_graph(graph: GraphArrays, folder: Path) -> CutGraph:
    """``graph`` for a method; its rows come to lie in ``folder``.

    Raises ``ValueError`` for 2^31 nodes and more, or more than 2^15 types of them.
    """
    if graph.total_nodes > MAX_NODES:
        raise ValueError(
            f"graph of {graph.total_nodes:,} nodes: a cut numbers nodes in 32 bits, expected at "
            f"most {MAX_NODES:,}"
        )
    counts = list(graph.num_nodes.values())
    if len(counts) > MAX_TYPES:
        raise ValueError(f"graph has {len(counts):,} node types, a cut takes at most {MAX_TYPES:,}")
    types = np.repeat(np.arange(len(counts), dtype=np.int16), counts)
    in_edges = np.zeros(graph.total_nodes, np.int32)
    offsets = graph.node_offsets()
    for etype, (_, dst) in graph.edges.items():
        for low in range(0, len(dst), BLOCK):
            _add_ones(dst[low : low + BLOCK].numpy(), offsets[etype[2]], in_edges)
    rows = sort_rows(lambda: _both_ways(graph), graph.total_nodes, folder)
    return CutGraph(rows, types, in_edges, _train(graph))


def _both_ways(graph: GraphArrays) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Every edge in both directions, loops left out: int32 ids over all types."""
    offsets = graph.node_offsets()
    low_to_high = np.empty((2, BLOCK), np.int32)
    for (src_type, _, dst_type), (src, dst) in graph.edges.items():
        for low in range(0, len(src), BLOCK):
            ends = src[low : low + BLOCK].numpy(), dst[low : low + BLOCK].numpy()
            kept = _shift(*ends, offsets[src_type], offsets[dst_type], *low_to_high)
            first, second = low_to_high[:, :kept]
            yield first, second
            yield second, first


def _train(graph: GraphArrays) -> np.ndarray | None:
    masks = [graph.node_data.get(ntype, {}).get("train_mask") for ntype in graph.num_nodes]
    if all(mask is None for mask in masks):
        return None
    columns = [
        np.zeros(count, bool)
        if mask is None or mask.numel() == 0
        else mask.numpy().reshape(count, -1).any(axis=1)
        for count, mask in zip(graph.num_nodes.values(), masks)
    ]
    return np.concatenate(columns)


@compiled
def _add_ones(ids, offset, counts):
    for i in range(len(ids)):
        counts[ids[i] + offset] += 1


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
