"""The nodes that batches grow from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar import expect
from sar.errors import PartitionError
from sar.kernels.sampling import split
from sar.partition.arrays import ORIG_ID
from sar.partition.load import PartitionData
from sar.sampling.exchange import Exchange, id_bounds
from sar.sampling.options import LoaderOptions, LoaderRequest
from sar.sampling.sample import Sample, Seeds, Trees
from sar.sampling.topology import NEVER, times_of

InputNodes = None | str | Tensor | tuple[str, Tensor | None]


class NodeInputs:
    """This rank's seed nodes; made collectively. ``is_own``: they have to be nodes of this rank.

    ``input_id``: int64 [s], which input each is; where they were dealt out, those of rank 0 first.
    """

    def __init__(
        self,
        data: PartitionData,
        request: LoaderRequest,
        options: LoaderOptions,
        exchange: Exchange,
        is_own: bool = True,
    ) -> None:
        self._disjoint, time, time_attr = options.disjoint, request.time, options.time_attr
        alike = dict[str, Any]()
        with exchange.group.agreed("NeighborLoader", alike):
            ntype, nodes = chosen_nodes(request, data, options.original_ids)
            own_time = None if time_attr is None else times_of(data, ntype, time_attr)
            if time is not None:
                check_given_time("input_time", time, len(nodes), time_attr)
            elif time_attr is not None and own_time is None:
                raise ValueError(
                    f"input_time: got none, and nodes of type {ntype!r} have no {time_attr!r}; "
                    "expected the time of each seed"
                )
            alike |= {"input_nodes": ntype, "input_time": None if time is None else "some"}
        self.input_type = ntype
        ids = located(data, ntype, nodes, options.original_ids, exchange, "input_nodes")
        bounds = id_bounds(data.book, ntype)
        if is_own and not options.rebalance:
            with exchange.group.agreed("NeighborLoader"):
                first, last = bounds[data.part_id :][:2].tolist()
                if len(foreign := nodes[(ids < first) | (ids >= last)]):
                    raise ValueError(
                        f"input_nodes: node {int(foreign[0])} is not this rank's; expected its "
                        "own, or rebalance=True"
                    )
        salt = exchange.look_up(ids, bounds, data.keys.nodes(ntype))
        until = torch.full_like(ids, NEVER) if time is None else time.long().cpu()
        if time is None and own_time is not None:
            until = exchange.look_up(ids, bounds, own_time)
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
        """Seeds of a batch, and a function from its sample to ``Drawn.told``."""
        told: dict[str, Any] = {"input_id": self.input_id[chosen]}
        ids = {self.input_type: self._ids[chosen]}
        if not self._disjoint:
            return Seeds(ids, step), lambda sample: told
        of, time = {self.input_type: torch.arange(len(chosen))}, self._time[chosen]
        told["time"] = time
        return Seeds(ids, step, Trees(of, self._salt[chosen], time)), lambda sample: told


def named_seeds(request: LoaderRequest) -> tuple[Any, Any]:
    """The node type or relation of a request's seeds, ``None`` where not said, and the seeds."""
    name, seeds = request.input_type, request.seeds
    if isinstance(seeds, tuple) and len(seeds) == 2:
        name, seeds = seeds
    words = seeds if isinstance(seeds, tuple) and seeds else [seeds]
    is_name = all(isinstance(word, str) for word in words)
    return (seeds, None) if is_name else (name, seeds)


