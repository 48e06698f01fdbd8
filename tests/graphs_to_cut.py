"""Graphs that are hard to cut, and what a cut must keep on any of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.sources.generate import community_graph


def homogeneous(nodes: int, src, dst) -> GraphArrays:
    ends = [torch.from_numpy(np.asarray(ids, dtype=np.int64)) for ids in (src, dst)]
    return GraphArrays("g", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: (ends[0], ends[1])})


def drawn(nodes: int, edges: int, seed: int = 0) -> GraphArrays:
    """Random ends: loops and multi-edges are among them."""
    return homogeneous(nodes, *np.random.default_rng(seed).integers(0, nodes, (2, edges)))


def communities(nodes: int, edges: int, **options) -> GraphArrays:
    return community_graph(nodes, edges, features=1, **options)


KINDS = {
    "one type": ({NTYPE_HOMO: 23}, [ETYPE_HOMO]),
    "several": (
        {"a": 11, "none": 0, "b": 17},
        [("a", "r", "b"), ("b", "s", "a"), ("b", "t", "b"), ("b", "u", "none")],
    ),
}


def small(kind: str, num_edges: int, seed: int = 0, masks: bool = True) -> GraphArrays:
    """Of one of ``KINDS``, with loops and multi-edges; a mask on the last node type."""
    rng = np.random.default_rng(seed)
    counts, etypes = KINDS[kind]
    edges = {}
    for src, relation, dst in etypes:
        most = num_edges if counts[src] and counts[dst] else 0
        ends = (rng.integers(0, max(counts[one], 1), most) for one in (src, dst))
        edges[src, relation, dst] = tuple(map(torch.from_numpy, ends))
    last = list(counts)[-1]
    data = {last: {"train_mask": torch.from_numpy(rng.random(counts[last]) < 0.4)}}
    return GraphArrays("g", dict(counts), edges, data if masks else {}).validate()


def star(nodes: int = 2000) -> GraphArrays:
    """One node has all the edges that end somewhere."""
    return homogeneous(nodes, np.arange(1, nodes), np.zeros(nodes - 1))


def multi(nodes: int = 60) -> GraphArrays:
    rng = np.random.default_rng(0)
    return homogeneous(nodes, *np.repeat(rng.integers(0, nodes, (2, 100)), 30, axis=1))


def uneven_types() -> GraphArrays:
    """Three nodes beside thousands, a type without nodes and one whose nodes are all trained on."""
    sizes = {"few": 3, "many": 4000, "none": 0, "trained": 50}
    rng = np.random.default_rng(0)
    pairs = [("few", "many", 6000), ("many", "trained", 3000), ("none", "many", 0)]
    edges = {
        (a, "to", b): (
            torch.from_numpy(rng.integers(0, max(sizes[a], 1), count)),
            torch.from_numpy(rng.integers(0, sizes[b], count)),
        )
        for a, b, count in pairs
    }
    masks = {"trained": torch.ones(50, dtype=torch.bool), "none": torch.zeros(0, dtype=torch.bool)}
    return GraphArrays("u", sizes, edges, {t: {"train_mask": m} for t, m in masks.items()})


def bipartite() -> GraphArrays:
    src, dst = torch.from_numpy(np.random.default_rng(0).integers(0, 400, (2, 2000)))
    return GraphArrays("b", {"a": 400, "b": 400}, {("a", "to", "b"): (src, dst)})


def apart() -> GraphArrays:
    """Clusters without an edge between them, of different sizes and densities."""
    rng, first, ends = np.random.default_rng(0), 0, []
    for number in range(8):
        size = int(300 * 1.3**number)
        ends.append(first + rng.integers(0, size, (2, size * (2 + 6 * (number % 3)))))
        first += size
    return homogeneous(first, *np.concatenate(ends, axis=1))


HARD: dict[str, tuple[Callable[[], GraphArrays], int]] = {
    "no edges": (lambda: homogeneous(20, [], []), 4),
    "loops": (lambda: homogeneous(50, np.arange(50), np.arange(50)), 4),
    "isolated": (lambda: homogeneous(3000, [0], [1]), 8),
    "star": (star, 8),
    "multi": (multi, 8),
    "types": (uneven_types, 8),
    "bipartite": (bipartite, 8),
    "apart": (apart, 8),
    "a part a node": (lambda: drawn(30, 100), 30),
    "two nodes a part": (lambda: drawn(60, 200), 30),
    "300 parts": (lambda: drawn(3000, 12_000), 300),
}


def assert_capacities(graph: GraphArrays, parts: np.ndarray, num_parts: int, above: float) -> None:
    """Every node has a part, and no part has too many nodes of a type."""
    assert parts.shape == (graph.total_nodes,) and parts.dtype.kind == "i"
    for ntype, start in graph.node_offsets().items():
        count = graph.num_nodes[ntype]
        sizes = np.bincount(parts[start : start + count], minlength=num_parts)
        assert len(sizes) == num_parts
        assert sizes.max() <= max(math.floor(above * count / num_parts), -(-count // num_parts))


def loads(graph: GraphArrays, parts: np.ndarray, num_parts: int) -> np.ndarray:
    """[P] edges that end in each part."""
    offsets, counts = graph.node_offsets(), np.zeros(num_parts, np.int64)
    for (_, _, ntype), (_, dst) in graph.edges.items():
        counts += np.bincount(parts[dst.numpy() + offsets[ntype]], minlength=num_parts)
    return counts


def cut_share(graph: GraphArrays, parts: np.ndarray) -> float:
    """Of a graph of one type."""
    src, dst = (ids.numpy() for ids in graph.edges[ETYPE_HOMO])
    return float((parts[src] != parts[dst]).mean())
