"""How good a cut is: sizes of the parts and rows between them, from a graph and an assignment."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sar.partition.arrays import GraphArrays
from sar.partition.compiled import compiled
from sar.partition.cover import count_fewest
from sar.partition.methods.graph import train_nodes
from sar.partition.progress import Counter, Progress, blocks, silent

Counts = NDArray[np.int64]
_WORD = 64  # parts whose bits one word holds, where there are many


@dataclass(frozen=True, eq=False)
class CutQuality:
    """Sizes of P parts; all arrays are int64.

    Attributes:
        graph_name, num_etypes: of the graph.
        nodes: [P] inner nodes. typed_nodes: the same of each node type.
        edges: [P] edges that end in the part. cut_edges: [P] those that start in another one.
        halo: [P] different nodes of other parts in which the part's edges start.
        boundary: [P] inner nodes that some other part needs.
        training: [P] nodes of ``train_mask``; ``None`` where no node type has one.
        rows: [P, P] halo rows that part p receives from part q, at [p, q]; zero where p is q.
        fewest: [P, P] rows that travel for a sum over each edge type where partial sums may; added
            up over edge types. ``None`` where it was not asked for.
    """

    graph_name: str
    num_etypes: int
    nodes: Counts
    typed_nodes: dict[str, Counts]
    edges: Counts
    cut_edges: Counts
    halo: Counts
    boundary: Counts
    training: Counts | None
    rows: Counts
    fewest: Counts | None = None

    @property
    def num_parts(self) -> int:
        return len(self.nodes)

    @property
    def cut_share(self) -> float:
        return int(self.cut_edges.sum()) / max(1, int(self.edges.sum()))

    @property
    def node_balance(self) -> float:
        return balance(self.nodes)

    @property
    def edge_balance(self) -> float:
        return balance(self.edges)

    @property
    def halo_balance(self) -> float:
        return balance(self.halo)

    @property
    def boundary_balance(self) -> float:
        return balance(self.boundary)

    @property
    def train_balance(self) -> float | None:
        return None if self.training is None else balance(self.training)

    def to_dict(self) -> dict:
        """JSON-able values under the keys that :func:`sar.partition.summary.summarize` has."""
        columns = {
            "num_nodes": self.nodes, "num_edges": self.edges, "cut_edges": self.cut_edges,
            "halo_nodes": self.halo, "boundary_nodes": self.boundary, "train_nodes": self.training,
        }  # fmt: skip
        sums = {key: None if one is None else int(one.sum()) for key, one in columns.items()}
        rows = {"halo": self.rows.tolist()}
        if self.fewest is not None:
            rows["fewest"] = self.fewest.tolist()
        return {
            "graph_name": self.graph_name,
            "num_parts": self.num_parts,
            **sums,
            "nodes": {
                ntype: {"total": int(one.sum()), "per_part": one.tolist()}
                for ntype, one in self.typed_nodes.items()
            },
            "parts": [
                {key: None if one is None else int(one[part]) for key, one in columns.items()}
                for part in range(self.num_parts)
            ],
            "rows": rows,
            "node_balance": self.node_balance,
            "edge_balance": self.edge_balance,
            "halo_balance": self.halo_balance,
            "boundary_balance": self.boundary_balance,
            "train_balance": self.train_balance,
        }


def balance(counts: ArrayLike) -> float:
    """Largest over mean; 1.0 for parts that are all empty."""
    sizes = np.asarray(counts)
    total = int(sizes.sum())
    return int(sizes.max()) * len(sizes) / total if total else 1.0


def measure(
    graph: GraphArrays,
    parts: np.ndarray,
    num_parts: int,
    *,
    cover: bool = False,
    progress: Progress = silent,
) -> CutQuality:
    """Count what ``parts``, integers [N], types in the order of ``graph.num_nodes``, makes of
    ``graph``.

    Edges are read once, in blocks. Memory is about 2 + P / 8 bytes per node: its part (two bytes
    for more than 256 parts), a bit for each part that needs it, and training nodes. ``cover`` also
    counts the fewest rows of sums: about 100 bytes per cut edge, and longer than all the rest.

    Raises ValueError for parts of a wrong length or out of range, and for edges of unknown nodes.
    """
    owner = _narrow(parts, graph.total_nodes, num_parts)
    words = -(-num_parts // _WORD)
    bits = next(size for size in (8, 16, 32, _WORD) if num_parts <= size or size == _WORD)
    needed = np.zeros(len(owner) * words, dtype=f"uint{bits}")
    edges, cut = np.zeros((2, num_parts), dtype=np.int64)
    counter = Counter(progress, "measuring the cut", graph.total_edges)
    for etype, low, src, dst in graph.edge_blocks(counter):
        ends = [_own(graph, owner, etype[0]), _own(graph, owner, etype[2])]
        first = graph.node_offsets()[etype[0]] * words
        wrong = _mark(src, dst, *ends, needed[first:], words, edges, cut)
        if wrong >= 0:
            raise ValueError(
                f"edges[{etype!r}]: edge {low + wrong} runs from {src[wrong]} to {dst[wrong]}, "
                f"expected ids below {len(ends[0])} and {len(ends[1])}"
            )
    rows = np.zeros((num_parts, num_parts), dtype=np.int64)
    boundary = np.zeros(num_parts, dtype=np.int64)
    _count_rows(owner, needed, words, rows, boundary)
    train = train_nodes(graph)
    typed = {ntype: _histogram(_own(graph, owner, ntype), num_parts) for ntype in graph.num_nodes}
    return CutQuality(
        graph_name=graph.name,
        num_etypes=len(graph.edges),
        nodes=np.sum([*typed.values()], axis=0),
        typed_nodes=typed,
        edges=edges,
        cut_edges=cut,
        halo=rows.sum(1),
        boundary=boundary,
        training=None if train is None else _histogram(owner[train], num_parts),
        rows=rows,
        fewest=_fewest(graph, owner, num_parts) if cover else None,
    )


def _narrow(parts: np.ndarray, num_nodes: int, num_parts: int) -> np.ndarray:
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, expected 1 or more")
    if parts.shape != (num_nodes,) or parts.dtype.kind not in "iu":
        raise ValueError(
            f"parts are {parts.dtype} of shape {parts.shape}, expected integers, one for each of "
            f"{num_nodes} nodes"
        )
    owner = np.empty(num_nodes, dtype=np.min_scalar_type(num_parts - 1))
    for low, high in blocks(num_nodes):
        wrong = np.flatnonzero((parts[low:high] < 0) | (parts[low:high] >= num_parts))
        if len(wrong):
            node = low + int(wrong[0])
            raise ValueError(f"parts[{node}] is {parts[node]}, expected 0 to {num_parts - 1}")
        owner[low:high] = parts[low:high]
    return owner


def _own(graph: GraphArrays, owner: np.ndarray, ntype: str) -> np.ndarray:
    first = graph.node_offsets()[ntype]
    return owner[first : first + graph.num_nodes[ntype]]


@compiled
def _mark(src, dst, src_owner, dst_owner, needed, words, edges, cut):
    """Add to each part's ``edges`` and ``cut`` ones, and set in the words of each source,
    ``needed`` [N * words], the bits of parts that need it. Returns the first edge with unknown
    ends, or -1."""
    for edge in range(len(src)):
        start, end = src[edge], dst[edge]
        if start < 0 or start >= len(src_owner) or end < 0 or end >= len(dst_owner):
            return edge
        part = np.int64(dst_owner[end])
        edges[part] += 1
        if src_owner[start] != part:
            cut[part] += 1
            needed[start * words + (part >> 6)] |= np.uint64(1) << np.uint64(part & 63)
    return -1


@compiled
def _count_rows(owner, needed, words, rows, boundary):
    """Add each node's bits to ``rows`` [P, P], and nodes with bits to ``boundary`` [P]."""
    for node in range(len(owner)):
        own, any_bit = owner[node], False
        for word in range(words):
            bits = np.uint64(needed[node * words + word])
            part = word * 64
            any_bit |= bits != 0
            while bits != 0:
                rows[part, own] += np.int64(bits & np.uint64(1))
                bits >>= np.uint64(1)
                part += 1
        boundary[own] += np.int64(any_bit)


