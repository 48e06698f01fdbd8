"""The nodes that batches grow from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.partition.book import PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.options import LoaderOptions
from sar.sampling.owners import Directory, look_up
from sar.sampling.sampler import Sample, Seeds, Trees
from sar.sampling.structure import node_ids
from sar.sampling.swap import Swap
from sar.sampling.topology import NEVER, own_times

InputNodes = None | str | Tensor | tuple[str, Tensor | None]


class NodeInputs:
    """This rank's seeds; made collectively.

    Args:
        given, time: as a :class:`sar.sampling.NeighborLoader` takes them.
        is_own: whether seeds have to be this rank's own nodes.

    Attributes:
        input_type: the type of all seeds.
        input_id: int64 [s], which of the nodes that were given each seed is; where they were dealt
            out, those of rank 0 come first.

    Raises ``ValueError`` and ``TypeError`` on every rank for seeds that do not fit.
    """

    def __init__(
        self,
        data: PartitionData,
        given: InputNodes,
        time: Tensor | None,
        options: LoaderOptions,
        swap: Swap,
        is_own: bool = True,
    ) -> None:
        self._disjoint, error = options.disjoint, None
        try:
            self.input_type, ids = chosen_nodes(given, data, options.original_ids)
            _check_times(data, self.input_type, len(ids), time, options.time_attr)
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = caught
        alike = None
        if error is None:
            alike = {"input_nodes": self.input_type, "input_time": None if time is None else "some"}
        swap.group.agree(error, "NeighborLoader", alike)
        given, ntype = ids, self.input_type
        ids = located(data, ntype, given, options.original_ids, swap, "input_nodes")
        if is_own and not options.rebalance:
            _check_owned(given, ids, data, ntype, swap)
        bounds, keys = node_ids(data.book, ntype).bounds, data.keys.nodes(ntype)
        salt = look_up(swap, ids, bounds, keys)
        own = None if options.time_attr is None else own_times(data, ntype, options.time_attr)
        until = torch.full_like(ids, NEVER) if time is None else time.long().cpu()
        if time is None and own is not None:
            until = look_up(swap, ids, bounds, own)
        columns = torch.stack([ids, salt, until, numbered(ids, options, swap)], dim=1)
        if options.rebalance:
            (columns,) = dealt([columns], swap)
        self._ids, self._salt, self._time, self.input_id = columns.unbind(1)
        if len(self._ids.unique()) != len(self._ids):
            error = ValueError("input_nodes: a node comes several times, expected distinct ones")
        swap.group.agree(error, "NeighborLoader")

    def __len__(self) -> int:
        return len(self._ids)

    def seeds(self, chosen: Tensor, step: int) -> tuple[Seeds, Callable[[Sample], dict[str, Any]]]:
        """What a batch grows from, and what tells of its inputs when it has grown."""
        told: dict[str, Any] = {"input_id": self.input_id[chosen]}
        ids = {self.input_type: self._ids[chosen]}
        if not self._disjoint:
            return Seeds(ids, step), lambda sample: told
        of, time = {self.input_type: torch.arange(len(chosen))}, self._time[chosen]
        told["time"] = time
        return Seeds(ids, step, Trees(of, self._salt[chosen], time)), lambda sample: told


def _check_owned(given: Tensor, ids: Tensor, data: PartitionData, ntype: str, swap: Swap) -> None:
    """Raise ``ValueError`` on every rank for a node of another rank."""
    first, last = node_ids(data.book, ntype).bounds[data.part_id :][:2].tolist()
    foreign, error = (ids < first) | (ids >= last), None
    if foreign.any():
        error = ValueError(
            f"input_nodes: node {int(given[foreign][0])} is not this rank's; expected its own, or "
            "rebalance=True"
        )
    swap.group.agree(error, "NeighborLoader")


def chosen_nodes(given: Any, data: PartitionData, are_original: bool) -> tuple[str, Tensor]:
    """The type of some nodes and their ids, int64, as given: original ids, or global ones."""
    book = data.book
    is_pair = isinstance(given, tuple) and len(given) == 2
    ntype, nodes = given if is_pair else (None, given)
    if isinstance(nodes, str):
        ntype, nodes = nodes, None
    if ntype is None and len(book.ntypes) > 1:
        raise ValueError(
            f"input_nodes: got no node type, expected (type, seeds) with one of {book.ntypes}"
        )
    ntype = ntype or book.ntypes[0]
    if ntype not in book.ntypes:
        raise ValueError(f"input_nodes: got {ntype!r}, expected one of {book.ntypes}")
    start, end = book.node_ranges[ntype][data.part_id].tolist()
    own = torch.arange(start, end)
    if are_original:
        own = data.keys.node_names(ntype)[0]
    if nodes is None:
        return ntype, own
    if not isinstance(nodes, Tensor):
        raise TypeError(f"input_nodes: got {type(nodes).__name__}, expected a tensor")
    if nodes.dtype == torch.bool:
        if tuple(nodes.shape) != (end - start,):
            got = f"bool {list(nodes.shape)}"
            raise ValueError(f"input_nodes: got {got}, expected bool [{end - start}], of own nodes")
        return ntype, own[nodes.cpu()]
    if nodes.dim() != 1 or nodes.is_floating_point():
        got = f"{nodes.dtype} {list(nodes.shape)}"
        raise TypeError(f"input_nodes: got {got}, expected bool [{end - start}] or integers [s]")
    return ntype, nodes.long().cpu()


def located(
    data: PartitionData, ntype: str, given: Tensor, are_original: bool, swap: Swap, what: str
) -> Tensor:
    """int64 ids, as :func:`node_ids` numbers nodes, of given ones; collective.

    Raises ``ValueError`` on every rank for ids that no node of the type has.
    """
    error, found = None, given
    try:
        if are_original:
            _check_range(given, data.book.num_nodes(ntype), ntype, what)
        else:
            found = _from_global(given, data.book, ntype, what)
    except ValueError as caught:
        error = caught
    swap.group.agree(error, what)
    return Directory(data, ntype, swap).find(given) if are_original else found


def _check_range(ids: Tensor, count: int, ntype: str, what: str) -> None:
    wrong = (ids < 0) | (ids >= count)
    if wrong.any():
        got = int(ids[wrong][0])
        raise ValueError(f"{what}: node {got} is not in the graph, which has {count} {ntype!r}")


def _from_global(ids: Tensor, book: PartitionBook, ntype: str, what: str) -> Tensor:
    ranges = torch.as_tensor(book.node_ranges[ntype])
    part = torch.searchsorted(ranges[:, 0].contiguous(), ids, right=True) - 1
    inside = (part >= 0) & (ids < ranges[part.clamp(min=0), 1])
    if not inside.all():
        wrong = int(ids[~inside][0])
        raise ValueError(f"{what}: node {wrong} is not in the graph as one of type {ntype!r}")
    return ids - ranges[part, 0] + node_ids(book, ntype).bounds[part]


def numbered(like: Tensor, options: LoaderOptions, swap: Swap) -> Tensor:
    """int64 [s] numbers of the inputs: a rank's own, or one after the other where they are dealt;
    collective."""
    counts = swap.sizes(torch.full((swap.group.size, 1), len(like))).view(-1)
    first = int(counts[: swap.group.rank].sum()) if options.rebalance else 0
    return torch.arange(len(like)) + first


def dealt(columns: list[Tensor], swap: Swap) -> list[Tensor]:
    """Columns of as many rows on each rank, or one more: what is too much moves; collective."""
    size, rank, own = swap.group.size, swap.group.rank, len(columns[0])
    counts = swap.sizes(torch.full((size, 1), own)).view(-1)
    target = counts.sum() // size + (torch.arange(size) < counts.sum() % size)
    given = torch.cat([counts.new_zeros(1), (counts - target).clamp(min=0).cumsum(0)])
    lacked = torch.cat([counts.new_zeros(1), (target - counts).clamp(min=0).cumsum(0)])
    begin = torch.maximum(given[:-1, None], lacked[None, :-1])
    end = torch.minimum(given[1:, None], lacked[None, 1:])
    moves = (end - begin).clamp(min=0)  # [from, to]
    kept = min(own, int(target[rank]))
    give, take = moves[rank].tolist(), moves[:, rank].tolist()
    return [
        torch.cat([one[:kept], swap.send(one[kept:].contiguous(), give, take)]) for one in columns
    ]


def _check_times(
    data: PartitionData, ntype: str, count: int, time: Tensor | None, time_attr: str | None
) -> None:
    if time is not None:
        check_given_time("input_time", time, count, time_attr)
    elif time_attr is not None and own_times(data, ntype, time_attr) is None:
        raise ValueError(
            f"input_time: got none, and nodes of type {ntype!r} have no {time_attr!r}; expected "
            "the time of each seed"
        )


def check_given_time(name: str, time: Any, count: int, time_attr: str | None) -> None:
    """Raise for times of seeds that are none."""
    if time_attr is None:
        raise ValueError(f"{name}: got one, expected time_attr as well")
    if not isinstance(time, Tensor) or time.shape != (count,) or time.is_floating_point():
        got = f"{time.dtype} {list(time.shape)}" if isinstance(time, Tensor) else repr(time)
        raise ValueError(f"{name}: got {got}, expected integers [{count}]")
