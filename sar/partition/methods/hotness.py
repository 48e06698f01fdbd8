"""Nodes lie where training draws them most often.

After the ``FrequencyPartitioner`` of GraphLearn-for-PyTorch, which takes from trial epochs how
probably each part's training nodes draw a node. Here the expected numbers are computed, and the
training nodes move as well, to the part that owns most of what they draw; so by turns.

A node draws at hop k, in each relation, ``fanout_k`` of its in-edges without replacement, each
as probably: ``c_k(n) = min(1, fanout_k / in-edges of n)``. Of seeds h_0 (1 for a seed, else 0),
    h_{k+1}[u] = sum over edges u -> v of h_k[v] c_k(v),    reached = h_0 + h_1 + ...
is how often ``u`` is reached. The other way round, with o[u, p] = 1 where part p owns u,
    g_k[v, p] = sum over edges u -> v of c_k(v) (o[u, p] + g_{k+1}[u, p]),    near = g_0
is how many of the nodes that a seed ``v`` draws part p owns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.buckets import count_ids
from sar.partition.column import create_array
from sar.partition.compiled import compiled
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.coarsen import NODES_ABOVE, Coarsen
from sar.partition.methods.graph import train_nodes
from sar.partition.methods.refine import fit
from sar.partition.progress import Counter, Progress, silent

_FANOUTS, _ROUNDS = (15, 10, 5), 4
# A round with so many more draws of other parts' nodes is not taken. What a batch draws twice costs
# once: what is as good but for a hair is often better.
_SLACK = 1.01


class Hotness(Method):
    """Fewer rows of other ranks in sampled batches; for full-batch training take another method.

    A first cut says of which part a training node is (any node, where none has a ``train_mask``).
    Every other node goes to the part whose training nodes reach it most often. Then training nodes
    go where most of what they draw lies and other nodes follow, for some rounds, as long as not
    more draws are of other parts' nodes than before. Those with the largest lead of their first
    choice over the second choose first. What is never drawn stays where the first cut put it, or
    fills up. Every node type is balanced within 3 %, and its training nodes too. The result
    depends on the first cut and the arguments alone.

    Args:
        fanouts: in-edges that a node draws at each hop, in each relation, the seeds first; -1:
            all.
        rounds: how often training nodes move at most; 0: they stay, as in GraphLearn-for-PyTorch.
        base: the first cut; :class:`Coarsen` with training nodes balanced by default.

    Memory: about 24 bytes a node, not while the first cut runs; in files 12 bytes a node and part,
    4 for each node that a relation may end in. Edges are gone through in blocks, once for each hop
    and move of either kind.
    """

    name = "hotness"
    balances = frozenset({"train"})

    def __init__(
        self,
        fanouts: Sequence[int] = _FANOUTS,
        rounds: int = _ROUNDS,
        base: Method | None = None,
    ) -> None:
        for name, values, least in (("fanouts", fanouts, -1), ("rounds", [rounds], 0)):
            for one in values:
                if isinstance(one, bool) or not isinstance(one, int) or one < least:
                    raise ValueError(f"{name}: got {one!r}, expected an int of at least {least}")
        self.fanouts, self.rounds, self.base = tuple(fanouts), rounds, base or Coarsen()

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        sizes, num_parts = list(graph.num_nodes.values()), options.num_parts
        train = train_nodes(graph)
        seeds = np.ones(graph.total_nodes, bool) if train is None or not train.any() else train
        balance = self.base.balances & {"train"} or None
        first = replace(options, balance=balance, unbalanced=None)
        parts = np.array(self.base.assign(graph, first), np.int16)
        for own, most in _rooms(seeds, sizes, num_parts):
            fit(parts[own], seeds[own], most, num_parts)
        draws = Draws(graph, self.fanouts, num_parts, options.scratch, options.progress)
        best, fewest = parts, np.inf
        for number in range(self.rounds + 1):
            if number:
                place(draws.near(parts), parts, seeds, seeds, sizes)
            hot = draws.reached(parts, seeds)
            place(hot, parts, ~seeds, np.ones_like(seeds), sizes)
            remote = _remote(hot, parts)
            if remote > _SLACK * fewest:
                break
            best, fewest = parts.copy(), min(remote, fewest)
        return best


def place(
    values: np.ndarray,
    parts: np.ndarray,
    moving: np.ndarray,
    counted: np.ndarray,
    type_sizes: Sequence[int],
) -> None:
    """Change ``parts``, int16 [N]: ``moving`` nodes go where their ``values``, float32 [N, P], are
    largest and there is room; equal ones leave a node where it is if they can. A part has room for
    the mean of the ``counted`` nodes of each type and 3 % more. Nodes choose in the order of the
    lead of their first choice over the second, then of ids."""
    num_parts = values.shape[1]
    for own, most in _rooms(counted, type_sizes, num_parts):
        room = most - np.bincount(parts[own][counted[own] & ~moving[own]], minlength=num_parts)
        leads = np.empty(own.stop - own.start, np.float32)
        _lead(values[own], leads)
        order = leads.argsort(kind="stable")
        _place(order, values[own], moving[own], parts[own], room)


def _rooms(
    counted: np.ndarray, type_sizes: Sequence[int], num_parts: int
) -> Iterator[tuple[slice, int]]:
    """Of each type, the slice of its nodes, and how many of the counted ones a part may have."""
    first = 0
    for size in type_sizes:
        own = slice(first, first + size)
        first += size
        count = int(counted[own].sum())
        most = max(int(NODES_ABOVE * count / num_parts), -(-count // num_parts))
        yield own, most


@compiled
def _lead(values, leads):
    """Negated lead of each node's largest value over the next."""
    for n in range(len(values)):
        best = second = np.float32(-1)
        for p in range(values.shape[1]):
            value = values[n, p]
            if value > best:
                best, second = value, best
            elif value > second:
                second = value
        leads[n] = second - best