def _histogram(owner: np.ndarray, num_parts: int) -> Counts:
    """[P] how often each part is met; blocks, as numpy widens what it counts."""
    runs = (np.bincount(owner[low:high], minlength=num_parts) for low, high in blocks(len(owner)))
    return sum(runs, np.zeros(num_parts, dtype=np.int64))


def _fewest(graph: GraphArrays, owner: np.ndarray, num_parts: int) -> Counts:
    """[P, P] ``CutQuality.fewest``; edge type after edge type, its cut edges in memory."""
    found = np.zeros((num_parts, num_parts), dtype=np.int64)
    for etype, pair in graph.edges.items():
        one = GraphArrays(graph.name, graph.num_nodes, {etype: pair})
        sources, ends = _own(graph, owner, etype[0]), _own(graph, owner, etype[2])
        cut = [np.empty((2, 0), np.int64)]
        for _, _, src, dst in one.edge_blocks():
            cut.append(np.stack([src, dst])[:, sources[src] != ends[dst]])
        src, dst = np.concatenate(cut, axis=1)
        order = np.lexsort((sources[src], ends[dst]))
        src, dst = src[order], dst[order]
        for part, (low, high) in enumerate(pairwise(_bounds(ends[dst], num_parts))):
            own, offsets = src[low:high], _bounds(sources[src[low:high]], num_parts)
            local, sizes = np.empty(len(own), dtype=np.int64), []
            for first, last in pairwise(offsets):
                rows, local[first:last] = np.unique(own[first:last], return_inverse=True)
                sizes.append(len(rows))
            found[part] += count_fewest(local, dst[low:high], offsets, sizes, part)
    return found


def _bounds(parts: np.ndarray, num_parts: int) -> list[int]:
    """[P + 1] where each part begins among ascending ``parts``, and the end."""
    return np.searchsorted(parts, np.arange(num_parts + 1)).tolist()