def chosen_nodes(
    request: LoaderRequest, data: PartitionData, are_original: bool
) -> tuple[str, Tensor]:
    """The node type and int64 [s] ids of the seeds, as given: original ids, or global ones."""
    book, (ntype, nodes) = data.book, named_seeds(request)
    if ntype is None and len(book.ntypes) > 1:
        raise ValueError(
            f"input_nodes: got no node type, expected (type, seeds) with one of {book.ntypes}"
        )
    ntype = ntype or book.ntypes[0]
    if ntype not in book.ntypes:
        raise ValueError(f"input_nodes: got {ntype!r}, expected one of {book.ntypes}")
    own = torch.arange(*book.node_ranges[ntype][data.part_id].tolist())
    if are_original:
        own = data.keys.node_names(ntype)[0]
    if nodes is None:
        return ntype, own
    expect.tensor(nodes, "input_nodes")
    shape, wanted = list(nodes.shape), f"expected bool [{len(own)}]"
    if nodes.dtype == torch.bool:
        if shape != [len(own)]:
            raise ValueError(f"input_nodes: got bool {shape}, {wanted}, of own nodes")
        return ntype, own[nodes.cpu()]
    if nodes.dim() != 1 or nodes.is_floating_point():
        raise TypeError(f"input_nodes: got {nodes.dtype} {shape}, {wanted} or integers [s]")
    return ntype, nodes.long().cpu()


def located(
    data: PartitionData,
    ntype: str,
    given: Tensor,
    are_original: bool,
    exchange: Exchange,
    what: str,
) -> Tensor:
    """int64 [s] ids, as :func:`id_bounds` numbers nodes, of global or original ones; collective."""
    book = data.book
    ranges = torch.as_tensor(book.node_ranges[ntype])
    if are_original:
        ranges = torch.tensor([[0, book.num_nodes(ntype)]])
    with exchange.group.agreed(what):
        part = torch.searchsorted(ranges[:, 0].contiguous(), given.contiguous(), right=True) - 1
        wrong = (part < 0) | (given >= ranges[part.clamp(min=0), 1])
        if wrong.any():
            got = int(given[wrong][0])
            raise ValueError(f"{what}: node {got} is not in the graph as one of type {ntype!r}")
    if are_original:
        return _from_original(data, ntype, given, exchange)
    return given - ranges[part, 0] + id_bounds(book, ntype)[part]


def _from_original(data: PartitionData, ntype: str, wanted: Tensor, exchange: Exchange) -> Tensor:
    """:func:`located` of original ids: each rank looks up a range of them, at 8 bytes a node."""
    count, size = data.book.num_nodes(ntype), exchange.group.size
    bounds, ranges = id_bounds(data.book, ntype), torch.arange(size + 1) * count // size
    name = f"{ntype}/{ORIG_ID}"
    with exchange.group.agreed("original ids"):
        if name not in data.node_features:
            raise ValueError(f"original_ids: got True, but the partitions hold no {name!r}")
        ids = data.node_features[name].long()
        if len(ids) and (ids.min() < 0 or ids.max() >= count):
            raise PartitionError(f"{name}: got ids that are not below {count}, the number of nodes")
        order, rows, sizes = split(ids, ranges)
    own = torch.arange(*bounds[exchange.group.rank :][:2].tolist())[order.long()]
    found, _ = exchange.deliver(torch.stack([rows.long(), own], dim=1), sizes)
    table = torch.empty(len(found), dtype=torch.int64).index_copy_(0, *found.unbind(1))
    return exchange.look_up(wanted, ranges, table)


def numbered(like: Tensor, options: LoaderOptions, exchange: Exchange) -> Tensor:
    """int64 [s] numbers of inputs, on from lower ranks' where they are dealt out; collective."""
    counts = exchange.counts(len(like))
    first = int(counts[: exchange.group.rank].sum()) if options.rebalance else 0
    return torch.arange(len(like)) + first


def dealt(columns: list[Tensor], exchange: Exchange) -> list[Tensor]:
    """Move rows of the columns so that each rank has as many, or one more; collective."""
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


def check_given_time(name: str, time: Any, count: int, time_attr: str | None) -> None:
    """Raise for times of seeds without ``time_attr``, or that are not integers [count]."""
    if time_attr is None:
        raise ValueError(f"{name}: got one, expected time_attr as well")
    expect.tensor(time, name, shape=(count,))
    if time.is_floating_point():
        raise TypeError(f"{name}: got {time.dtype}, expected integers")
