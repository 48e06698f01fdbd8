"""Pairs of nodes without an edge, for link prediction, by keyed random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.errors import SarError
from sar.kernels.jit import STEP, mix
from sar.kernels.sampling import hashed
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.options import check_names
from sar.sampling.topology import node_times, source_ids, target_ids

_TRIES = 100
_ENDS = {"src": 1, "dst": 2}  # tells the random numbers of the two apart
_WEIGHT_BITS = 62  # of the sum of all weights
_SAMPLES = 64  # of a rank, for each rank, to find out who keeps which range
_TIME, _KEY, _ID, _UNITS = range(4)
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@dataclass(frozen=True)
class NegativeSampling:
    """How pairs without an edge are drawn.

    Attributes:
        mode: ``"binary"``: pairs beside the seed edges, labelled 0; ``"triplet"``: other
            destinations for the source of each seed edge.
        amount: pairs for each seed edge; a whole number for triplets.
        src_weight, dst_weight: names of node features that chances are in proportion to; all
            nodes alike by default.
        keep_src: binary pairs keep the source of their seed edge (per source); else both ends
            are drawn (global).
        strict: no pair that the relation has.
    """

    mode: str = "binary"
    amount: float = 1
    src_weight: str | None = None
    dst_weight: str | None = None
    keep_src: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("binary", "triplet"):
            raise ValueError(f"neg_sampling: got {self.mode!r}, expected 'binary' or 'triplet'")
        if isinstance(self.amount, bool) or not isinstance(self.amount, int | float):
            raise TypeError(f"amount: got {type(self.amount).__name__}, expected a number")
        if not 0 < self.amount < 1e6:
            raise ValueError(f"amount: got {self.amount}, expected more than 0, less than 1e6")
        if self.is_triplet and self.amount != int(self.amount):
            raise ValueError(f"amount: got {self.amount}, expected a whole number for triplets")

    @property
    def is_triplet(self) -> bool:
        """Whether destinations alone are drawn, for the source of each seed edge."""
        return self.mode == "triplet"

    @property
    def keeps_src(self) -> bool:
        """Whether sources are those of the seed edges."""
        return self.keep_src or self.is_triplet


def negative_sampling(given: Any) -> NegativeSampling | None:
    """From a mode's name, a dictionary, or an object with these attributes, such as PyG's."""
    if given is None or isinstance(given, NegativeSampling):
        return given
    if isinstance(given, str):
        return NegativeSampling(given)
    if isinstance(given, Mapping):
        check_names(given, NegativeSampling, "neg_sampling: ")
        return NegativeSampling(**given)
    if not hasattr(given, "mode"):
        raise TypeError(
            f"neg_sampling: got {type(given).__name__}, expected 'binary', 'triplet' or a "
            "NegativeSampling"
        )
    mode = getattr(given.mode, "value", given.mode)
    for name in ("src_weight", "dst_weight"):
        if not isinstance(getattr(given, name, None), str | None):
            raise TypeError(f"neg_sampling: got {name} as a tensor, expected a feature's name")
    return NegativeSampling(mode, given.amount, given.src_weight, given.dst_weight)


class Negatives:
    """Draws pairs for seed edges of one relation; made collectively.

    A pair is a function of (seed, step, the seed edge's key, its number among the pairs of that
    edge). Ranks draw what one process draws for the seed edges of all of them.

    Args:
        time_attr: of nodes; then no node is drawn that came later than the seed edge's time.

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
        if options.keeps_src:
            del ends["src"]
        columns = dict[str, tuple[Tensor | None, Tensor | None]]()
        with exchange.group.agreed("LinkNeighborLoader"):
            for end, ntype in ends.items():
                time = None if time_attr is None else node_times(data, ntype, time_attr)
                columns[end] = _weights(data, ntype, getattr(options, f"{end}_weight")), time
        self._nodes = {e: Population(data, n, exchange, *columns[e]) for e, n in ends.items()}
        self._aged = {end for end, (_, time) in columns.items() if time is not None}
        self._edges = EdgeSet(data, etype, exchange) if options.strict else None
        for end, one in self._nodes.items():
            if one.total == 0:  # on all ranks
                raise ValueError(f"{end}_weight: got no node above 0, expected some")

    def draw(
        self, src: Tensor, keys: Tensor, number: Tensor, time: Tensor, step: int
    ) -> tuple[Tensor, Tensor]:
        """Sources and destinations, int64 [m], of pairs; collective.

        Args:
            src: int64 [m] the sources of the seed edges, which are kept where the options say so.
            keys: int64 [m] of the seed edges.
            number: int64 [m] which of the pairs of its seed edge each is.
            time: int64 [m] of the seed edges.
        """
        ends = {"src": src.clone(), "dst": torch.empty_like(src)}
        limits = {end: self._limits(end, time) for end in self._nodes}
        left, attempt, is_done = torch.arange(len(src)), 0, False
        while not is_done:
            for end, nodes in self._nodes.items():
                base = hashed(*self._words, step, _ENDS[end], attempt)
                at = _below(limits[end][left], base, keys[left], number[left])
                ends[end][left] = nodes.pick(at)
            if self._edges is not None:
                left = left[self._edges.has(ends["src"][left], ends["dst"][left])]
            attempt += 1
            is_done = self._edges is None or not self._some_left(left, attempt)
        return ends["src"], ends["dst"]

    def _limits(self, end: str, time: Tensor) -> Tensor:
        """int64 [m] how many numbers pick nodes in time."""
        nodes = self._nodes[end]
        if end not in self._aged:
            return torch.full_like(time, nodes.total)
        limits = nodes.until(time)
        if (limits == 0).any():
            early = int(time[limits == 0][0])
            raise SarError(f"neg_sampling: no node came at time {early} or before")
        return limits

    def _some_left(self, left: Tensor, attempt: int) -> bool:
        """Whether some rank has pairs that the relation has."""
        if attempt == _TRIES and len(left):
            raise SarError(
                f"neg_sampling: {_TRIES} draws for {len(left)} pairs were all edges of "
                f"{self._etype}; expected strict=False for a relation with so many"
            )
        return bool(self._exchange.counts(len(left)).any())


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


