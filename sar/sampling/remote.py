"""Training on batches that other ranks make: no partition is needed here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from sar.comm import Group, join_others, set_process_group
from sar.errors import CommError, NotSupportedError, SarError
from sar.partition.book import EType
from sar.sampling.batch import maker
from sar.sampling.channel import Channel, Command, LoaderRequest, least
from sar.sampling.epochs import Epochs
from sar.sampling.link_inputs import LinkOptions
from sar.sampling.negatives import negative_sampling
from sar.sampling.options import LoaderOptions, NumNeighbors, loader_options

_TICKS = 4  # in the time after which a server misses a rank


class Servers:
    """Ranks that hold the partitions and make batches; all trainers do the same at the same time.

    Args:
        world: its first ranks are servers, which run :func:`sar.sampling.serve.serve`, the others
            trainers.
        timeout: seconds in which this rank's collectives fail; servers have their own.

    Attributes:
        group: of the trainers.
    """

    def __init__(self, world: Group, num_servers: int, timeout: float) -> None:
        if not 0 < num_servers < world.size:
            raise ValueError(
                f"servers: got {num_servers} of {world.size} ranks, expected some and some trainers"
            )
        self._world, self._num_servers = world, num_servers
        self.group = world.part(range(num_servers, world.size))
        self._channel = Channel(world.beside(), num_servers)
        self._lock, self._is_over, self._limit = threading.Lock(), threading.Event(), timeout
        self._pause = least(world, timeout) / _TICKS
        threading.Thread(target=self._tick, name="sar-ticking", daemon=True).start()

    def _tick(self) -> None:
        """Tell the servers, which wait for requests, that this trainer is there."""
        while not self._is_over.wait(self._pause):
            try:
                self._ask(Command.TICK)
            except CommError:  # the next request meets it as well
                return

    def _ask(self, command: Command, value: Any = None) -> Any:
        with self._lock:
            if not self._is_over.is_set():
                return self._channel.ask(command, value, self._limit)
            if command not in (Command.TICK, Command.CLOSE):
                raise SarError("the servers were left; expected what they are asked for before it")

    def nodes(self, ntype: str | None = None, mask: str | None = None) -> Tensor:
        """int64 [s] this trainer's share of the nodes of a type, or of those in a mask; collective.

        Original ids where the partitions hold them, else the partitioning's global ones.
        """
        self.group.agree(None, "nodes", [ntype, mask])
        return self._ask(Command.NODES, {"ntype": ntype, "mask": mask})["rows"].view(-1)

    def edges(self, etype: str | EType | None = None, mask: str | None = None) -> Tensor:
        """int64 [2, s] ids of both ends of this trainer's share of the edges of a relation, or of
        those in a mask; collective."""
        self.group.agree(None, "edges", [etype, mask])
        return self._ask(Command.EDGES, {"etype": etype, "mask": mask})["rows"].T

    def width(self, name: str = "feat", ntype: str | None = None) -> int:
        """How many numbers a feature has for each node of a type; collective."""
        return self._size(name, ntype, False)

    def num_classes(self, name: str = "label", ntype: str | None = None) -> int:
        """One more than the largest label of any node of a type, or the columns of labels that are
        a matrix; collective."""
        return self._size(name, ntype, True)

    def _size(self, name: str, ntype: str | None, classes: bool) -> int:
        self.group.agree(None, "classes" if classes else "width", [name, ntype])
        return int(self._ask(Command.SIZES, {"name": name, "ntype": ntype, "classes": classes}))

    def NeighborLoader(
        self,
        num_neighbors: NumNeighbors,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        **options: Any,
    ) -> RemoteLoader:
        """As :class:`sar.sampling.NeighborLoader`, around nodes of any server; collective.

        Args:
            input_nodes: int64 [s] ids as :meth:`nodes` gives them, or ``(ntype, ids)``.
        """
        seeds = *_typed(input_nodes), None, input_time
        return self._loader(LoaderRequest(num_neighbors, *seeds, None, options))

    def LinkNeighborLoader(
        self,
        num_neighbors: NumNeighbors,
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Tensor | None = None,
        *,
        neg_sampling: Any = None,
        exclude: str | None = None,
        reverse_etype: str | EType | None = None,
        **options: Any,
    ) -> RemoteLoader:
        """As :class:`sar.sampling.LinkNeighborLoader`, of edges of any server; collective.

        Args:
            edge_label_index: int64 [2, s] ids as :meth:`edges` gives them, or ``(etype, ids)``.
        """

        def links() -> LinkOptions:
            return LinkOptions(negative_sampling(neg_sampling), exclude, reverse_etype)

        seeds = *_typed(edge_label_index), edge_label, edge_label_time
        return self._loader(LoaderRequest(num_neighbors, *seeds, None, options), links)

    def _loader(
        self, request: LoaderRequest, links: Callable[[], LinkOptions] | None = None
    ) -> RemoteLoader:
        kind, seeds, own = request.input_type, request.seeds, None
        alike = dict[str, Any]()
        with self.group.agreed("loader", alike):
            own = None if links is None else links()
            options = loader_options(request.options)
            _check(options, seeds, 1 if own is None else 2)
            alike |= {"num_neighbors": request.num_neighbors, **options.alike()}
            alike |= {} if own is None else vars(own)
        about = self._ask(Command.NODES, {"ntype": kind}) if own is None else self._ask(
            Command.EDGES, {"etype": kind}
        )  # fmt: skip
        seeds = about["rows"].T.squeeze(0) if seeds is None else seeds
        sent = {"transform": None, "filter": None, "original_ids": about["original_ids"]}
        sent = vars(options) | sent
        request = replace(request, seeds=seeds.cpu().contiguous(), links=own, options=sent)
        with self._lock:
            made = self._channel.ask(Command.MAKE, request, self._limit)
            channel = Channel(self._world.beside(), self._num_servers)
        return RemoteLoader(self, channel, made, options)

    def begin(self, loader: int, epoch: int, first: int) -> None:
        """Begin an epoch of a loader, by number, from a step on; collective."""
        self._ask(Command.BEGIN, {"loader": loader, "epoch": epoch, "first": first})

    def end(self, loader: int) -> None:
        """A loader is needed no more; collective."""
        self._ask(Command.CLOSE, {"loader": loader})

    def close(self) -> None:
        """Leave the servers, which end when all trainers have; harmless the second time."""
        if not self._is_over.is_set():
            self._ask(Command.LEAVE)
            self._is_over.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the others are told by this rank's end
            self.close()


def connect(
    address: str, servers: int, *, backend: str = "gloo", timeout: float = 300.0
) -> Servers:
    """Join the servers of `sar sample-server` as one of the trainers; collective.

    Instead of ``sar.initialize_comms``: from now on this process' group is that of the trainers,
    ``RANK`` and ``WORLD_SIZE`` in the environment (torchrun sets them; else one alone).

    Args:
        address: ``"host:port"`` where the servers meet the trainers.
        servers: how many there are.
        timeout: seconds, as for ``sar.initialize_comms``: those of this process. Who stops is
            missed after them, and by the servers after theirs.

    Raises ``ValueError`` for an address that is none, and what ``sar.initialize_comms`` does.
    """
    host, _, port = str(address).rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address: got {address!r}, expected 'host:port'")
    if isinstance(servers, bool) or not isinstance(servers, int) or servers < 1:
        raise ValueError(f"servers: got {servers!r}, expected an int of at least 1")
    world = join_others(servers, 0, host, int(port), backend=backend, timeout=timeout)
    made = Servers(world, servers, timeout)
    set_process_group(world, made.group)
    return made


class RemoteLoader(Epochs):
    """Goes through batches that servers make; made by :class:`Servers`.

    Attributes:
        input_type: the node type, or the relation, of the seeds.
    """

    def __init__(
        self, servers: Servers, channel: Channel, made: Mapping[str, Any], options: LoaderOptions
    ) -> None:
        super().__init__(channel.exchange, options)
        self._servers, self._channel, self._make = servers, channel, maker(options)
        self._number, self.input_type = made["loader"], made["input_type"]
        self._agree(servers.group, made["steps"])

    def _begun(self, epoch: int, first: int) -> None:
        self._servers.begin(self._number, epoch, first)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        for _ in range(first, len(self)):
            yield self._make(self._channel.ask(Command.BATCH))

    def _meet(self) -> None:
        self._channel.ask(Command.TICK)

    def _ended(self) -> None:
        self._servers.end(self._number)


def _typed(given: Any) -> tuple[Any, Any]:
    """The type of some seeds, if it is said, and the seeds."""
    return given if isinstance(given, tuple) else (None, given)


def _check(options: LoaderOptions, ids: Any, dim: int) -> None:
    if options.filter is not None:
        raise NotSupportedError("filter: got one, which servers cannot call; use transform")
    if options.rebalance:
        raise ValueError("rebalance: got True, but servers deal seeds out already")
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dim() != dim or ids.is_floating_point():
        shape = "[s]" if dim == 1 else "[2, s]"
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"seeds: got {got}, expected integers {shape} as the servers give them")
    if ids.dtype == torch.bool:
        raise TypeError("seeds: got a mask, expected ids; servers.nodes(mask=...) gives some")
