"""Two cuts of a graph, as some mistakes do not show in one."""

from __future__ import annotations

import numpy as np

from sar.partition.arrays import GraphArrays


def random_cut(graph: GraphArrays, parts: int) -> np.ndarray:
    """int64 [N] random parts, the first the largest, none empty."""
    rng = np.random.default_rng(3)
    shares = np.linspace(1.6, 1.0, parts)
    found = rng.choice(parts, graph.total_nodes, p=shares / shares.sum())
    found[rng.permutation(graph.total_nodes)[:parts]] = np.arange(parts)
    return found


def near_cut(graph: GraphArrays, parts: int) -> np.ndarray:
    """int64 [N] parts of nodes that are near each other, the last with one node."""
    found = np.empty(graph.total_nodes, np.int64)
    last = graph.total_nodes - 1
    found[_by_distance(graph)] = np.append(np.arange(last) * (parts - 1) // last, parts - 1)
    return found


def _by_distance(graph: GraphArrays) -> np.ndarray:
    """int64 [N] all nodes, types one after another, in the order of walks in breadth."""
    starts = graph.node_offsets()
    pairs = [(src + starts[e[0]], dst + starts[e[2]]) for e, (src, dst) in graph.edges.items()]
    both = np.concatenate([np.empty((2, 0), np.int64), *map(np.stack, pairs)], 1)
    src, dst = np.concatenate([both, both[::-1]], 1)
    seen, order = np.zeros(graph.total_nodes, bool), list[int]()
    for root in range(graph.total_nodes):
        near = np.array([root])[~seen[[root]]]
        while len(near):
            seen[near] = True
            order += near.tolist()
            near = np.unique(dst[np.isin(src, near) & ~seen[dst]])
    return np.array(order, np.int64)