def _weights(data: PartitionData, ntype: str, name: str | None) -> Tensor | None:
    if name is None:
        return None
    full = f"{ntype}/{name}"
    if full not in data.node_features:
        there = [key for key in data.node_features if key.startswith(f"{ntype}/")]
        raise ValueError(f"neg_sampling: got weight {name!r}, expected one of {there or 'none'}")
    weights = data.node_features[full].double()
    wrong = ~(weights.isfinite() & (weights >= 0))
    if weights.dim() != 1 or wrong.any():
        raise ValueError(
            f"neg_sampling: {full!r} is {list(weights.shape)}, {int(wrong.sum())} of them below 0 "
            "or not finite; expected 0 or more, one each"
        )
    return weights


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
    """The nodes of a type by time and key, spread over the ranks; made collectively.

    Node i covers as many numbers as its weight, in whole numbers of which sums do not depend on the
    cut; weights below 2**-62 of the sum or so count as 0. Which node a number picks is a function
    of keys, times and weights alone. 24 bytes a node, 8 more with weights.

    Args:
        weight: float64 [n] of this part's nodes, 0 or more; 1 by default.
        time: int64 [n] when they came; all at once by default.

    Attributes:
        total: the numbers that there are.
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
        time = torch.zeros_like(keys) if time is None else time
        rows, splitters = _sorted(torch.stack([time, keys, own, units], dim=1), exchange)
        self._ids, self._times = rows[:, _ID].contiguous(), rows[:, _TIME].contiguous()
        self._ends = rows[:, _UNITS].cumsum(0)
        sums = torch.cat(exchange.group.all_gather(_last(self._ends)))
        self._starts = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
        self._first_times = splitters[:, _TIME].contiguous()
        self.total = int(self._starts[-1])

    def until(self, time: Tensor) -> Tensor:
        """int64 [m] how many numbers pick nodes that came at int64 [m] times or before; collective.

        They are the first ones.
        """
        # A rank keeps the nodes from its splitter on, so the last that begins in time knows.
        who = torch.searchsorted(self._first_times, time, right=True)
        bounds = torch.arange(self._exchange.group.size + 1)
        below = self._ends.new_zeros(len(self._ends) + 1)
        below[1:] = self._ends

        def answer(one: Tensor) -> Tensor:
            return below[torch.searchsorted(self._times, one[:, 1].contiguous(), right=True)]

        return self._starts[who] + self._exchange.ask(who, bounds, answer, time)

    def pick(self, at: Tensor) -> Tensor:
        """int64 [m] ids, as :func:`id_bounds` numbers them, of the nodes at int64 [m] numbers
        below ``total``; collective."""
        who = torch.searchsorted(self._starts, at, right=True) - 1
        bounds = torch.arange(self._exchange.group.size + 1)

        def answer(one: Tensor) -> Tensor:
            return self._ids[torch.searchsorted(self._ends, one[:, 1].contiguous(), right=True)]

        return self._exchange.ask(who, bounds, answer, at - self._starts[who])


def _last(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])[-1:]


def _sorted(rows: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """This rank's share of all ranks' rows in order of time and key, and where others' begin.

    Samplesort: each rank sends evenly spaced ones of its rows, and all cut what comes evenly.
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
