"""Ranks that hold the partitions and make batches for others, which train."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sar.comm import DEFAULT_TIMEOUT, Group
from sar.errors import CommError
from sar.partition.arrays import ORIG_ID
from sar.partition.book import EType
from sar.partition.load import PartitionData
from sar.sampling.channel import Channel, Command, least
from sar.sampling.exchange import Exchange, Kind, id_bounds
from sar.sampling.features import column_of, columns_of
from sar.sampling.loader import Loader
from sar.sampling.options import LoaderRequest
from sar.sampling.topology import source_ids, target_ids


class ServedLoaders:
    """One loader for each trainer of this server, and the channel on which batches are asked for.

    Each server has as many, some for no trainer. ``end`` is called with the error of a dead rank.
    """

    def __init__(
        self,
        loaders: dict[int, Loader],
        channel: Channel,
        end: Callable[[CommError], None],
    ) -> None:
        self.loaders, self._channel, self._end = loaders, channel, end
        self._thread: threading.Thread | None = None

    def begin(self, epoch: int, first: int, trainers: list[int]) -> None:
        """Begin an epoch from a step on; a thread of its own answers for its batches."""
        self._join()
        iterators = {t: one.iterate(epoch, first) for t, one in self.loaders.items()}
        args = iterators, trainers
        self._thread = threading.Thread(target=self._answer, args=args, daemon=True)
        self._thread.start()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._join()
        for one in self.loaders.values():
            one.close()
        self.loaders = {}
        self._channel.exchange.group.close()

    def _answer(self, iterators: Mapping[int, Iterator[Any]], trainers: list[int]) -> None:
        """Send batches until the trainers have come to the end of the epoch, or one has left it."""
        channel = self._channel
        channel.exchange.is_over = False
        try:
            while (asked := channel.asked()[0]) in (Command.BATCH, Command.TICK):
                if asked == Command.TICK:  # trainers meet
                    continue
                found = {t: next(one) for t, one in iterators.items()}
                channel.reply({t: found[t] for t in trainers})
            for one in iterators.values():
                next(one, None)
        except CommError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - the trainers raise it
            if not channel.exchange.is_over:
                with suppress(Exception):
                    channel.exchange.fail(error)
            for loader in self.loaders.values():
                loader.leave()


class Server:
    def __init__(self, data: PartitionData, world: Group, num_servers: int, timeout: float) -> None:
        self._data, self._world, self._num_servers = data, world, num_servers
        self._group = world.part(range(num_servers))
        self._channel = Channel(world.beside(), num_servers)
        self._trainers = [*range(world.rank, self._channel.num_trainers, num_servers)]
        least(world, timeout)  # trainers ask, to say in time that they are there
        self._served: list[ServedLoaders] = []
        self._outcome: SimpleQueue[CommError | None] = SimpleQueue()
        self._made: dict[int, Loader] = {}
        self._handlers = {
            Command.NODES: self._nodes, Command.EDGES: self._edges, Command.SIZES: self._sizes,
            Command.MAKE: self._make, Command.BEGIN: self._begin, Command.CLOSE: self._close,
            Command.LEAVE: lambda requests: {},
        }  # fmt: skip

    def run(self) -> None:
        """Answer until the trainers have left; by threads: each may be the first to miss a rank
        that has died, and none can be woken while it waits for it."""
        threading.Thread(target=self._listen, name="sar-serving", daemon=True).start()
        error = self._outcome.get()
        if error is not None:
            raise error

    def _listen(self) -> None:
        try:
            while self._answer_one() != Command.LEAVE:
                pass
        except CommError as error:
            self._outcome.put(error)
        else:
            self._outcome.put(None)

    def _answer_one(self) -> Command:
        try:
            command, requests = self._channel.asked()
            if command == Command.TICK:
                return command
            try:
                answers = self._handlers[command](requests)
            except CommError:
                raise
            except Exception as error:  # any: the trainers wait for an answer
                self._channel.exchange.fail(error)
                raise
            self._channel.reply(answers)
            if command == Command.MAKE:
                channel = Channel(self._world.beside(), self._num_servers)
                self._served.append(ServedLoaders(self._made, channel, self._outcome.put))
        except CommError:
            raise
        except Exception:  # noqa: BLE001 - every rank has raised it: the trainers' to handle
            return Command.TICK
        return command

    def _nodes(self, requests: list[Any]) -> dict[int, Any]:
        rows = _node_names(self._data, **requests[0]).view(-1, 1)
        return self._dealt(rows, Exchange(self._group, 1))

    def _edges(self, requests: list[Any]) -> dict[int, Any]:
        exchange = Exchange(self._group, 1)
        return self._dealt(_end_names(self._data, exchange, **requests[0]), exchange)

    def _dealt(self, rows: Tensor, exchange: Exchange) -> dict[int, Any]:
        """Deal rows out to all trainers, as many to each or one more; those of this server's."""
        size, trainers = self._num_servers, self._channel.num_trainers
        counts = exchange.counts(len(rows))
        first = int(counts[: self._group.rank].sum())
        to = (torch.arange(len(rows)) + first) * trainers // max(1, int(counts.sum()))
        order = torch.argsort(to % size, stable=True)
        sent = torch.cat([to.view(-1, 1), rows], dim=1)[order]
        came, _ = exchange.deliver(sent, torch.bincount(to % size, minlength=size).tolist())
        names, ntypes = self._data.node_features, self._data.book.ntypes
        about = {"original_ids": all(f"{ntype}/{ORIG_ID}" in names for ntype in ntypes)}
        return {t: about | {"rows": came[came[:, 0] == t, 1:]} for t in self._trainers}

    def _sizes(self, requests: list[Any]) -> dict[int, Any]:
        """The width of a feature, or how many classes the labels of all servers have."""
        mine = torch.tensor(_size(self._data, **requests[0]))
        found = int(self._group.all_reduce(mine, "max"))
        return dict.fromkeys(self._trainers, found)

    def _make(self, requests: list[LoaderRequest]) -> dict[int, Any]:
        """A loader for each trainer, all with the first one's options."""
        loaders = dict[int, Loader]()
        nobody = replace(requests[0], seeds=requests[0].seeds[..., :0], labels=None, time=None)
        for slot in range(-(-len(requests) // self._num_servers)):
            number = self._group.rank + slot * self._num_servers
            request = requests[number] if number < len(requests) else nobody
            loaders[number] = Loader(self._data, request, self._group, number, is_own=False)
        steps = torch.tensor(max(one._own_steps for one in loaders.values()))
        self._group.all_reduce(steps, "max")
        for one in loaders.values():
            one._begin(lambda drawn: drawn, int(steps))  # made where they are used
        self._made = loaders
        about = {"loader": len(self._served), "steps": int(steps)}
        return {t: about | {"input_type": loaders[t].input_type} for t in self._trainers}

    def _begin(self, requests: list[Any]) -> dict[int, Any]:
        asked = _same(requests)
        self._served[asked["loader"]].begin(asked["epoch"], asked["first"], self._trainers)
        return {}

    def _close(self, requests: list[Any]) -> dict[int, Any]:
        self._served[_same(requests)["loader"]].close()
        return {}


def serve(
    data: PartitionData, world: Group, num_servers: int, timeout: float = DEFAULT_TIMEOUT
) -> None:
    """Make batches for the trainers among the ranks of ``world`` until they leave; collective.

    Args:
        data: this server's part; server s has part s.
        world: servers are its first ranks, trainers the others.
        timeout: seconds in which collectives of this rank fail.

    Raises ``CommError`` when another rank has died.
    """
    Server(data, world, num_servers, timeout).run()


def _same(requests: list[Any]) -> Any:
    """The request of all trainers; raises ``ValueError`` where they differ."""
    for trainer, one in enumerate(requests):
        if one != requests[0]:
            raise ValueError(f"trainer {trainer} asks for {one}, trainer 0 for {requests[0]}")
    return requests[0]


# ---------------------------------------------------------------- what a part has, by name


def _node_names(data: PartitionData, ntype: str | None = None, mask: str | None = None) -> Tensor:
    """int64 [s] ids of this part's nodes (in a mask): original where stored, else global ones."""
    ntype = _ntype(data, ntype)
    ids = data.keys.node_names(ntype)[0]
    return ids if mask is None else ids[_mask(data, ntype, mask)]


def _end_names(
    data: PartitionData,
    exchange: Exchange,
    etype: str | EType | None = None,
    mask: str | None = None,
) -> Tensor:
    """int64 [s, 2] such ids of both ends of this part's edges of a relation; collective."""
    book = data.book
    if etype is None and len(book.canonical_etypes) > 1:
        raise ValueError(f"etype: got none, expected one of {book.canonical_etypes}")
    one = book.canonical_etypes[0] if etype is None else book.canonical(etype)
    chosen = slice(None) if mask is None else _mask(data, one, mask)
    names = [
        exchange.look_up(ids[chosen], id_bounds(book, ntype), data.keys.node_names(ntype)[0])
        for ntype, ids in ((one[0], source_ids(data, one)), (one[2], target_ids(data, one)))
    ]
    return torch.stack(names, dim=1)


def _size(data: PartitionData, name: str, ntype: str | None, classes: bool) -> int:
    """The width of a node feature; or classes of this part's labels: largest + 1, or columns."""
    rows, _ = column_of(data, _ntype(data, ntype), name, f"name: got {name!r}")
    if not classes:
        return math.prod(rows.shape[1:])
    if rows.dim() > 1 and rows.shape[1] > 1:
        return rows.shape[1]
    return int(rows.nan_to_num(-1).max()) + 1 if len(rows) else 0


def _ntype(data: PartitionData, ntype: str | None) -> str:
    ntypes = data.book.ntypes
    if ntype is None and len(ntypes) > 1:
        raise ValueError(f"ntype: got none, expected one of {ntypes}")
    if ntype and ntype not in ntypes:
        raise ValueError(f"ntype: got {ntype!r}, expected one of {ntypes}")
    return ntype or ntypes[0]


def _mask(data: PartitionData, kind: Kind, name: str) -> Tensor:
    full = columns_of(data, kind)[1] + name
    mask, _ = column_of(data, kind, name, f"mask: got {full!r}")
    if mask.dtype != torch.bool or mask.dim() != 1:
        raise ValueError(f"mask: {full!r} is {mask.dtype} {list(mask.shape)}, expected bool")
    return mask
