"""Training on batches that other ranks make: no partition is needed here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, Self

import torch
from torch import Tensor

from sar.comm import Group, join_others, set_process_group
from sar.errors import CommError, NotSupportedError, SarError
from sar.partition.book import EType
from sar.sampling.batch import Types, maker
from sar.sampling.calls import transformed
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
from sar.sampling.negatives import negative_sampling
from sar.sampling.options import LoaderOptions, NumNeighbors, loader_options
from sar.sampling.pipeline import Epochs
from sar.sampling.wire import from_message

_TICKS = 4  # in the time after which a server misses a rank
_OWN = ("transform", "filter")  # options of trainers


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
                self._ask(TICK)
            except CommError:  # the next request meets it as well
                return

    def _ask(self, command: int, value: Any = None) -> Any:
        with self._lock:
            if not self._is_over.is_set():
                return self._channel.ask(command, value, self._limit)
            if command not in (TICK, CLOSE):
                raise SarError("the servers were left; expected what they are asked for before it")

    def nodes(self, ntype: str | None = None, mask: str | None = None) -> Tensor:
        """int64 [s] this trainer's share of the nodes of a type, or of those in a mask; collective.

        Original ids where the partitions hold them, else the partitioning's global ones.
        """
        self.group.agree(None, "nodes", [ntype, mask])
        return self._ask(NODES, {"ntype": ntype, "mask": mask})["rows"].view(-1)

    def edges(self, etype: str | EType | None = None, mask: str | None = None) -> Tensor:
        """int64 [2, s] ids of both ends of this trainer's share of the edges of a relation, or of
        those in a mask; collective."""
        self.group.agree(None, "edges", [etype, mask])
        return self._ask(EDGES, {"etype": etype, "mask": mask})["rows"].T

    def width(self, name: str = "feat", ntype: str | None = None) -> int:
        """How many numbers a feature has for each node of a type; collective."""
        return self._size(name, ntype, False)

    def num_classes(self, name: str = "label", ntype: str | None = None) -> int:
        """One more than the largest label of any node of a type, or the columns of labels that are
        a matrix; collective."""
        return self._size(name, ntype, True)

    def _size(self, name: str, ntype: str | None, classes: bool) -> int:
        self.group.agree(None, "classes" if classes else "width", [name, ntype])
        return int(self._ask(SIZES, {"name": name, "ntype": ntype, "classes": classes}))

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
        ntype, ids = input_nodes if isinstance(input_nodes, tuple) else (None, input_nodes)
        request = {"num_neighbors": num_neighbors, "time": input_time, "links": None}
        return self._loader(request | {"input_type": ntype, "labels": None}, ids, 1, options)

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
        etype, ids = (
            edge_label_index if isinstance(edge_label_index, tuple) else (None, edge_label_index)
        )
        negatives = negative_sampling(neg_sampling)
        links = [None if negatives is None else asdict(negatives), exclude, reverse_etype]
        request = {"num_neighbors": num_neighbors, "time": edge_label_time, "links": links}
        return self._loader(request | {"input_type": etype, "labels": edge_label}, ids, 2, options)

    def _loader(
        self, request: dict[str, Any], ids: Any, dim: int, given: Mapping[str, Any]
    ) -> RemoteLoader:
        error, options = None, LoaderOptions()
        try:
            options = loader_options(given)
            _check(options, ids, dim)
        except Exception as caught:  # any: the others would wait
            error = caught
        alike = {"num_neighbors": request["num_neighbors"], "links": request["links"]}
        alike |= options.alike()
        self.group.agree(error, "loader", alike)
        kind, wanted = request["input_type"], ("ntype", NODES) if dim == 1 else ("etype", EDGES)
        about = self._ask(wanted[1], {wanted[0]: kind})
        seeds = ids if ids is not None else about["rows"].T.squeeze(0)
        sent = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _OWN}
        sent["original_ids"] = about["original_ids"]
        request = request | {"seeds": seeds.cpu().contiguous(), "options": sent}
        types = Types(about["ntypes"], [tuple(one) for one in about["etypes"]])
        with self._lock:
            made = self._channel.ask(MAKE, request, self._limit)
            channel = Channel(self._world.beside(), self._num_servers)
        loader = RemoteLoader(self, channel, made, options, types)
        loader.agree(self.group)
        return loader

    def begin(self, loader: int, epoch: int, first: int) -> None:
        """Begin an epoch of a loader, by number, from a step on; collective."""
        self._ask(BEGIN, {"loader": loader, "epoch": epoch, "first": first})

    def end(self, loader: int) -> None:
        """A loader is needed no more; collective."""
        self._ask(CLOSE, {"loader": loader})

    def close(self) -> None:
        """Leave the servers, which end when all trainers have; harmless the second time."""
        if not self._is_over.is_set():
            self._ask(BYE)
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
        self,
        servers: Servers,
        channel: Channel,
        made: Mapping[str, Any],
        options: LoaderOptions,
        types: Types,
    ) -> None:
        super().__init__(channel.swap, options.prefetch, options.prefetch)
        self._servers, self._channel, self._types = servers, channel, types
        self._loader, self._steps = made["loader"], made["steps"]
        self._make, self._transform = maker(options), options.transform
        kind = made["input_type"]
        self.input_type = tuple(kind) if isinstance(kind, list) else kind

    def __len__(self) -> int:
        return self._steps

    def agree(self, group: Group) -> None:
        """Learn what other trainers call; collective."""
        most = torch.tensor([self._transform is not None, self._prefetch > 0])
        self._meets, is_ahead = group.all_reduce(most.long(), "max").tolist()
        self._are_in_turn = not is_ahead

    def _begun(self, epoch: int, first: int) -> None:
        self._servers.begin(self._loader, epoch, first)

    def _epoch_of(self, epoch: int, first: int) -> Iterator[Any]:
        for _ in range(first, self._steps):
            message = self._channel.ask(NEXT)
            batch = transformed(self._transform, self._make(from_message(message, self._types)))
            if self._meets:  # a transform may have raised: the others do, at the same batch
                self._channel.ask(TICK)
            yield batch

    def _ended(self) -> None:
        self._servers.end(self._loader)


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
