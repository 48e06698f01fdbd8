"""The default: coarsen, cut the coarse graph with KaMinPar, refine on the whole graph.

Cuts as good as KaMinPar's own, for a fraction of its time and memory where graphs are large: what
needs memory by the edge is the coarse graph alone, all else is 20 to 40 bytes a node.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.methods import kaminpar_main
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.coarse import find_clusters, write_contracted
from sar.partition.methods.graph import CutGraph, cut_graph
from sar.partition.methods.refine import Bounds, refine
from sar.partition.methods.simple import equal_shares
from sar.partition.methods.solver import Solver
from sar.partition.progress import Counter

NODES_ABOVE, BALANCED_ABOVE = 1.03, 1.05  # of the mean, what a part may have at most
HALO_ABOVE = 1.10
MAX_PARTS = 2**15
_CLUSTERS_A_PART = 125  # at least, so that parts can be filled evenly
_SMALL = 1 << 22  # neighbors; such graphs go to KaMinPar as they are
_MOST_WEIGHT = 1 << 30  # all nodes together; KaMinPar counts in 32 bits
_UNIT = 64  # weight of an average node
_KAMINPAR = Solver("KaMinPar", "coarsen", "kaminpar", "kaminpar", kaminpar_main.__file__)


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
        ``ValueError`` for more than 2^15 parts.
        """
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
    """Of the refinement."""
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
    """int32 [count]: part of each node of a ParHIP file; the result lies in a file beside it.

    Raises as :meth:`Solver.solve` does.
    """
    # KaMinPar counts seeds in 31 bits.
    return _KAMINPAR.solve(path.with_suffix(".npy"), count, num_parts, path, seed % 2**31, 0.03)
