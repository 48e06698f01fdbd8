"""How ranks find each other: the store, the process groups, and one time limit for all of it."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sar.comm.diagnosis import ADDRESS_LENGTH, Liveness
from sar.comm.failure import FailureBoard, guarded
from sar.comm.network import own_address
from sar.comm.process import ProcessGroup
from sar.errors import CommError

_ARRIVED, _JOINS = "sar/arrived/{}", "sar/joins/{}"  # by rank
_SIZE = "sar/size"
_ALL_ARRIVED, _NUM_ARRIVED = "sar/all_arrived", "sar/num_arrived"
_PAUSE = 0.05
_LOOK_SECONDS = 1.0  # from one look at who has ended to the next
_LEAVE_SECONDS = 2.0  # for ranks of other launches to read what happened
_COME_SECONDS = 10.0  # for ranks of other launches to come
_REACHED = timedelta(seconds=10)  # for a store that has answered a moment ago
_HINT = "is the port in use, the address reachable, every rank started?"
_LOOKED_AT = 32  # ranks that a rank looks at while not all have come


def serve_store(address: str, port: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """The store in which ``size`` ranks meet, listening at ``address`` alone.

    Args:
        port: 0 takes a free one; the store's ``port`` says which.

    Raises ``OSError``: the port is taken, or ``address`` is not this host's.
    """
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def tell_failure(store: dist.Store, text: str, readers: range, will_come: bool = True) -> None:
    """Leave word of a failure in a launcher's store, and keep it for ranks of other launches.

    A thread keeps it until they have left, a short time at most, or a longer one where some have
    not come yet and will; no process ends while it runs.
    """
    board = FailureBoard(-1, 1 + max(readers), _for_board(store))
    board.leave_word(text)
    missing = set(readers) & set(board.missing(_ARRIVED))
    if missing == set(readers) and not will_come:
        return
    seconds = _COME_SECONDS if missing and will_come else _LEAVE_SECONDS
    threading.Thread(target=board.wait_for_others, args=(readers, seconds)).start()


def _for_board(store: dist.Store) -> dist.PrefixStore:
    """The part of the store for this attempt of the launcher."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"sar/attempt_{attempt}", store)


