"""Ranks that hold the partitions and make batches for others, which train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sar.comm import DEFAULT_TIMEOUT, Group
from sar.errors import CommError
from sar.partition.arrays import ORIG_ID
from sar.partition.load import PartitionData
from sar.sampling.batch import Drawn
from sar.sampling.channel import (
    BEGIN,
    BYE,
    CLOSE,
    EDGES,
    MAKE,
    NEXT,
    NODES,
    SIZES,
    TICK,
    Channel,
    least,
)
from sar.sampling.link_inputs import LinkInputs, LinkOptions
from sar.sampling.loader import Loader
from sar.sampling.negatives import negative_sampling
from sar.sampling.node_inputs import NodeInputs
from sar.sampling.seeds import chosen_ends, chosen_ids, classes_of, width_of
from sar.sampling.swap import Swap
from sar.sampling.wire import as_message


class _ServedLoader(Loader):
    """Makes the batches of one trainer on its server; all servers have one at the same time."""

    def __init__(self, data: PartitionData, request: dict, number: int, group: Group) -> None:
        self._links = None
        if request["links"] is not None:
            negatives, exclude, reverse = request["links"]
            reverse = tuple(reverse) if isinstance(reverse, list) else reverse
            self._links = LinkOptions(negative_sampling(negatives), exclude, reverse)
        neighbors = request["num_neighbors"]
        own = {} if self._links is None else vars(self._links)
        super().__init__(data, neighbors, request["options"], group, own, number=number)
        kind = request["input_type"]
        given: Any = (tuple(kind) if isinstance(kind, list) else kind, request["seeds"])
        if self._links is None:
            words = given, request["time"], self.options, self._swap
            self.inputs: Any = NodeInputs(data, *words, is_own=False)
        else:
            columns = request["labels"], request["time"]
            self.inputs = LinkInputs(data, given, *columns, self._links, self.options, self._swap)
        size = self.options.batch_size
        left_over = 0 if self.options.drop_last else size - 1
        self.own_steps = (len(self.inputs) + left_over) // size

    def begin(self, steps: int) -> None:
        """Take as many steps as all trainers; batches are made where they are used."""
        self._begin(self.inputs, steps)
        self._make = _as_drawn


class _Served:
    """The loaders of this server's trainers, by trainer, and where their epochs are asked for.

    There are as many on each server, some of them for nobody.

    Args:
        end: is told of a rank that has died.
    """

    def __init__(
        self,
        loaders: dict[int, _ServedLoader],
        channel: Channel,
        end: Callable[[CommError], None],
    ) -> None:
        self.loaders, self._channel, self._end = loaders, channel, end
        self._thread: threading.Thread | None = None

    def begin(self, epoch: int, first: int, trainers: list[int]) -> None:
        """Begin an epoch from a step on; a thread of its own answers for its batches."""
        self.join()
        iterators = {t: one.iterate(epoch, first) for t, one in self.loaders.items()}
        args = iterators, trainers
        self._thread = threading.Thread(target=self._answer, args=args, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of an epoch that has begun."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """End it; all servers do."""
        self.join()
        for one in self.loaders.values():
            one.close()
        self.loaders = {}
        self._channel.swap.group.close()

    def _answer(self, iterators: Mapping[int, Iterator[Any]], trainers: list[int]) -> None:
        """Batches until the trainers have come to the end, or one of them has left it."""
        channel = self._channel
        channel.swap.is_over = False
        try:
            while (asked := channel.asked()[0]) in (NEXT, TICK):
                if asked == TICK:  # trainers meet
                    continue
                found = {t: next(one) for t, one in iterators.items()}
                channel.reply({t: as_message(found[t]) for t in trainers})
            for one in iterators.values():
                next(one, None)
        except CommError as error:
            self._end(error)
        except Exception as error:  # noqa: BLE001 - the trainers raise it
            if not channel.swap.is_over:
                with suppress(Exception):
                    channel.swap.fail(error)
            for loader in self.loaders.values():
                loader.leave()


class Server:
    """One of the ranks that sample; see :func:`serve`."""

    def __init__(
        self, data: PartitionData, world: Group, num_servers: int, timeout: float
    ) -> None:
        self._data, self._world, self._num_servers = data, world, num_servers
        self._group = world.part(range(num_servers))
        self._channel = Channel(world.beside(), num_servers)
        least(world, timeout)  # trainers ask, to say in time that they are there
        self._served: list[_Served] = []
        self._outcome: SimpleQueue[CommError | None] = SimpleQueue()
        self._made: dict[int, _ServedLoader] = {}
        self._handlers = {
            NODES: self._nodes, EDGES: self._edges, SIZES: self._sizes, MAKE: self._make,
            BEGIN: self._begin, CLOSE: self._close, BYE: self._bye,
        }  # fmt: skip

    def run(self) -> None:
        """Answer until the trainers have left; raises ``CommError`` when a rank has died.

        Threads answer: each may be the first to miss that rank, and none can be woken while it
        waits for it.
        """
        threading.Thread(target=self._listen, name="sar-serving", daemon=True).start()
        error = self._outcome.get()
        if error is not None:
            raise error

    def _listen(self) -> None:
        """Answer what is asked for beside batches."""
        try:
            while self._answer_one() != BYE:
                pass
        except CommError as error:
            self._outcome.put(error)
        else:
            self._outcome.put(None)

    def _answer_one(self) -> int:
        """Answer once; which command it was."""
        try:
            command, requests = self._channel.asked()
            if command != TICK:
                self._channel.reply(self._answer(command, requests))
            if command == MAKE:
                channel = Channel(self._world.beside(), self._num_servers)
                self._served.append(_Served(self._made, channel, self._outcome.put))
        except CommError:
            raise
        except Exception:  # noqa: BLE001 - every rank has raised it: the trainers' to handle
            return TICK
        return command

    def _answer(self, command: int, requests: list[Any]) -> dict[int, Any]:
        try:
            return self._handlers[command](requests)
        except CommError:
            raise
        except Exception as error:  # any: the trainers wait for an answer
            self._channel.swap.fail(error)
            raise

    @property
    def _trainers(self) -> list[int]:
        return self._channel.trainers_of(self._world.rank)

    def _nodes(self, requests: list[Any]) -> dict[int, Any]:
        ids, swap = chosen_ids(self._data, **requests[0]), Swap(self._group, 1)
        return self._dealt(ids.view(-1, 1), swap)

    def _edges(self, requests: list[Any]) -> dict[int, Any]:
        swap = Swap(self._group, 1)
        return self._dealt(chosen_ends(self._data, swap, **requests[0]), swap)

    def _sizes(self, requests: list[Any]) -> dict[int, Any]:
        """How wide a feature is, or how many classes labels have on all servers."""
        asked = dict(requests[0])
        size = classes_of if asked.pop("classes") else width_of
        found = self._group.all_reduce(torch.tensor(size(self._data, **asked)), "max")
        return {t: int(found) for t in self._trainers}

    def _dealt(self, rows: Tensor, swap: Swap) -> dict[int, Any]:
        """To each trainer as many rows, or one more."""
        size, trainers = self._num_servers, self._channel.num_trainers
        counts = swap.sizes(torch.full((size, 1), len(rows))).view(-1)
        first = int(counts[: self._group.rank].sum())
        to = (torch.arange(len(rows)) + first) * trainers // max(1, int(counts.sum()))
        order = torch.argsort(to % size, stable=True)
        give = torch.bincount(to % size, minlength=size)
        take = swap.sizes(give.view(-1, 1)).view(-1).tolist()
        sent = torch.cat([to.view(-1, 1), rows], dim=1)[order]
        came = swap.send(sent, give.tolist(), take)
        ntypes, etypes = self._data.book.ntypes, self._data.book.canonical_etypes
        about = {"ntypes": ntypes, "etypes": etypes, "original_ids": _has_ids(self._data)}
        return {t: about | {"rows": came[came[:, 0] == t, 1:]} for t in self._trainers}

    def _make(self, requests: list[Any]) -> dict[int, Any]:
        """A loader for each trainer, all with the first one's options."""
        loaders = dict[int, _ServedLoader]()
        slots = -(-len(requests) // self._num_servers)
        for slot in range(slots):
            number = self._group.rank + slot * self._num_servers
            request = dict(requests[number] if number < len(requests) else requests[0])
            if number >= len(requests):
                request |= {"seeds": request["seeds"][..., :0], "labels": None, "time": None}
            loaders[number] = _ServedLoader(self._data, request, number, self._group)
        steps = torch.tensor(max(one.own_steps for one in loaders.values()))
        self._group.all_reduce(steps, "max")
        for one in loaders.values():
            one.begin(int(steps))
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

    def _bye(self, requests: list[Any]) -> dict[int, Any]:
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
    """What all trainers ask for. Raises ``ValueError`` where it is not the same."""
    for trainer, one in enumerate(requests):
        if one != requests[0]:
            raise ValueError(f"trainer {trainer} asks for {one}, trainer 0 for {requests[0]}")
    return requests[0]


def _as_drawn(drawn: Drawn) -> Drawn:
    return drawn


def _has_ids(data: PartitionData) -> bool:
    return all(f"{ntype}/{ORIG_ID}" in data.node_features for ntype in data.book.ntypes)
