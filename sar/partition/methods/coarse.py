"""A smaller graph of the same shape: clusters of nodes become nodes, weighted by what they hold.

Clusters are found by label propagation with a bound on their weight (Meyerhenke,
Sanders and Schulz, "Partitioning complex networks via size-constrained clustering", 2014): each
node in turn joins the cluster that most of its neighbors are in and that has room.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from sar.files import naming
from sar.partition.buckets import Rows
from sar.partition.compiled import compiled

# Fewer leave KaMinPar more to do than they save.
_ROUNDS = 3
_ROOM = 1 << 20  # coarse edges that are written at once
# Bits of a ParHIP file's version: widths of 32 instead of 64 bits. Weights of both kinds follow.
_NODE_IDS_32, _NODE_WEIGHTS_32, _EDGE_WEIGHTS_32 = 8, 16, 32
_HEADER = np.dtype("<u8")


def find_clusters(rows: Rows, weights: np.ndarray, max_weight: int) -> np.ndarray:
    """Cluster of each node, int32 [N], numbered from 0 in the order of their smallest names.

    Args:
        weights: int32 [N] of the nodes. max_weight: of a cluster of several nodes.

    Memory: 12 bytes a node beside the result.
    """
    num_nodes = len(weights)
    clusters = np.arange(num_nodes, dtype=np.int32)
    loads, rating = weights.astype(np.int32), np.zeros(num_nodes, np.int32)
    touched = np.empty(_longest(rows.indptr), np.int32)
    for _ in range(_ROUNDS):
        _propagate(*rows, weights, max_weight, clusters, loads, rating, touched)
    rating[:] = 0
    _rank(clusters, rating)
    return clusters


def write_contracted(rows: Rows, clusters: np.ndarray, weights: np.ndarray, path: Path) -> int:
    """The graph of clusters as a ParHIP file (binary, of KaHIP): edges weigh what they stand for.

    Returns the number of clusters. Raises ``OSError`` for a full disk. Memory: 8 bytes a node, 12
    a cluster.
    """
    count = int(clusters.max(initial=-1)) + 1
    node_weights = np.bincount(clusters, weights, minlength=count).astype(np.int32)
    sizes = np.bincount(clusters, minlength=count)
    members = np.argsort(clusters, kind="stable").astype(np.int32)
    ends = np.cumsum(sizes)
    degrees = np.zeros(count, np.int64)
    rating, touched = np.zeros(count, np.int32), np.empty(count, np.int32)
    heavy_path = path.with_suffix(".weights")
    first_byte = 3 * _HEADER.itemsize + (count + 1) * _HEADER.itemsize
    # Not `tofile`, which says nothing when a disk is full.
    with naming(path), open(path, "wb") as file, open(heavy_path, "wb") as heavy:
        file.seek(first_byte)
        at = written = 0
        while at < count:
            room = np.empty((2, max(_ROOM, count)), np.int32)
            at, filled = _contract(
                *rows, clusters, members, ends, at, rating, touched, room, degrees
            )
            file.write(room[0, :filled].data)
            heavy.write(room[1, :filled].data)
            written += filled
        file.write(node_weights.data)
        heavy.flush()
        with open(heavy_path, "rb") as source:
            shutil.copyfileobj(source, file)
        file.seek(0)
        version = _NODE_IDS_32 | _NODE_WEIGHTS_32 | _EDGE_WEIGHTS_32
        file.write(np.array([version, count, written], _HEADER).data)
        offsets = np.concatenate([[0], np.cumsum(degrees)]) * 4 + first_byte
        file.write(offsets.astype(_HEADER).data)
    heavy_path.unlink()
    return count


def _longest(indptr: np.ndarray) -> int:
    """Neighbors of the node that has most."""
    blocks = (indptr[low : low + _ROOM + 1] for low in range(0, len(indptr) - 1, _ROOM))
    return max((int(np.diff(block).max()) for block in blocks), default=0)


@compiled
def _propagate(indptr, values, weights, max_weight, clusters, loads, rating, touched):
    for u in range(len(weights)):
        found = 0
        for at in range(indptr[u], indptr[u + 1]):
            c = clusters[values[at]]
            if rating[c] == 0:
                touched[found] = c
                found += 1
            rating[c] += 1
        own = clusters[u]
        best, best_rating = own, rating[own]
        for i in range(found):
            c = touched[i]
            if rating[c] > best_rating and loads[c] + weights[u] <= max_weight:
                best, best_rating = c, rating[c]
            rating[c] = 0
        if best != own:
            loads[own] -= weights[u]
            loads[best] += weights[u]
            clusters[u] = best


@compiled
def _rank(clusters, numbers):
    """Numbers in the place of names; ``numbers`` is zero at first."""
    for u in range(len(clusters)):
        numbers[clusters[u]] = 1
    total = 0
    for c in range(len(numbers)):
        if numbers[c]:
            numbers[c] = total
            total += 1
    for u in range(len(clusters)):
        clusters[u] = numbers[clusters[u]]


@compiled
def _contract(indptr, values, clusters, members, ends, first, rating, touched, room, degrees):
    """Clusters from ``first`` on, as long as their edges fit; the next and what is filled."""
    filled = 0
    count = len(ends)
    for c in range(first, count):
        begin = ends[c - 1] if c else 0
        found = 0
        for i in range(begin, ends[c]):
            u = members[i]
            for at in range(indptr[u], indptr[u + 1]):
                other = clusters[values[at]]
                if other == c:
                    continue
                if rating[other] == 0:
                    touched[found] = other
                    found += 1
                rating[other] += 1
        if filled + found > room.shape[1]:
            for i in range(found):
                rating[touched[i]] = 0
            return c, filled
        for i in range(found):
            other = touched[i]
            room[0, filled] = other
            room[1, filled] = rating[other]
            rating[other] = 0
            filled += 1
        degrees[c] = found
    return count, filled
