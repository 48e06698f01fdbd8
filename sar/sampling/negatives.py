"""Pairs of nodes without an edge, for link prediction, drawn by keyed random numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sar.errors import SarError
from sar.kernels.jit import STEP, mix
from sar.kernels.sampling import hashed
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.options import NegativeSampling
from sar.sampling.topology import source_ids, target_ids, times_of, weights_of

_TRIES = 100
_ENDS = {"src": 1, "dst": 2}  # tells the random numbers of the two apart
_WEIGHT_BITS = 62  # of the sum of all weights
_SAMPLES = 64  # of a rank, for each rank, to find out who keeps which range
_TIME, _KEY, _ID, _UNITS = range(4)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


class Negatives:
    """Draws pairs for seed edges of one relation; made collectively.

    A pair is a function of (seed, step, the seed edge's key, its number among the pairs of that
    edge). Ranks draw what one process draws for the seed edges of all of them. With ``time_attr``,
    of nodes, no node is drawn that came later than the seed edge's time.

    Raises ``ValueError`` on every rank for weights that are none.
    """

    def __init__(
        self,
        data: PartitionData,
        etype: EType,
        options: NegativeSampling,
        exchange: Exchange,
        seed: int,
        time_attr: str | None = None,
    ) -> None:
        self._exchange, self._etype = exchange, etype
        self._words = seed, data.book.canonical_etypes.index(etype)
        ends = {"src": etype[0], "dst": etype[2]}
        if options.keep_src or options.is_triplet:
            del ends["src"]
        columns = dict[str, list[Tensor | None]]()
        with exchange.group.agreed("LinkNeighborLoader"):
            for end, ntype in ends.items():
                name, told = getattr(options, f"{end}_weight"), "neg_sampling: got weight"
                columns[end] = [
                    None if name is None else weights_of(data, ntype, name, told),
                    None if time_attr is None else times_of(data, ntype, time_attr),
                ]
        self._nodes = {e: Population(data, n, exchange, *columns[e]) for e, n in ends.items()}
        self._edges = EdgeSet(data, etype, exchange) if options.strict else None
        for end, one in self._nodes.items():
            if one.total == 0:  # on all ranks
                raise ValueError(f"{end}_weight: got no node above 0, expected some")

    def draw(
        self, src: Tensor, keys: Tensor, number: Tensor, time: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Sources and destinations, int64 [m], of pairs, of which ``number`` says which of its seed
        edge's each is; sources are kept where the options say so; collective."""
        ends = {"src": src.clone(), "dst": torch.empty_like(src)}
        limits = {end: nodes.until(time) for end, nodes in self._nodes.items()}
        left, attempt, is_done = torch.arange(len(src)), 0, False
        while not is_done:
            for end, nodes in self._nodes.items():
                base = hashed(*self._words, step, _ENDS[end], attempt)
                at = _below(limits[end][left], base, keys[left], number[left])
                ends[end][left] = nodes.pick(at)
            if self._edges is not None:
                left = left[self._edges.has(ends["src"][left], ends["dst"][left])]
            attempt += 1
            if attempt == _TRIES and self._edges is not None and len(left):
                raise SarError(
                    f"neg_sampling: {_TRIES} draws for {len(left)} pairs were all edges of "
                    f"{self._etype}; expected strict=False for a relation with so many"
                )
            is_done = self._edges is None or not self._exchange.counts(len(left)).any()
        return ends["src"], ends["dst"]


def pair_keys(first: Tensor, second: Tensor) -> Tensor:
    """int64 [m], well mixed functions of two int64 [m]."""
    state = mix.py_func(first.numpy().view(np.uint64) * STEP)
    return torch.from_numpy(mix.py_func(state + second.numpy().view(np.uint64)).view(np.int64))


def _below(totals: Tensor, base: int, keys: Tensor, number: Tensor) -> Tensor:
    """int64 [m] random numbers below int64 [m] totals: the high words of products."""
    state = mix.py_func(keys.numpy().view(np.uint64) * STEP + np.uint64(base))
    bits = mix.py_func(state + (number.numpy().view(np.uint64) + np.uint64(1)) * STEP)
    limit = totals.numpy().view(np.uint64)
    high, low = bits >> _32, bits & _LOW
    middle = high * (limit & _LOW) + ((low * (limit & _LOW)) >> _32)
    other = low * (limit >> _32) + (middle & _LOW)
    words = high * (limit >> _32) + (middle >> _32) + (other >> _32)
    return torch.from_numpy(words.view(np.int64))


# ---------------------------------------------------------------- which pairs there are


class EdgeSet:
    """Which pairs of nodes a relation has: 8 bytes an edge of this part."""

    def __init__(self, data: PartitionData, etype: EType, exchange: Exchange) -> None:
        self._exchange, self._width = exchange, int(id_bounds(data.book, etype[0])[-1])
        self._bounds = id_bounds(data.book, etype[2])
        dst = target_ids(data, etype) - int(self._bounds[data.part_id])
        self._pairs = (dst * self._width + source_ids(data, etype)).unique().numpy()

    def has(self, src: Tensor, dst: Tensor) -> Tensor:
        """bool [m] whether there is an edge from ``src`` to ``dst``, int64 [m] ids; collective."""
        return self._exchange.ask(dst, self._bounds, self._answer, src).bool()

    def _answer(self, pairs: Tensor) -> Tensor:
        wanted = (pairs[:, 0] * self._width + pairs[:, 1]).numpy()
        at = np.searchsorted(self._pairs, wanted)
        found = np.append(self._pairs, -1)[at] == wanted
        return torch.from_numpy(found.astype(np.int64))


