"""How often neighbor sampling draws nodes, in expectation, without drawing.

A node draws at hop k, in each relation, ``fanout_k`` of its in-edges without replacement, each
as probably: ``c_k(n) = min(1, fanout_k / in-edges of n)``. Of seeds h_0 (1 for a seed, else 0),
    h_{k+1}[u] = sum over edges u -> v of h_k[v] c_k(v),    reached = h_0 + h_1 + ...
is how often ``u`` is reached. The other way round, with o[u, p] = 1 where part p owns u,
    g_k[v, p] = sum over edges u -> v of c_k(v) (o[u, p] + g_{k+1}[u, p]),    near = g_0
is how many of the nodes that a seed ``v`` draws part p owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.buckets import BLOCK
from sar.partition.column import create_array
from sar.partition.compiled import compiled
from sar.partition.progress import Counter, Progress, silent


class Draws:
    """The two sums above for all parts at once, in mapped files.

    Args:
        graph: its edges are gone through in blocks, once a hop and sum.
        fanouts: of each hop, the seeds' first; -1: all in-edges.
        folder: where the files lie: 12 bytes a node and part, and 4 for each node that a relation
            may end in.
    """

    def __init__(
        self,
        graph: GraphArrays,
        fanouts: Sequence[int],
        num_parts: int,
        folder: Path,
        progress: Progress = silent,
    ) -> None:
        self._graph, self._fanouts, self._progress = graph, tuple(fanouts), progress
        shape = (graph.total_nodes, num_parts)
        self._sums, self._now, self._new = (
            create_array(folder / f"draws-{name}.npy", np.float32, shape)
            for name in ("sums", "now", "new")
        )
        self._in_edges = _in_edges(graph, folder / "draws-in-edges.npy")

    def reached(self, parts: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """float32 [N, P]: how often the seeds that a part owns reach each node.

        Args:
            parts: int [N]. seeds: bool [N].

        The result is good until the next call.
        """
        _begin(parts, seeds, self._sums, self._now)
        for fanout in self._fanouts:
            self._new[:] = 0
            for edges in self._relations():
                _forth(*edges, fanout, self._now, self._new)
            _add(self._sums, self._new)
            self._now, self._new = self._new, self._now
        return self._sums

    def near(self, parts: np.ndarray) -> np.ndarray:
        """float32 [N, P]: how many of the nodes that a node as a seed draws each part owns.

        The result is good until the next call.
        """
        self._now[:] = 0
        for fanout in reversed(self._fanouts):
            self._new[:] = 0
            for edges in self._relations():
                _back(*edges, fanout, parts, self._now, self._new)
            self._now, self._new = self._new, self._now
        return self._now

    def _relations(self) -> Iterator[tuple[np.ndarray, np.ndarray, int, int, np.ndarray]]:
        """Blocks of edges: ids inside their types, where these begin, in-edges of the ends."""
        offsets = self._graph.node_offsets()
        counter = Counter(self._progress, "following draws", self._graph.total_edges)
        for etype, (src, dst) in self._graph.edges.items():
            first, last = offsets[etype[0]], offsets[etype[2]]
            for low in range(0, len(src), BLOCK):
                ends = src[low : low + BLOCK].numpy(), dst[low : low + BLOCK].numpy()
                yield *ends, first, last, self._in_edges[etype]
                counter.add(len(ends[0]))


def _in_edges(graph: GraphArrays, path: Path) -> dict[tuple[str, str, str], np.ndarray]:
    """Per relation, int32 [nodes of its destination type] in-edges; all in one mapped file."""
    sizes = [graph.num_nodes[dst_type] for _, _, dst_type in graph.edges]
    counts = np.split(create_array(path, np.int32, (sum(sizes),)), np.cumsum(sizes)[:-1])
    for (_, dst), own in zip(graph.edges.values(), counts):
        for low in range(0, len(dst), BLOCK):
            _count(dst[low : low + BLOCK].numpy(), own)
    return dict(zip(graph.edges, counts))


@compiled
def _count(ids, counts):
    for i in range(len(ids)):
        counts[ids[i]] += 1


@compiled
def _begin(parts, seeds, sums, now):
    for n in range(len(parts)):
        for p in range(now.shape[1]):
            sums[n, p] = now[n, p] = seeds[n] and parts[n] == p


@compiled
def _add(sums, new):
    for n in range(len(sums)):
        for p in range(sums.shape[1]):
            sums[n, p] += new[n, p]


@compiled
def _chance(fanout, in_edges):
    """That a node draws one of its in-edges."""
    if fanout < 0 or fanout >= in_edges:
        return np.float32(1)
    return np.float32(fanout / in_edges)


@compiled
def _forth(src, dst, first_src, first_dst, in_edges, fanout, now, new):
    for i in range(len(src)):
        u, v, chance = src[i] + first_src, dst[i] + first_dst, _chance(fanout, in_edges[dst[i]])
        for p in range(now.shape[1]):
            new[u, p] += now[v, p] * chance


@compiled
def _back(src, dst, first_src, first_dst, in_edges, fanout, parts, now, new):
    for i in range(len(src)):
        u, v, chance = src[i] + first_src, dst[i] + first_dst, _chance(fanout, in_edges[dst[i]])
        for p in range(now.shape[1]):
            new[v, p] += now[u, p] * chance
        new[v, parts[u]] += chance
