"""Decides which partition owns each node: METIS, random, or blocks of consecutive ids."""

import contextlib
import ctypes
import io
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from sar.errors import PartitionError
from sar.partition.arrays import GraphArrays
from sar.partition.require import require_dgl

_M_PERTURB = -6  # <malloc.h>
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
    """METIS through DGL. The graph must be simple: multi-edges make it write past its buffers."""
    dgl = require_dgl("method 'metis' ('random' does not)")
    nodes = graph.total_nodes
    # METIS itself takes no seed from DGL: another seed is another order of the nodes.
    relabel = np.arange(nodes)
    if seed:
        relabel = np.random.default_rng(seed).permutation(nodes)
    homogeneous = dgl.graph((relabel[src], relabel[dst]), num_nodes=nodes)
    types = None
    if len(graph.num_nodes) > 1 or balance_edges:
        types = np.empty(nodes, dtype=np.int64)
        types[relabel] = np.repeat(np.arange(len(graph.num_nodes)), list(graph.num_nodes.values()))
    # Recursive bisection, not k-way: it cuts fewer edges on nearly every graph tried, and k-way
    # depends even more on what memory held before.
    with contextlib.redirect_stdout(io.StringIO()), _zeroed_memory() as call:  # DGL prints timings
        found = call(
            dgl.metis_partition_assignment,
            homogeneous,
            num_parts,
            balance_ntypes=types,
            balance_edges=balance_edges,
            mode="recursive",
        )
    if found is None:
        raise PartitionError(
            f"METIS found no cut of {nodes} nodes into {num_parts} partitions; use method 'random'"
        )
    return found.numpy().astype(np.int64)[relabel]


@contextlib.contextmanager
def _zeroed_memory() -> Iterator[Callable]:
    """Gives a function that calls another one where glibc hands out zeroed memory.

    METIS reads memory before it writes it, so that its result would depend on what the process did
    before (seen with several node types). The call runs on a thread of its own, because glibc
    recycles a thread's small blocks as they are. Elsewhere than glibc it is a plain call.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        yield lambda function, *args, **kwargs: function(*args, **kwargs)
        return
    mallopt(_M_PERTURB, 0xFF)  # new memory is filled with the complement
    try:
        with ThreadPoolExecutor(1) as thread:
            yield lambda *args, **kwargs: thread.submit(*args, **kwargs).result()
    finally:
        mallopt(_M_PERTURB, 0)