# ---------------------------------------------------------------- nodes that numbers pick


class Population:
    """The nodes of a type in order of time and key, spread over the ranks; made collectively.

    Node i covers as many numbers as its weight, in whole numbers of which sums do not depend on the
    cut; weights below 2**-62 of the sum or so count as 0. Which node one of the ``total`` numbers
    picks is a function of keys, times and weights alone. 24 bytes a node, 8 more with weights.

    Args:
        weight: float64 [n] of this part's nodes, 0 or more; 1 by default.
        time: int64 [n] when they came; all at once by default.
    """

    def __init__(
        self,
        data: PartitionData,
        ntype: str,
        exchange: Exchange,
        weight: Tensor | None = None,
        time: Tensor | None = None,
    ) -> None:
        self._exchange = exchange
        bounds, keys = id_bounds(data.book, ntype), data.keys.nodes(ntype).long()
        own = torch.arange(len(keys)) + int(bounds[data.part_id])
        total = int(bounds[-1])
        units = torch.ones_like(keys) if weight is None else _units(weight, total, exchange)
        self._is_aged = time is not None
        time = torch.zeros_like(keys) if time is None else time
        rows, splitters = _sorted(torch.stack([time, keys, own, units], dim=1), exchange)
        self._ids, self._times = rows[:, _ID].contiguous(), rows[:, _TIME].contiguous()
        self._ends = rows[:, _UNITS].cumsum(0)
        last = torch.cat([self._ends.new_zeros(1), self._ends])[-1:]
        sums = torch.cat(exchange.group.all_gather(last))
        self._starts = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
        self._first_times = splitters[:, _TIME].contiguous()
        self.total = int(self._starts[-1])

    def until(self, time: Tensor) -> Tensor:
        """int64 [m] how many numbers, the first ones, pick nodes that came at int64 [m] times or
        before; collective. Raises ``SarError`` on this rank where there are none."""
        if not self._is_aged:
            return torch.full_like(time, self.total)
        # A rank keeps the nodes from its splitter on, so the last that begins in time knows.
        who = torch.searchsorted(self._first_times, time, right=True)
        below = torch.cat([self._ends.new_zeros(1), self._ends])
        found = self._starts[who] + self._asked(who, time, self._times, below)
        if len(early := time[found == 0]):
            raise SarError(f"neg_sampling: no node came at time {int(early[0])} or before")
        return found

    def pick(self, at: Tensor) -> Tensor:
        """int64 [m] ids of the nodes at int64 [m] numbers below ``total``; collective."""
        who = torch.searchsorted(self._starts, at, right=True) - 1
        return self._asked(who, at - self._starts[who], self._ends, self._ids)

    def _asked(self, who: Tensor, values: Tensor, ascending: Tensor, table: Tensor) -> Tensor:
        """On ranks ``who``, the row of ``table`` behind all of ``ascending`` up to each value."""

        def answer(one: Tensor) -> Tensor:
            return table[torch.searchsorted(ascending, one[:, 1].contiguous(), right=True)]

        bounds = torch.arange(self._exchange.group.size + 1)
        return self._exchange.ask(who, bounds, answer, values)


def _sorted(rows: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """This rank's share of all ranks' rows in order of time and key, and where others' begin.

    Each rank sends evenly spaced ones of its rows, and all cut what comes evenly (samplesort).
    """
    group, rows = exchange.group, rows[_order(rows)]
    wanted = min(len(rows), _SAMPLES * group.size)
    at = torch.arange(wanted) * len(rows) // max(1, wanted)
    samples = exchange.share(rows[at])
    samples = samples[_order(samples)]
    at = torch.arange(1, group.size) * len(samples) // group.size
    splitters = samples[at.clamp(max=len(samples) - 1)] if len(samples) else rows[:0]
    owner = torch.zeros(len(rows), dtype=torch.int64)
    for one in splitters:
        owner += (rows[:, _TIME] > one[_TIME]) | (
            (rows[:, _TIME] == one[_TIME]) & (rows[:, _KEY] >= one[_KEY])
        )
    sizes = torch.bincount(owner, minlength=group.size)
    mine, _ = exchange.deliver(rows, sizes.tolist())
    return mine[_order(mine)], splitters


def _order(rows: Tensor) -> Tensor:
    order = torch.argsort(rows[:, _KEY], stable=True)
    return order[torch.argsort(rows[order, _TIME], stable=True)]


def _units(weight: Tensor, count: int, exchange: Exchange) -> Tensor:
    """Weights as whole numbers, the largest of all ranks as large as sums allow."""
    largest = weight.max().view(1) if len(weight) else torch.zeros(1, dtype=torch.float64)
    largest = exchange.group.all_reduce(largest.clone(), "max")
    bits = _WEIGHT_BITS - max(1, count).bit_length()
    scaled = weight / largest.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.ldexp(scaled, torch.tensor(bits)).floor().long()
