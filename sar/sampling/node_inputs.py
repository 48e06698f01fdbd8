"""The nodes that batches grow from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.kernels.sampling import split
from sar.partition.arrays import ORIG_ID
from sar.partition.book import PartitionBook
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.options import LoaderOptions
from sar.sampling.sample import Sample, Seeds, Trees
from sar.sampling.topology import NEVER, node_times

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
        exchange: Exchange,
        is_own: bool = True,
    ) -> None:
        self._disjoint, time_attr = options.disjoint, options.time_attr
        alike = dict[str, Any]()
        with exchange.group.agreed("NeighborLoader", alike):
            ntype, nodes = chosen_nodes(given, data, options.original_ids)
            _check_times(data, ntype, len(nodes), time, time_attr)
            alike |= {"input_nodes": ntype, "input_time": None if time is None else "some"}
        self.input_type = ntype
        ids = located(data, ntype, nodes, options.original_ids, exchange, "input_nodes")
        bounds, keys = id_bounds(data.book, ntype), data.keys.nodes(ntype)
        if is_own and not options.rebalance:
            with exchange.group.agreed("NeighborLoader"):
                _check_owned(nodes, ids, *bounds[data.part_id :][:2].tolist())
        salt = exchange.look_up(ids, bounds, keys)
        own = None if time_attr is None else node_times(data, ntype, time_attr)
        until = torch.full_like(ids, NEVER) if time is None else time.long().cpu()
        if time is None and own is not None:
            until = exchange.look_up(ids, bounds, own)
        columns = torch.stack([ids, salt, until, numbered(ids, options, exchange)], dim=1)
        if options.rebalance:
            (columns,) = dealt([columns], exchange)
        self._ids, self._salt, self._time, self.input_id = columns.unbind(1)
        with exchange.group.agreed("NeighborLoader"):
            if len(self._ids.unique()) != len(self._ids):
                raise ValueError("input_nodes: a node comes several times, expected distinct ones")

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


def _check_owned(given: Tensor, ids: Tensor, first: int, last: int) -> None:
    """Raise ``ValueError`` for a node of another rank."""
    foreign = (ids < first) | (ids >= last)
    if foreign.any():
        raise ValueError(
            f"input_nodes: node {int(given[foreign][0])} is not this rank's; expected its own, or "
            "rebalance=True"
        )


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
    data: PartitionData,
    ntype: str,
    given: Tensor,
    are_original: bool,
    exchange: Exchange,
    what: str,
) -> Tensor:
    """int64 ids, as :func:`id_bounds` numbers nodes, of given ones; collective.

    Raises ``ValueError`` on every rank for ids that no node of the type has.
    """
    found = given
    with exchange.group.agreed(what):
        if are_original:
            _check_range(given, data.book.num_nodes(ntype), ntype, what)
        else:
            found = _from_global(given, data.book, ntype, what)
    return _from_original(data, ntype, given, exchange) if are_original else found


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
    return ids - ranges[part, 0] + id_bounds(book, ntype)[part]


def _from_original(data: PartitionData, ntype: str, wanted: Tensor, exchange: Exchange) -> Tensor:
    """Each rank keeps for a range of original ids which nodes they are: 8 bytes a node.

    Raises ``ValueError`` on every rank where partitions hold no original ids.
    """
    count, size = data.book.num_nodes(ntype), exchange.group.size
    bounds, ranges = id_bounds(data.book, ntype), torch.arange(size + 1) * count // size
    with exchange.group.agreed("original ids"):
        order, rows, sizes = split(_original_ids(data, ntype), ranges)
    own = torch.arange(*bounds[exchange.group.rank :][:2].tolist())[order.long()]
    found, _ = exchange.deliver(torch.stack([rows.long(), own], dim=1), sizes)
    table = torch.empty(len(found), dtype=torch.int64).index_copy_(0, *found.unbind(1))
    return exchange.look_up(wanted, ranges, table)


def _original_ids(data: PartitionData, ntype: str) -> Tensor:
    """int64 [n] of this part's nodes. Raises ``ValueError`` where the partitions hold none."""
    name, count = f"{ntype}/{ORIG_ID}", data.book.num_nodes(ntype)
    if name not in data.node_features:
        raise ValueError(f"original_ids: got True, but the partitions hold no {name!r}")
    ids = data.node_features[name].long()
    if len(ids) and (ids.min() < 0 or ids.max() >= count):
        raise PartitionError(f"{name}: got ids that are not below {count}, the number of nodes")
    return ids


def numbered(like: Tensor, options: LoaderOptions, exchange: Exchange) -> Tensor:
    """int64 [s] numbers of the inputs: a rank's own, or one after the other where they are dealt;
    collective."""
    counts = exchange.counts(len(like))
    first = int(counts[: exchange.group.rank].sum()) if options.rebalance else 0
    return torch.arange(len(like)) + first


def dealt(columns: list[Tensor], exchange: Exchange) -> list[Tensor]:
    """Columns of as many rows on each rank, or one more: what is too much moves; collective."""
    size, rank, own = exchange.group.size, exchange.group.rank, len(columns[0])
    counts = exchange.counts(own)
    target = counts.sum() // size + (torch.arange(size) < counts.sum() % size)
    given = torch.cat([counts.new_zeros(1), (counts - target).clamp(min=0).cumsum(0)])
    lacked = torch.cat([counts.new_zeros(1), (target - counts).clamp(min=0).cumsum(0)])
    begin = torch.maximum(given[:-1, None], lacked[None, :-1])
    end = torch.minimum(given[1:, None], lacked[None, 1:])
    moves = (end - begin).clamp(min=0)  # [from, to]
    kept = min(own, int(target[rank]))
    give, take = moves[rank].tolist(), moves[:, rank].tolist()
    return [
        torch.cat([one[:kept], exchange.send(one[kept:].contiguous(), give, take)])
        for one in columns
    ]


def _check_times(
    data: PartitionData, ntype: str, count: int, time: Tensor | None, time_attr: str | None
) -> None:
    if time is not None:
        check_given_time("input_time", time, count, time_attr)
    elif time_attr is not None and node_times(data, ntype, time_attr) is None:
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
