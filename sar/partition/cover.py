"""The fewest rows that must travel for a sum: a minimum vertex cover of the edges of two parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]


def pulled_sources(src: Ints, dst: Ints, num_src: int) -> Bools:
    """[num_src] the source rows that are cheaper sent as they are; edges out of others are pushed.

    The edges from part q into part p are a bipartite graph between rows of q and rows of p. A sum
    needs for each edge either its source's row, or its share of a partial sum that q sends for its
    destination: what travels is a vertex cover. Of least size is the one of Koenig's theorem: take
    a maximum matching M (Hopcroft and Karp, 1973); let Z be what alternating paths reach from the
    sources that M leaves out; the cover is the sources outside Z and the destinations inside. It
    has one vertex for each edge of M. The pushed edges are those out of Z, and their destinations
    are the cover's.

    Args:
        src, dst: [E] rows of either end, ``src`` below ``num_src``; an edge may come repeatedly.
            Sources without edges are not pulled.

    Memory: about 30 bytes per edge.
    """
    if len(src) == 0:
        return np.zeros(num_src, dtype=np.bool_)
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_bipartite_matching

    rows, columns = np.unique(dst, return_inverse=True)
    ones = np.ones(len(src), dtype=np.int8)
    graph = csr_matrix((ones, (src, columns.astype(np.int32))), shape=(num_src, len(rows)))
    partner = maximum_bipartite_matching(graph, perm_type="row")  # a source per column, or -1
    free = np.ones(num_src, dtype=np.bool_)
    free[partner[partner >= 0]] = False
    # A step from a source over a column leads to the column's partner. Only columns that no path
    # reaches have none (a path to them would make the matching larger): they lead nowhere, to the
    # source itself. One more node, the root, leads to all free sources.
    steps = partner[graph.indices]
    own = np.repeat(np.arange(num_src, dtype=steps.dtype), np.diff(graph.indptr))
    steps = np.concatenate([np.where(steps < 0, own, steps), free.nonzero()[0]])
    indptr = np.append(graph.indptr, len(steps))
    size = num_src + 1
    walk = csr_matrix((np.ones(len(steps)), steps, indptr), shape=(size, size))
    reached = breadth_first_order(walk, num_src, return_predecessors=False)
    pulled = np.ones(size, dtype=np.bool_)
    pulled[reached] = False
    return pulled[:num_src]


def cover_size(src: Ints, dst: Ints, pulled: Bools) -> int:
    """Rows that travel: pulled sources, and one partial sum per destination of the others."""
    return int(pulled.sum()) + len(np.unique(dst[~pulled[src]]))


def count_fewest(
    src: Ints, dst: Ints, offsets: Sequence[int], num_src: Sequence[int], part: int
) -> NDArray[np.int64]:
    """[P] rows that come from each part for a sum over the edges that end in ``part``.

    ``src``, ``dst``: [E] rows inside their parts, grouped by the source's part, with bounds
    ``offsets`` [P + 1]; ``num_src``: rows of each part.
    """
    counts = np.zeros(len(num_src), dtype=np.int64)
    for peer, (low, high) in enumerate(pairwise(offsets)):
        if peer != part:
            ends = src[low:high], dst[low:high]
            counts[peer] = cover_size(*ends, pulled_sources(*ends, num_src[peer]))
    return counts