@compiled
def _place(order, values, moving, parts, room):
    for i in range(len(order)):
        n = order[i]
        if not moving[n]:
            continue
        to, best = -1, np.float32(-1)
        for p in range(len(room)):
            if room[p] <= 0:
                continue
            value = values[n, p]
            if value > best or (
                value == best and to != parts[n] and (p == parts[n] or room[p] > room[to])
            ):
                to, best = p, value
        parts[n] = to
        room[to] -= 1


@compiled
def _remote(hot, parts):
    total = 0.0
    for n in range(len(parts)):
        for p in range(hot.shape[1]):
            if p != parts[n]:
                total += hot[n, p]
    return total


class Draws:
    """The sums ``reached`` and ``near`` for all parts at once, in mapped files of ``folder``."""

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
        """float32 [N, P]: how often the ``seeds``, bool [N], that a part owns reach each node;
        valid until the next call, as is the other sum."""
        rows = np.flatnonzero(seeds)
        self._sums[:] = 0
        self._sums[rows, parts[rows]] = 1
        self._now[:] = self._sums
        for fanout in self._fanouts:
            self._new[:] = 0
            for edges in self._relations():
                _forth(*edges, fanout, self._now, self._new)
            self._sums += self._new
            self._now, self._new = self._new, self._now
        return self._sums

    def near(self, parts: np.ndarray) -> np.ndarray:
        """float32 [N, P]: how many of the nodes that a node as a seed draws each part owns."""
        self._now[:] = 0
        for fanout in reversed(self._fanouts):
            self._new[:] = 0
            for edges in self._relations():
                _back(*edges, fanout, parts, self._now, self._new)
            self._now, self._new = self._new, self._now
        return self._now

    def _relations(self) -> Iterator[tuple[np.ndarray, np.ndarray, int, int, np.ndarray]]:
        """Blocks of edges: ids inside their types, first ids of these, in-edges of the ends."""
        offsets = self._graph.node_offsets()
        counter = Counter(self._progress, "following draws", self._graph.total_edges)
        for etype, _, src, dst in self._graph.edge_blocks(counter):
            yield src, dst, offsets[etype[0]], offsets[etype[2]], self._in_edges[etype]


def _in_edges(graph: GraphArrays, path: Path) -> dict[tuple[str, str, str], np.ndarray]:
    """Per relation, int32 [nodes of its destination type] in-edges; all in one mapped file."""
    sizes = [graph.num_nodes[dst_type] for _, _, dst_type in graph.edges]
    counts = np.split(create_array(path, np.int32, (sum(sizes),)), np.cumsum(sizes)[:-1])
    found = dict(zip(graph.edges, counts))
    for etype, _, _, dst in graph.edge_blocks():
        count_ids(dst, 0, found[etype])
    return found


@compiled
def _chance(fanout, in_edges):
    """Probability that a node draws a given one of its in-edges."""
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
