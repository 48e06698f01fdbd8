"""Makes a cut better and balanced: nodes move, one after another, to where their neighbors are.

A part is charged for what it bears of each kind (nodes of a type, edges, training nodes, halo
rows). A node gains by a move the neighbors that it gets, and pays the difference of prices, which
are proportional to how far a part is above the mean (a Lagrangian relaxation whose multipliers
follow the loads). The last sweeps are strict: nothing moves into a part that has no room for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sar.partition.compiled import compiled, inlined
from sar.partition.methods.graph import CutGraph
from sar.partition.progress import Counter, Progress, silent

_PRICED_SWEEPS, _STRICT_SWEEPS = 3, 8
_FEW = 50  # of the nodes one moves: another sweep is not worth its time
# Of an average node's neighbors, what a part takes for it at twice the mean. Higher prices move
# what need not move.
_FACTOR = 0.25
# How often prices double where a bound is still missed: dense clusters that share few edges with
# others leave their part for nothing less. Not those of halo rows: cutting makes more of them.
_RISES = 8
_CANDIDATES = 4  # parts for which a node's new halo rows are counted
_WORD = 64


@dataclass(frozen=True)
class Bounds:
    """How far above the mean a part may be, as a factor; ``None``: not balanced.

    ``nodes`` of each type, ``edges``: in-edges, ``train``: training nodes, ``halo``: received rows.
    """

    nodes: float = 1.03
    edges: float | None = None
    train: float | None = None
    halo: float | None = None


class _Loads:
    """What parts bear, a row a kind: node types, in-edges, training nodes, halo rows.

    ``values``: float64 [kinds, P]. ``caps``: most of a kind in a part; for halo rows a factor of
    the current mean.
    """

    def __init__(
        self,
        graph: CutGraph,
        parts: np.ndarray,
        num_parts: int,
        bounds: Bounds,
        progress: Progress,
    ) -> None:
        self._graph, self._parts, self._progress, self._sweeps = graph, parts, progress, 0
        self.num_types = int(graph.types.max(initial=0)) + 1
        self.values = np.zeros((self.num_types + 3, num_parts), np.float64)
        train = np.zeros(0, bool) if graph.train is None else graph.train
        self._train = train if bounds.train is not None else train[:0]
        _count_loads(parts, graph.types, graph.in_edges, self._train, self.values)
        words = -(-num_parts // _WORD) if bounds.halo is not None else 0
        self._needs = np.zeros((graph.num_nodes if words else 0, words), np.uint64)
        self._count_halo()
        factors = [bounds.nodes] * self.num_types + [bounds.edges, bounds.train, bounds.halo]
        self._means = np.maximum(self.values.mean(axis=1), 1e-9)
        self.caps = np.array(
            [np.inf if f is None else f * mean for f, mean in zip(factors, self._means)]
        )
        self.caps[-1] /= self._means[-1]
        # Few nodes cannot be shared better, nor a hub's edges: its part bears others' as well.
        least, hub = np.ceil(self.values.mean(axis=1)), float(graph.in_edges.max(initial=0))
        if hub > self._means[-3] / 2:
            least[-3] = hub + self._means[-3] - hub / num_parts
        self.caps[:-1] = np.maximum(self.caps[:-1], least[:-1])
        degree = len(graph.rows.values) / max(graph.num_nodes, 1)
        units = [degree] * self.num_types + [1.0, degree, 1.0]
        self._units = np.array([0.0 if f is None else u for f, u in zip(factors, units)])

    def is_above(self) -> bool:
        """Whether a part bears more than it may of anything but halo rows."""
        return bool((self.values[:-1] > self.caps[:-1, None]).any())

    def _count_halo(self) -> None:
        """Count halo rows of each part exactly; a sweep follows them only in part."""
        if len(self._needs):
            rows = self._graph.rows
            self._needs[:] = 0
            self.values[-1] = 0
            for run in self._runs("counting halo rows"):
                _count_needs(*rows, *run, self._parts, self._needs, self.values[-1])

    def _runs(self, what: str) -> Iterator[tuple[int, int]]:
        graph = self._graph
        return graph.rows.runs(Counter(self._progress, what, graph.num_nodes))

    def sweep(self, factor: float, *, strict: bool) -> bool:
        """Move nodes, each once at most; returns whether another sweep is worth its time."""
        graph, num_parts = self._graph, self.values.shape[1]
        slopes = factor * self._units / self._means
        slopes[-1] = min(slopes[-1], _FACTOR * self._units[-1] / self._means[-1])
        room = (
            np.zeros(num_parts, np.int32), np.zeros(num_parts, np.int32),
            np.zeros(_CANDIDATES, np.float64), np.zeros(_CANDIDATES, np.int32),
            np.zeros(_CANDIDATES, np.int32),
        )  # fmt: skip
        self._sweeps, moved = self._sweeps + 1, 0
        for run in self._runs(f"refining the cut, sweep {self._sweeps}"):
            moved += _sweep(
                *graph.rows, *run, self._parts, graph.types, graph.in_edges, self._train,
                self._needs, self.values, self._means, slopes, self.caps, strict, *room,
            )  # fmt: skip
        self._count_halo()
        return moved > graph.num_nodes // _FEW


def refine(
    graph: CutGraph,
    parts: np.ndarray,
    num_parts: int,
    bounds: Bounds,
    progress: Progress = silent,
) -> None:
    """Change ``parts``, int16 [N], in place; the bounds of node types hold at the end.

    Memory: 8 bytes a node for each 64 parts where halo rows are balanced.
    """
    loads = _Loads(graph, parts, num_parts, bounds, progress)
    factor = 0.0
    if bounds != Bounds(bounds.nodes) or loads.is_above():
        factor = _FACTOR
        for _ in range(_PRICED_SWEEPS):
            if not loads.sweep(factor, strict=False):
                break
        for _ in range(_RISES if loads.is_above() else 0):
            factor *= 2
            loads.sweep(factor, strict=False)
            if not loads.is_above():
                break
    for _ in range(_STRICT_SWEEPS):
        if not loads.sweep(factor, strict=True):
            break
    for kind in range(loads.num_types):
        most = int(loads.caps[kind])
        if loads.values[kind].max() > most:
            fit(parts, graph.types == kind, most, num_parts)


def fit(parts: np.ndarray, counted: np.ndarray, most: int, num_parts: int) -> None:
    """Move ``counted``, bool [N], nodes above ``most`` to the emptiest parts, last ids first."""
    sizes = np.bincount(parts[counted], minlength=num_parts)
    for part in np.flatnonzero(sizes > most).tolist():
        for node in np.flatnonzero(counted & (parts == part))[most:].tolist():
            parts[node] = to = int(sizes.argmin())
            sizes[part] -= 1
            sizes[to] += 1


@inlined
def _bears(u, types, in_edges, train, loads):
    """Kinds of load that ``u`` puts on a part, and how much of each."""
    edges, trained = loads.shape[0] - 3, len(train) > 0 and train[u]
    return (np.int64(types[u]), edges, edges + 1), (1, np.int64(in_edges[u]), np.int64(trained))


@compiled
def _count_loads(parts, types, in_edges, train, loads):
    for u in range(len(parts)):
        kinds, amounts = _bears(u, types, in_edges, train, loads)
        for k in range(3):
            loads[kinds[k], parts[u]] += amounts[k]


@compiled
def _count_needs(indptr, values, first, last, parts, needs, halo):
    for u in range(first, last):
        own = parts[u]
        for at in range(indptr[u], indptr[u + 1]):
            p = parts[values[at]]
            if p != own:
                word, bit = p >> 6, np.uint64(1) << np.uint64(p & 63)
                if not needs[u, word] & bit:
                    needs[u, word] |= bit
                    halo[p] += 1


@compiled
def _price(p, new, kinds, amounts, loads, means, slopes):
    """What part ``p`` charges for a node, halo rows left out; ``new``: 0 if it has the node, else
    1.

    Charged by its load with the node: else a hub, which makes any part heavy, moved in each sweep.
    """
    total = 0.0
    for k in range(3):
        kind, amount = kinds[k], amounts[k]
        total += slopes[kind] * (loads[kind, p] + new * amount - means[kind]) * amount
    return total


@compiled
def _is_above(p, new, kinds, amounts, loads, caps):
    """Whether a part is above a bound that a node adds to, or would be with a new one."""
    for k in range(3):
        matters = amounts[k] or (new and k < 2)
        if matters and loads[kinds[k], p] + new * amounts[k] > caps[kinds[k]]:
            return True
    return False


@compiled
def _fresh(indptr, values, u, p, parts, needs):
    """Neighbors of ``u`` that part ``p`` would newly have to receive."""
    found = 0
    word, bit = p >> 6, np.uint64(1) << np.uint64(p & 63)
    for at in range(indptr[u], indptr[u + 1]):
        v = values[at]
        if parts[v] != p and not needs[v, word] & bit:
            found += 1
    return found


@compiled
def _move_needs(indptr, values, u, own, to, near_own, parts, needs, halo):
    """Update ``needs`` and ``halo`` after ``u`` moved, but for what its old part needs no more.
    Returns the difference of all halo rows."""
    before = halo[to] + halo[own]
    word, bit = to >> 6, np.uint64(1) << np.uint64(to & 63)
    for at in range(indptr[u], indptr[u + 1]):
        v = values[at]
        if parts[v] != to and not needs[v, word] & bit:
            needs[v, word] |= bit
            halo[to] += 1
    if needs[u, word] & bit:
        needs[u, word] &= ~bit
        halo[to] -= 1
    if near_own:
        needs[u, own >> 6] |= np.uint64(1) << np.uint64(own & 63)
        halo[own] += 1
    return halo[to] + halo[own] - before


@compiled
def _sweep(
    indptr, values, first, last, parts, types, in_edges, train, needs, loads, means, slopes, caps,
    strict, count, near, score, best, most_fresh,
):  # fmt: skip
    num_parts, at_halo = len(count), len(means) - 1
    halo, halo_total = loads[at_halo], loads[at_halo].sum()
    moved = 0
    for u in range(first, last):
        own = parts[u]
        found = 0
        for at in range(indptr[u], indptr[u + 1]):
            p = parts[values[at]]
            if count[p] == 0:
                near[found] = p
                found += 1
            count[p] += 1
        kinds, amounts = _bears(u, types, in_edges, train, loads)
        to_score = count[own] - _price(own, 0, kinds, amounts, loads, means, slopes)
        everywhere = _is_above(own, 0, kinds, amounts, loads, caps)
        if found == 1 and count[own] and not everywhere:
            count[own] = 0
            continue
        kept, degree, near_own = 0, indptr[u + 1] - indptr[u], count[own]
        for i in range(num_parts if everywhere else found):
            p = i if everywhere else near[i]
            if p == own or (strict and _is_above(p, 1, kinds, amounts, loads, caps)):
                continue
            value = count[p] - _price(p, 1, kinds, amounts, loads, means, slopes)
            kept = _keep(value, p, degree - count[p], score, best, most_fresh, kept)
        for i in range(found):
            count[near[i]] = 0
        halo_mean, to = halo_total / num_parts, own
        if len(needs):
            to_score -= slopes[at_halo] * (halo[own] - halo_mean) * (degree - near_own)
        if strict and everywhere:
            to_score = -1e300
        for i in range(kept):
            p, value = best[i], score[i]
            if len(needs):
                price = slopes[at_halo] * (halo[p] - halo_mean)
                if value + max(0.0, -price) * most_fresh[i] <= to_score:
                    continue
                fresh = _fresh(indptr, values, u, p, parts, needs)
                if strict and fresh > 0 and halo[p] + fresh > caps[at_halo] * halo_mean:
                    continue
                value -= price * fresh
            if value > to_score:
                to, to_score = p, value
        if to != own:
            moved += 1
            for k in range(3):
                loads[kinds[k], own] -= amounts[k]
                loads[kinds[k], to] += amounts[k]
            parts[u] = to
            if len(needs):
                halo_total += _move_needs(indptr, values, u, own, to, near_own, parts, needs, halo)
    return moved


@compiled
def _keep(value, p, most, score, best, most_fresh, kept):
    """Insert a candidate into the few best, in falling order; returns how many there are."""
    at = kept
    if kept == len(score):
        at -= 1
        if value <= score[at]:
            return kept
    else:
        kept += 1
    while at > 0 and score[at - 1] < value:
        score[at], best[at], most_fresh[at] = score[at - 1], best[at - 1], most_fresh[at - 1]
        at -= 1
    score[at], best[at], most_fresh[at] = value, p, most
    return kept
