"""Decides which partition owns each node: METIS, random, or blocks of consecutive ids."""

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.metis import metis

METHODS = ("metis", "random", "contiguous")


def assign(
    graph: GraphArrays,
    num_parts: int,
    method: str = "metis",
    seed: int = 0,
    *,
    balance_edges: bool | None = None,
) -> np.ndarray:
    """Partition id of every node: int64 [N], types in the order of `graph.num_nodes`.

    Each node type is balanced on its own. The same arguments give the same result. Partitions may
    be empty when there are fewer nodes than partitions. `balance_edges` (METIS only) balances
    in-edges too: cuts a few more edges, and no partition has several times the work of the others.
    By default it is on for graphs of one node type; with several, METIS then loses hold of both.

    Raises ValueError for an unknown method or num_parts < 1, MissingDependencyError when METIS is
    asked for and dgl is not installed, PartitionError when METIS gives up.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected 1 or more")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected one of {', '.join(METHODS)}")
    if balance_edges is None:
        balance_edges = method == "metis" and len(graph.num_nodes) == 1
    if balance_edges and method != "metis":
        raise ValueError(f"balance_edges works with method 'metis' only, got {method!r}")
    if num_parts == 1:
        return np.zeros(graph.total_nodes, dtype=np.int64)
    if method == "random":
        return _per_type(graph, num_parts, np.random.default_rng(seed))
    src, dst = simple_edges(graph)
    # METIS has nothing to work with here, or complains of pieces without a node.
    if method == "contiguous" or len(src) == 0 or 2 * num_parts > graph.total_nodes:
        return _per_type(graph, num_parts, None)
    return _metis(graph, src, dst, num_parts, seed, balance_edges)


def simple_edges(graph: GraphArrays) -> tuple[np.ndarray, np.ndarray]:
    """All types' edges over one id space, symmetric, no loops or duplicates: two int64 arrays."""
    offsets, nodes = graph.node_offsets(), graph.total_nodes
    keys = [np.zeros(0, dtype=np.int64)]
    for (src_type, _, dst_type), (src_ids, dst_ids) in graph.edges.items():
        src, dst = src_ids.numpy() + offsets[src_type], dst_ids.numpy() + offsets[dst_type]
        low, high = np.minimum(src, dst), np.maximum(src, dst)
        keys.append(np.unique((low * nodes + high)[low != high]))
    pairs = np.unique(np.concatenate(keys))
    low, high = pairs // max(nodes, 1), pairs % max(nodes, 1)
    return np.concatenate([low, high]), np.concatenate([high, low])


def _per_type(graph: GraphArrays, num_parts: int, rng: np.random.Generator | None) -> np.ndarray:
    """Equal sizes per type, in order of id, or shuffled when there is a generator."""
    parts = []
    for number, count in enumerate(graph.num_nodes.values()):
        part = np.arange(count, dtype=np.int64) * num_parts // max(count, 1)
        if rng is not None:
            # Rotate, so that the types' spare nodes do not all land in the same partitions.
            part = (rng.permutation(part) + number) % num_parts
        parts.append(part)
    return np.concatenate(parts)


def _metis(
    graph: GraphArrays,
    src: np.ndarray,
    dst: np.ndarray,
    num_parts: int,
    seed: int,
    balance_edges: bool,
) -> np.ndarray:
    """METIS takes no seed from DGL: another seed is another order of the nodes."""
    nodes = graph.total_nodes
    relabel = np.arange(nodes)
    if seed:
        relabel = np.random.default_rng(seed).permutation(nodes)
    types = np.empty(nodes, dtype=np.int64)
    types[relabel] = np.repeat(np.arange(len(graph.num_nodes)), list(graph.num_nodes.values()))
    return metis(relabel[src], relabel[dst], types, num_parts, balance_edges)[relabel]
