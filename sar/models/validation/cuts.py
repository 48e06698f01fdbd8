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
    total = graph.total_nodes
    shares = np.linspace(1.0, 0.4, parts - 1)
    ends = (np.cumsum(shares / shares.sum()) * (total - parts)).astype(np.int64)
    ends = np.append(ends + np.arange(1, parts), total)
    ends[parts - 2] = total - 1
    found = np.empty(total, np.int64)
    found[_by_distance(graph)] = np.searchsorted(ends, np.arange(total), "right")
    return found


def _by_distance(graph: GraphArrays) -> np.ndarray:
    """int64 [N] all nodes, types one after another, in the order of a walk in breadth."""
    starts = graph.node_offsets()
    pairs = [
        np.stack([src.numpy() + starts[e[0]], dst.numpy() + starts[e[2]]])
        for e, (src, dst) in graph.edges.items()
    ]
    both = np.concatenate([np.empty((2, 0), np.int64), *pairs, *(pair[::-1] for pair in pairs)], 1)
    both = both[:, both[0].argsort(kind="stable")]
    first = np.searchsorted(both[0], np.arange(graph.total_nodes + 1))
    seen, order = np.zeros(graph.total_nodes, bool), list[int]()
    for root in range(graph.total_nodes):
        at = len(order)
        if not seen[root]:
            seen[root] = True
            order.append(root)
        while at < len(order):
            near = both[1, first[order[at]] : first[order[at] + 1]]
            new = np.unique(near[~seen[near]])
            seen[new] = True
            order += new.tolist()
            at += 1
    return np.array(order, np.int64)
