"""The default: coarsen, cut the coarse graph with KaMinPar, refine on the whole graph.

Cuts as good as KaMinPar's own, for a fraction of its time and memory where graphs are large: only
the coarse graph needs memory by the edge, all else is 20 to 40 bytes a node.

Clusters of nodes become the coarse graph's nodes, weighted by what they hold. They are found by
label propagation with a bound on their weight (Meyerhenke, Sanders and Schulz, "Partitioning
complex networks via size-constrained clustering", 2014): each node in turn joins the cluster that
most of its neighbors are in and that has room.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sar.files import naming
from sar.partition.arrays import GraphArrays
from sar.partition.buckets import Rows
from sar.partition.compiled import compiled, mix
from sar.partition.methods.base import CutOptions, Method, equal_shares
from sar.partition.methods.graph import CutGraph, cut_graph
from sar.partition.methods.refine import Bounds, refine
from sar.partition.methods.solver import solve
from sar.partition.progress import Counter, Progress, blocks, silent
from sar.splitmix import STEP

NODES_ABOVE, BALANCED_ABOVE = 1.03, 1.05  # of the mean, what a part may have at most
HALO_ABOVE = 1.10
MAX_PARTS = 2**15
_CLUSTERS_A_PART = 125  # at least, so that parts can be filled evenly
_SMALL = 1 << 22  # neighbors; such graphs go to KaMinPar as they are
_MOST_WEIGHT = 1 << 30  # all nodes together; KaMinPar counts in 32 bits
_UNIT = 64  # weight of an average node
# Fewer leave KaMinPar more to do than they save.
_ROUNDS = 3
MOST_EDGES = 1 << 22  # more cut no better; KaMinPar needs some 14 bytes for each
_SAMPLE = 1 << 12  # clusters whose edges are looked at
_ROOM = 1 << 20  # coarse edges that are written at once
_RUN = 1 << 22  # edges of nodes that are looked at in one call
# Bits of a ParHIP file's version: widths of 32 instead of 64 bits. Weights of both kinds follow.
_NODE_IDS_32, _NODE_WEIGHTS_32, _EDGE_WEIGHTS_32 = 8, 16, 32
_HEADER = np.dtype("<u8")
_STEP = np.uint64(STEP)


class Coarsen(Method):
    """Size-constrained label propagation, KaMinPar on the clusters, refinement with prices.

    Every node type is balanced within 3 %. ``balance``: edges and training nodes within 5 %, halo
    rows within 10 %, as far as moves of single nodes reach; the report says what was reached.
    One thread; the result depends on the seed alone.
    """

    name = "coarsen"
    balances = frozenset({"edges", "halo", "train"})

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        """Raises MissingDependencyError without kaminpar, PartitionError when it gives up,
        ``ValueError`` for more than 2^15 parts."""
        num_parts, balance = options.num_parts, options.balance or frozenset()
        if num_parts > MAX_PARTS:
            raise ValueError(f"num_parts is {num_parts}, expected at most {MAX_PARTS}")
        progress = options.progress
        whole = cut_graph(graph, options.scratch, progress)
        if len(whole.rows.values) == 0 or 2 * num_parts > graph.total_nodes:
            return equal_shares(graph, num_parts, None)
        weights = node_weights(whole, list(graph.num_nodes.values()))
        clusters = np.arange(whole.num_nodes, dtype=np.int32)
        if len(whole.rows.values) > _SMALL:
            most = int(weights.sum(dtype=np.int64)) // (num_parts * _CLUSTERS_A_PART)
            clusters = find_clusters(whole.rows, weights, most, progress)
        path = options.scratch / "clusters.parhip"
        count = write_contracted(whole.rows, clusters, weights, path, progress)
        counter = Counter(progress, "cutting clusters", graph.total_nodes)
        found = run_kaminpar(path, count, num_parts, options.seed)
        parts = found.astype(np.int16)[clusters]
        del clusters
        counter.add(graph.total_nodes)
        if balance and options.unbalanced is not None:
            plain = parts.copy()
            refine(whole, plain, num_parts, bounds_of(frozenset()), progress)
            options.unbalanced(plain)
        refine(whole, parts, num_parts, bounds_of(balance), progress)
        return parts


def bounds_of(balance: frozenset[str]) -> Bounds:
    return Bounds(
        nodes=BALANCED_ABOVE if balance else NODES_ABOVE,
        edges=BALANCED_ABOVE if "edges" in balance else None,
        train=BALANCED_ABOVE if "train" in balance else None,
        halo=HALO_ABOVE if "halo" in balance else None,
    )


def node_weights(graph: CutGraph, type_sizes: list[int]) -> np.ndarray:
    """int32 [N]: 1, or with several types what makes all types weigh the same.

    Weights of edges, or of nodes and edges half and half, give no better start for balancing.
    """
    if len(type_sizes) == 1:
        return np.ones(graph.num_nodes, np.int32)
    unit = min(_UNIT, _MOST_WEIGHT // graph.num_nodes)
    mean_size = graph.num_nodes / len(type_sizes)
    scales = np.array([unit * mean_size / max(size, 1) for size in type_sizes], np.float32)
    return np.maximum(scales[graph.types], 1).astype(np.int32)


def run_kaminpar(path: Path, count: int, num_parts: int, seed: int) -> np.ndarray:
    """int32 [count]: part of each node of a ParHIP file; raises as :func:`solve` does."""
    seed %= 2**31  # it counts them in 31 bits
    return solve("kaminpar", path.with_suffix(".npy"), count, num_parts, path, seed, 0.03)


def find_clusters(
    rows: Rows, weights: np.ndarray, max_weight: int, progress: Progress = silent
) -> np.ndarray:
    """Cluster of each node, int32 [N], numbered in the order of their smallest names. One of
    several nodes weighs at most ``max_weight``; ``weights``: int32 [N]. Takes 12 bytes a node more.
    """
    num_nodes = len(weights)
    clusters = np.arange(num_nodes, dtype=np.int32)
    loads, rating = weights.astype(np.int32), np.zeros(num_nodes, np.int32)
    ends = (rows.indptr[low : high + 1] for low, high in blocks(num_nodes))
    touched = np.empty(max((int(np.diff(run).max()) for run in ends), default=0), np.int32)
    counter = Counter(progress, "finding clusters", _ROUNDS * num_nodes)
    for _ in range(_ROUNDS):
        for run in rows.runs(counter):
            _propagate(*rows, *run, weights, max_weight, clusters, loads, rating, touched)
    rating[:] = 0
    _rank(clusters, rating)
    return clusters


def write_contracted(
    rows: Rows,
    clusters: np.ndarray,
    weights: np.ndarray,
    path: Path,
    progress: Progress = silent,
    most_edges: int = MOST_EDGES,
) -> int:
    """Write the graph of clusters as a ParHIP file (KaHIP's binary format); edges weigh what they
    stand for. Returns the number of clusters. Raises ``OSError`` for a full disk.

    About ``most_edges`` are written, counted from both ends. Where there are more, those lighter
    than some weight t are drawn with probability weight / t, and then weigh t: any cut weighs as
    much as before on average (Benczur and Karger, 1996, in its simplest form).

    Memory: 8 bytes a node, 16 a cluster, 8 a written edge.
    """
    count = int(clusters.max(initial=-1)) + 1
    node_weights = np.bincount(clusters, weights, minlength=count).astype(np.int32)
    walk = _Walk(rows, clusters, count, progress)
    found = walk.edges(walk.lightest(most_edges), "joining clusters")
    runs = [edges.copy() for edges in found]
    version = _NODE_IDS_32 | _NODE_WEIGHTS_32 | _EDGE_WEIGHTS_32
    header = [version, count, sum(run.shape[1] for run in runs)]
    starts = np.concatenate([[0], np.cumsum(walk.degrees)]) * 4 + 8 * (len(header) + count + 1)
    # Not `tofile`, which says nothing when a disk is full.
    with naming(path), open(path, "wb") as file:
        file.write(np.concatenate([header, starts]).astype(_HEADER).data)
        for values in (*(run[0] for run in runs), node_weights, *(run[1] for run in runs)):
            file.write(values.data)
    return count


class _Walk:
    """The edges between clusters, one cluster after another."""

    def __init__(self, rows: Rows, clusters: np.ndarray, count: int, progress: Progress) -> None:
        ends = np.cumsum(np.bincount(clusters, minlength=count))
        members = np.argsort(clusters, kind="stable").astype(np.int32)
        self._graph, self._progress = (*rows, clusters, members, ends), progress
        self._count = count
        self.degrees = np.zeros(self._count, np.int64)
        self._rating, self._touched = np.zeros((2, self._count), np.int32)
        self._room = np.empty((2, max(_ROOM, self._count)), np.int32)

    def edges(self, lightest: int, what: str, step: int = 1) -> Iterator[np.ndarray]:
        """int32 [2, n] other ends and weights of edges; sets ``degrees``."""
        counter, at = Counter(self._progress, what, self._count), 0
        while at < self._count:
            before = at
            at, filled = _contract(
                *self._graph, at, step, lightest, self._rating, self._touched, self._room,
                self.degrees,
            )  # fmt: skip
            yield self._room[:, :filled]
            counter.add(min(at, self._count) - before)

    def lightest(self, most_edges: int) -> int:
        """The smallest weight that leaves at most ``most_edges``, by a sample of clusters."""
        step = max(1, self._count // _SAMPLE)
        counts = np.zeros(1, np.int64)
        for edges in self.edges(1, "sampling clusters", step):
            found = np.bincount(edges[1], minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        by_weight = np.arange(len(counts))
        for weight in range(1, len(counts)):
            if (counts * np.minimum(1.0, by_weight / weight)).sum() * step <= most_edges:
                return weight
        return max(1, -(-int((counts * by_weight).sum()) * step // most_edges))


@compiled
def _propagate(
    indptr, values, first, last, weights, max_weight, clusters, loads, rating, touched
):  # fmt: skip
    # Ids from 0 on are not looked at for being negative.
    starts, own_weights = indptr[first : last + 1], weights[first:last]
    own_clusters = clusters[first:last]
    for u in range(last - first):
        found = 0
        for at in range(starts[u], starts[u + 1]):
            c = clusters[values[at]]
            if rating[c] == 0:
                touched[found] = c
                found += 1
            rating[c] += 1
        own = own_clusters[u]
        best, best_rating = own, rating[own]
        for i in range(found):
            c = touched[i]
            if rating[c] > best_rating and loads[c] + own_weights[u] <= max_weight:
                best, best_rating = c, rating[c]
            rating[c] = 0
        if best != own:
            loads[own] -= own_weights[u]
            loads[best] += own_weights[u]
            own_clusters[u] = best


@compiled
def _rank(clusters, numbers):
    """Replace names of clusters by numbers; ``numbers`` is zero at first."""
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
def _contract(
    indptr, values, clusters, members, ends, first, step, lightest, rating, touched, room, degrees
):  # fmt: skip
    """Edges of every ``step``-th cluster from ``first`` on, while they fit into ``room`` and for
    about `_RUN` edges of nodes. Returns the next cluster and how much of ``room`` is filled."""
    filled = seen = 0
    for c in range(first, len(ends), step):
        found = 0
        for i in range(ends[c - 1] if c else 0, ends[c]):
            u = members[i]
            seen += indptr[u + 1] - indptr[u]
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
        before = filled
        for i in range(found):
            other = touched[i]
            weight = rating[other]
            rating[other] = 0
            if weight >= lightest or _draw(c, other) * lightest < weight:
                room[0, filled] = other
                room[1, filled] = max(weight, lightest)
                filled += 1
        degrees[c] = filled - before
        if seen > _RUN:
            return c + step, filled
    return len(ends), filled


@compiled
def _draw(a, b):
    """A random number in [0, 1) of a pair, the same from both ends."""
    low, high = np.uint64(min(a, b)), np.uint64(max(a, b))
    mixed = mix((low << np.uint64(32) | high) + _STEP)
    return np.float64(mixed >> np.uint64(11)) / 9007199254740992.0
