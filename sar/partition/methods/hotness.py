"""Nodes lie where training draws them most often, as in GraphLearn-for-PyTorch.

After its ``FrequencyPartitioner`` (github.com/alibaba/graphlearn-for-pytorch), which takes from a
sampled trial how probably each part's training nodes draw a node, and gives a node to the part
whose probability is largest against the others'. Here the probabilities are computed, not drawn.

Note [Draws]
    r0[n] = min(1, batch / seeds of p) for the seeds of part p, else 0
    l[src] = sum over edges src -> dst of r_k[dst] min(1, fanout_k / in-edges of dst in the relation)
    r_{k+1}[n] = 1 - exp(-l[n]);  without a batch size r0 is 1, and r_{k+1} = l
    hot[n, p] = 1 - product over hops of (1 - r_k[n]);  without a batch size the sum of r_k
A draw takes ``fanout`` in-edges of a node without replacement, each as probably. What a batch draws
twice it fetches once: so a node counts by the probability that a batch needs it, many draws from
many seeds taken for independent. Without a batch size it is how often all seeds together reach it,
in expectation, exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sar.partition import npy
from sar.partition.arrays import GraphArrays
from sar.partition.buckets import BLOCK
from sar.partition.compiled import compiled
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.coarsen import NODES_ABOVE, Coarsen
from sar.partition.methods.graph import train_nodes

_FANOUTS, _BATCH = (15, 10, 5), 1024


class Hotness(Method):
    """A cut by :class:`Coarsen` says which part a training node is of; other nodes follow draws.

    Args:
        fanouts: in-edges that a node draws at each hop, in each relation, the seeds first; -1:
            all.
        batch_size: seeds of a batch; ``None``: count how often nodes are reached by all seeds.
        base: the cut that training nodes keep.
    """

    name = "hotness"
    balances = frozenset({"train"})

    def __init__(
        self,
        fanouts: Sequence[int] = _FANOUTS,
        batch_size: int | None = _BATCH,
        base: Method | None = None,
    ) -> None:
        for fanout in fanouts:
            if isinstance(fanout, bool) or not isinstance(fanout, int) or fanout < -1:
                raise ValueError(f"fanouts: got {fanout!r}, expected ints of at least -1")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1, or None")
        self.fanouts, self.batch_size = tuple(fanouts), batch_size
        self.base = base or Coarsen()

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        parts = np.asarray(self.base.assign(graph, options)).astype(np.int16)
        train = train_nodes(graph)
        seeds = np.ones(len(parts), bool) if train is None or not train.any() else train
        hot = draws(graph, parts, seeds, options.num_parts, self.fanouts, self.batch_size, options.scratch)
        place(hot, parts, seeds, list(graph.num_nodes.values()))
        return parts


def draws(
    graph: GraphArrays,
    parts: np.ndarray,
    seeds: np.ndarray,
    num_parts: int,
    fanouts: Sequence[int],
    batch_size: int | None,
    folder: Path,
) -> np.ndarray:
    """float32 [N, P] in a mapped file: how often each part's seeds draw a node, see Note [Draws].

    Three such files, 12 P bytes a node; in memory 4 bytes a node of the largest type.
    """
    shape = (graph.total_nodes, num_parts)
    hot, now, new = (npy.create(folder / f"{n}.npy", np.float32, shape) for n in ("hot", "now", "new"))
    sizes = np.bincount(parts[seeds], minlength=num_parts)
    first = np.ones(num_parts, np.float32)
    if batch_size is not None:
        first = np.minimum(1, batch_size / np.maximum(sizes, 1)).astype(np.float32)
    _begin(parts, seeds, first, hot, now)
    degrees = np.zeros(max(graph.num_nodes.values()), np.int32)
    offsets = graph.node_offsets()
    for fanout in fanouts:
        for (src_type, _, dst_type), (src, dst) in graph.edges.items():
            degrees[:] = 0
            for low in range(0, len(dst), BLOCK):
                _count(dst[low : low + BLOCK].numpy(), degrees)
            for low in range(0, len(dst), BLOCK):
                ends = src[low : low + BLOCK].numpy(), dst[low : low + BLOCK].numpy()
                _spread(*ends, offsets[src_type], offsets[dst_type], degrees, fanout, now, new)
        _end_hop(batch_size is not None, hot, now, new)
    del now, new
    for name in ("now", "new"):
        (folder / f"{name}.npy").unlink()
    return hot


def place(hot: np.ndarray, parts: np.ndarray, stays: np.ndarray, type_sizes: list[int]) -> None:
    """Change ``parts``, int16 [N], to where nodes are hottest and there is room, the most decided first."""
    num_parts = hot.shape[1]
    first = 0
    for size in type_sizes:
        own = slice(first, first + size)
        first += size
        mean = size / num_parts
        cap = max(int(NODES_ABOVE * mean), -(-size // num_parts))
        room = cap - np.bincount(parts[own][stays[own]], minlength=num_parts)
        lead = np.empty(size, np.float32)
        _lead(hot[own], lead)
        np.negative(lead, out=lead)
        order = lead.argsort(kind="stable")
        _place(order, hot[own], stays[own], parts[own], room)


@compiled
def _begin(parts, seeds, first, hot, now):
    for n in range(len(parts)):
        if seeds[n]:
            hot[n, parts[n]] = now[n, parts[n]] = first[parts[n]]


@compiled
def _count(ids, counts):
    for i in range(len(ids)):
        counts[ids[i]] += 1


@compiled
def _spread(src, dst, src_offset, dst_offset, degrees, fanout, now, new):
    num_parts = now.shape[1]
    for i in range(len(src)):
        degree = degrees[dst[i]]
        share = np.float32(1)
        if 0 <= fanout < degree:
            share = np.float32(fanout / degree)
        u, v = src[i] + src_offset, dst[i] + dst_offset
        for p in range(num_parts):
            new[u, p] += now[v, p] * share


@compiled
def _end_hop(in_batches, hot, now, new):
    for n in range(len(hot)):
        for p in range(hot.shape[1]):
            reached = new[n, p]
            new[n, p] = 0
            if in_batches:
                reached = np.float32(-np.expm1(-reached))
                hot[n, p] += (1 - hot[n, p]) * reached
            else:
                hot[n, p] += reached
            now[n, p] = reached


@compiled
def _lead(hot, lead):
    """How much hotter the hottest part is than the next."""
    for n in range(len(hot)):
        best = second = np.float32(0)
        for p in range(hot.shape[1]):
            value = hot[n, p]
            if value > best:
                best, second = value, best
            elif value > second:
                second = value
        lead[n] = best - second


@compiled
def _place(order, hot, stays, parts, room):
    num_parts = len(room)
    for i in range(len(order)):
        n = order[i]
        if stays[n]:
            continue
        to = -1
        for p in range(num_parts):
            if room[p] <= 0:
                continue
            if to < 0 or hot[n, p] > hot[n, to]:
                to = p
            elif hot[n, p] == hot[n, to] and (p == parts[n] or (to != parts[n] and room[p] > room[to])):
                to = p
        parts[n] = to
        room[to] -= 1
