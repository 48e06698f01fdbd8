"""All nodes of a type as one ordered list, of which numbers pick."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.partition.load import PartitionData
from sar.sampling.owners import ask
from sar.sampling.structure import node_ids
from sar.sampling.swap import Swap

_WEIGHT_BITS = 62  # of the sum of all weights
_SAMPLES = 64  # of a rank, for each rank, to find out who keeps which range
_TIME, _KEY, _ID, _UNITS = range(4)


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
        swap: Swap,
        weight: Tensor | None = None,
        time: Tensor | None = None,
    ) -> None:
        self._swap = swap
        ids, keys = node_ids(data.book, ntype), data.keys.nodes(ntype).long()
        own = torch.arange(len(keys)) + ids.first(data.part_id)
        units = torch.ones_like(keys) if weight is None else _units(weight, ids.total, swap)
        time = torch.zeros_like(keys) if time is None else time
        rows, splitters = _sorted(torch.stack([time, keys, own, units], dim=1), swap)
        self._ids, self._times = rows[:, _ID].contiguous(), rows[:, _TIME].contiguous()
        self._ends = rows[:, _UNITS].cumsum(0)
        sums = torch.cat(swap.group.all_gather(_last(self._ends)))
        self._starts = torch.cat([sums.new_zeros(1), sums.cumsum(0)])
        self._first_times = splitters[:, _TIME].contiguous()
        self.total = int(self._starts[-1])

    def until(self, time: Tensor) -> Tensor:
        """int64 [m] how many numbers pick nodes that came at int64 [m] times or before; collective.

        They are the first ones.
        """
        # A rank keeps the nodes from its splitter on, so the last that begins in time knows.
        who = torch.searchsorted(self._first_times, time, right=True)
        bounds = torch.arange(self._swap.group.size + 1)
        below = self._ends.new_zeros(len(self._ends) + 1)
        below[1:] = self._ends

        def answer(one: Tensor) -> Tensor:
            return below[torch.searchsorted(self._times, one[:, 1].contiguous(), right=True)]

        return self._starts[who] + ask(self._swap, who, bounds, answer, time)

    def pick(self, at: Tensor) -> Tensor:
        """int64 [m] ids, as :func:`node_ids` numbers nodes, of the nodes at int64 [m] numbers below
        ``total``; collective."""
        who = torch.searchsorted(self._starts, at, right=True) - 1
        bounds = torch.arange(self._swap.group.size + 1)

        def answer(one: Tensor) -> Tensor:
            return self._ids[torch.searchsorted(self._ends, one[:, 1].contiguous(), right=True)]

        return ask(self._swap, who, bounds, answer, at - self._starts[who])


def _last(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])[-1:]


def _sorted(rows: Tensor, swap: Swap) -> tuple[Tensor, Tensor]:
    """This rank's share of all ranks' rows in order of time and key, and where others' begin.

    Samplesort: each rank sends evenly spaced ones of its rows, and all cut what comes evenly.
    """
    group, rows = swap.group, rows[_order(rows)]
    wanted = min(len(rows), _SAMPLES * group.size)
    at = torch.arange(wanted) * len(rows) // max(1, wanted)
    samples = swap.share(rows[at])
    samples = samples[_order(samples)]
    at = torch.arange(1, group.size) * len(samples) // group.size
    splitters = samples[at.clamp(max=len(samples) - 1)] if len(samples) else rows[:0]
    owner = torch.zeros(len(rows), dtype=torch.int64)
    for one in splitters:
        owner += (rows[:, _TIME] > one[_TIME]) | (
            (rows[:, _TIME] == one[_TIME]) & (rows[:, _KEY] >= one[_KEY])
        )
    sizes = torch.bincount(owner, minlength=group.size)
    came = swap.sizes(sizes.view(-1, 1)).view(-1).tolist()
    mine = swap.send(rows, sizes.tolist(), came)
    return mine[_order(mine)], splitters


def _order(rows: Tensor) -> Tensor:
    order = torch.argsort(rows[:, _KEY], stable=True)
    return order[torch.argsort(rows[order, _TIME], stable=True)]


def _units(weight: Tensor, count: int, swap: Swap) -> Tensor:
    """Weights as whole numbers, the largest of all ranks as large as sums allow."""
    largest = weight.max().view(1) if len(weight) else torch.zeros(1, dtype=torch.float64)
    largest = swap.group.all_reduce(largest.clone(), "max")
    bits = _WEIGHT_BITS - max(1, count).bit_length()
    scaled = weight / largest.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.ldexp(scaled, torch.tensor(bits)).floor().long()