def agent_keeps_store() -> bool:
    """Whether the launcher holds the store where ranks meet; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(eq=False)
class Rendezvous:
    """Joins one rank to the others. ``address`` and ``port`` are the store's, ``limit`` bounds all
    phases together, ``names`` of the ranks are the same for all who join."""

    rank: int
    size: int
    backend: str
    device: torch.device
    address: str
    port: int
    limit: timedelta
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._doing, self._keeps_store = "looking for the store", False
        liveness: Liveness | None = None
        with suppress(OSError):
            liveness = Liveness(own_address(self.address))
        keeper = None if agent_keeps_store() else 0
        self._board = FailureBoard(self.rank, self.size, None, liveness, keeper, self.names)

    @property
    def _title(self) -> str:
        return self._board.called([self.rank])

    def group(self) -> ProcessGroup:
        """The group of all ranks. Raises ``CommError`` when they did not meet in time."""
        begin = time.monotonic()
        try:
            limit = self.limit.total_seconds()
            return guarded(self._meet, self._board.meeting_ends_in, self.device, limit)
        except (RuntimeError, OSError, TimeoutError) as error:
            seconds, blame = time.monotonic() - begin, self._blame()
            self._board.leave_word(None if blame == _HINT else blame)
            if self._keeps_store:
                self._board.wait_for_others()
            raise CommError(
                f"{self._title} of {self.size}: could not meet the other ranks at "
                f"{self.address}:{self.port} ({blame}); gave up after {seconds:.1f} s, while "
                f"{self._doing}: {error}"
            ) from error

    def _meet(self) -> ProcessGroup:
        if not dist.is_initialized():
            if self.backend == "mpi":  # its ranks come from mpirun, no store
                dist.init_process_group("mpi", timeout=self.limit)
            else:
                self._keeps_store = self.rank == 0 and not agent_keeps_store()
                store = self._find_store()
                self._doing = "waiting for the others"
                self._wait_for_all(store)
                self._doing = "making torch's default group"
                dist.init_process_group(
                    self.backend,
                    store=store,
                    rank=self.rank,
                    world_size=self.size,
                    timeout=self.limit,
                )
        self._doing = "making the groups"
        group = ProcessGroup(self.backend, self.device, self.limit, self._board, self._keeps_store)
        if self._board.store is None:
            self._learn_from(group)
        return group

    def _find_store(self) -> dist.Store:
        """The store for torch. The board has a connection of its own: one that waits is busy."""
        store = self._served() if self._keeps_store else None
        store = store or self._connected(self._keeps_store)
        self.port = store.port  # where it was 0
        own = self._connected(limit=min(self.limit, _REACHED))
        own.set_timeout(self.limit)
        self._board.store = _for_board(own)
        return _for_board(store)

    def _connected(self, is_master: bool = False, limit: timedelta | None = None) -> dist.TCPStore:
        return dist.TCPStore(
            self.address,
            self.port,
            self.size,
            is_master=is_master,
            timeout=limit or self.limit,
            wait_for_workers=False,
        )

    def _served(self) -> dist.TCPStore | None:
        """The store of this process; ``None`` where it cannot listen at that address alone."""
        try:
            return serve_store(self.address, self.port, self.size, self.limit)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        warnings.warn(
            f"MASTER_ADDR: {self.address} is no address of rank 0's host, as behind a translation "
            "of addresses; its store listens on all interfaces",
            stacklevel=2,
        )
        return None

    def _wait_for_all(self, store: dist.Store) -> None:
        """Arrive, and wait until all have. Raises ``CommError`` when one has gone, or they do not
        agree on how many there are."""
        kinds = Counter(name.partition(" ")[0] for name in self._board.names)
        own = " and ".join(f"{count} {kind}s" for kind, count in kinds.items())
        own = own or f"{self.size} ranks"
        others = store.compare_set(_SIZE, "", own).decode()
        if others != own:
            text = f"{self._title} was started as one of {own}, others of {others}"
            self._board.leave_word(text)
            raise CommError(text)
        store.set(_ARRIVED.format(self.rank), json.dumps(self._address()))
        if store.add(_NUM_ARRIVED, 1) == self.size:
            store.set(_ALL_ARRIVED, "")
        after = [
            (self.rank + step) % self.size for step in range(1, min(self.size, _LOOKED_AT + 1))
        ]
        unseen, look = {0, *after} - {self.rank}, time.monotonic()
        while not store.check([_ALL_ARRIVED]):
            time.sleep(_PAUSE)
            if time.monotonic() > look:
                here = {rank for rank in unseen if store.check([_ARRIVED.format(rank)])}
                self._learn(store, here)
                unseen, look = unseen - here, time.monotonic() + _LOOK_SECONDS
                first = self._board.first_error()
                if first is not None:
                    raise CommError(first)
        self._learn(store, range(self.size))
        store.set(_JOINS.format(self.rank), "")

    def _address(self) -> list[int]:
        """The address where others ask whether this process lives; zeros where they cannot."""
        liveness = self._board.liveness
        return [0] * ADDRESS_LENGTH if liveness is None else liveness.address()

    def _learn(self, store: Any, ranks: Iterable[int]) -> None:
        keys = [_ARRIVED.format(rank) for rank in ranks]
        if self._board.liveness is not None and keys:
            for rank, address in zip(ranks, store.multi_get(keys), strict=True):
                self._board.liveness.learn(rank, json.loads(address))

    def _learn_from(self, group: ProcessGroup) -> None:
        """Exchange all ranks' addresses where there is no store; collective."""
        for rank, found in enumerate(group.all_gather(torch.tensor(self._address()))):
            if self._board.liveness is not None:
                self._board.liveness.learn(rank, found.tolist())

    def _blame(self) -> str:
        """Who failed or did not come, as far as the others or the store tell."""
        first = self._board.hopeless()
        if first is not None:
            return first
        for key, what in ((_ARRIVED, "did not come"), (_JOINS, "came and does not answer")):
            missing = self._board.missing(key)
            if missing:
                return f"{self._board.called(missing)} {what}"
        if self._board.store is not None and (silent := self._board.silent()):
            return silent
        if self._board.store is not None or agent_keeps_store() or self.rank == 0:
            return _HINT
        return f"{self._board.called([0])}, which keeps the ranks' store, did not answer; {_HINT}"
