"""Training on batches that other ranks make: no partition is needed here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sar import expect
from sar.comm import Group, join_others, set_process_group
from sar.errors import CommError, NotSupportedError, SarError
from sar.partition.book import EType
from sar.sampling.batch import maker
from sar.sampling.channel import Channel, Command, least
from sar.sampling.epochs import Epochs
from sar.sampling.node_inputs import named_seeds
from sar.sampling.options import LoaderOptions, LoaderRequest, NumNeighbors

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

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
        """Tell the servers, which wait for requests, that this trainer is alive."""
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
        return self._size("width", name, ntype)

    def num_classes(self, name: str = "label", ntype: str | None = None) -> int:
        """One more than the largest label of any node of a type, or the columns of labels that are
        a matrix; collective."""
        return self._size("classes", name, ntype)

    def _size(self, what: str, name: str, ntype: str | None) -> int:
        self.group.agree(None, what, [name, ntype])
        asked = {"name": name, "ntype": ntype, "classes": what == "classes"}
        return int(self._ask(Command.SIZES, asked))

    def NeighborLoader(
        self,
        num_neighbors: NumNeighbors,
        input_nodes: Any = None,
        input_time: Tensor | None = None,
        **options: Any,
    ) -> RemoteLoader:
        """As :class:`sar.sampling.NeighborLoader`, around nodes of any server; collective.

        Args:
            input_nodes: int64 [s] ids as :meth:`nodes` gives them, ``(ntype, ids)``, or the type of
                all this trainer's share of the nodes.
        """
        seeds = None, input_nodes, None, input_time
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
            edge_label_index: int64 [2, s] ids as :meth:`edges` gives them, ``(etype, ids)``, or the
                relation of all this trainer's share of the edges.
        """
        links = {
            "negatives": neg_sampling, "exclude": exclude, "reverse_etype": reverse_etype
        }  # fmt: skip
        seeds = None, edge_label_index, edge_label, edge_label_time
        return self._loader(LoaderRequest(num_neighbors, *seeds, links, options))

    def _loader(self, request: LoaderRequest) -> RemoteLoader:
        (kind, seeds), are_nodes = named_seeds(request), request.links is None
        alike = dict[str, Any]()
        with self.group.agreed("loader", alike):
            options, links = request.checked(alike)
            _check(options, seeds, 1 if are_nodes else 2)
        command, word = (Command.NODES, "ntype") if are_nodes else (Command.EDGES, "etype")
        about = self._ask(command, {word: kind})
        seeds = about["rows"].T.squeeze(0) if seeds is None else seeds
        sent = {"transform": None, "filter": None, "original_ids": about["original_ids"]}
        seeds, sent = seeds.cpu().contiguous(), vars(options) | sent
        request = replace(request, input_type=kind, seeds=seeds, links=links, options=sent)
        with self._lock:
            made = self._channel.ask(Command.MAKE, request, self._limit)
            channel = Channel(self._world.beside(), self._num_servers)
        return RemoteLoader(self, channel, made, options)

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
    expect.integer(servers, "servers", at_least=1)
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
        asked = {"loader": self._number, "epoch": epoch, "first": first}
        self._servers._ask(Command.BEGIN, asked)

    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        for _ in range(first, len(self)):
            yield self._make(self._channel.ask(Command.BATCH))

    def _meet(self) -> None:
        self._channel.ask(Command.TICK)

    def _ended(self) -> None:
        self._servers._ask(Command.CLOSE, {"loader": self._number})


def _check(options: LoaderOptions, ids: Any, dim: int) -> None:
    if options.filter is not None:
        raise NotSupportedError("filter: got one, which servers cannot call; use transform")
    if options.rebalance:
        raise ValueError("rebalance: got True, but servers deal seeds out already")
    if ids is None:
        return
    expect.tensor(ids, "seeds", shape=("s",) if dim == 1 else (2, "s"))
    if ids.is_floating_point():
        raise TypeError(f"seeds: got {ids.dtype}, expected integers as the servers give them")
    if ids.dtype == torch.bool:
        raise TypeError("seeds: got a mask, expected ids; servers.nodes(mask=...) gives some")
