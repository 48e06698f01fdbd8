"""Where ranks meet: the store, the process groups, and one limit of time for all of it."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sar.comm.failure import named
from sar.comm.network import own_address
from sar.comm.process import ProcessGroup
from sar.errors import CommError

_T = TypeVar("_T")

_ARRIVED, _ALL_ARRIVED, _NUM_ARRIVED = "sar/arrived/{}", "sar/all_arrived", "sar/num_arrived"
_ASK_SECONDS = 1.0  # for the store to say who is missing
_stuck: list[threading.Thread] = []  # what did not end in time, perhaps never will


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


def agent_keeps_store() -> bool:
    """Whether the launcher holds the store where ranks meet; else rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def stuck() -> bool:
    """Whether this process still has a thread that tries to meet the others in vain."""
    return any(thread.is_alive() for thread in _stuck)


class Meeting:
    """One rank's way to the others.

    Args:
        address, port: of the store.
        limit: of all the way.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        device: torch.device,
        address: str,
        port: int,
        limit: timedelta,
    ) -> None:
        self.rank, self.size, self.backend, self.device = rank, size, backend, device
        self.address, self.port, self.limit = address, port, limit
        self._store: dist.Store | None = None
        self._doing = "looking for the store"

    def group(self) -> ProcessGroup:
        """The group of all ranks. Raises ``CommError`` when they did not meet in time."""
        begin = time.monotonic()
        try:
            return _within(self.limit.total_seconds(), self._meet, self.device)
        except (RuntimeError, OSError, TimeoutError) as error:
            seconds = time.monotonic() - begin
            raise CommError(
                f"rank {self.rank} of {self.size}: could not meet the other ranks at "
                f"{self.address}:{self.port} ({self._missing()}is the port in use, the address "
                f"reachable, every rank started?); gave up after {seconds:.1f} s, while "
                f"{self._doing}: {error}"
            ) from error

    def _meet(self) -> ProcessGroup:
        own_store = False
        if not dist.is_initialized():
            if self.backend == "mpi":  # its ranks come from mpirun, no store
                dist.init_process_group("mpi", timeout=self.limit)
            else:
                own_store = self.rank == 0 and not agent_keeps_store()
                self._join(self._find_store(own_store))
        self._doing = "making the groups"
        return ProcessGroup(
            self.backend, self.device, self.limit, self._store, own_address(self.address), own_store
        )

    def _find_store(self, own_store: bool) -> dist.Store:
        store = self._served() if own_store else None
        if store is None:
            store = dist.TCPStore(
                self.address,
                self.port,
                self.size,
                is_master=own_store,
                timeout=self.limit,
                wait_for_workers=False,
            )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"sar/attempt_{attempt}", store)
        return self._store

    def _served(self) -> dist.Store | None:
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

    def _join(self, store: dist.Store) -> None:
        """Wait until all ranks are there, and make torch's default group."""
        self._doing = "waiting for the others"
        store.set(_ARRIVED.format(self.rank), "")
        if store.add(_NUM_ARRIVED, 1) == self.size:
            store.set(_ALL_ARRIVED, "")
        store.wait([_ALL_ARRIVED], self.limit)
        self._doing = "making torch's default group"
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=self.limit
        )

    def _missing(self) -> str:
        """Which ranks have not come, where the store tells."""
        if self._store is None:
            return ""
        with suppress(RuntimeError, TimeoutError):
            missing = _within(_ASK_SECONDS, self._not_arrived, self.device)
            if missing:
                return f"{named(missing)} did not come; "
        return ""

    def _not_arrived(self) -> list[int]:
        store: Any = self._store
        return [rank for rank in range(self.size) if not store.check([_ARRIVED.format(rank)])]


def _within(seconds: float, work: Callable[[], _T], device: torch.device) -> _T:
    """What ``work`` returns or raises; ``TimeoutError`` if it does neither in time.

    A thread does it: what torch waits for has limits of its own, one behind the other, and a
    network that goes away in the middle is not always noticed.
    """
    done: list[_T] = []
    failed: list[BaseException] = []
    index = torch.cuda.current_device() if device.type == "cuda" else None

    def body() -> None:
        try:
            if index is not None:
                torch.cuda.set_device(index)  # each thread has its own
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    thread = threading.Thread(target=body, name="sar-meeting", daemon=True)
    thread.start()
    _stuck.append(thread)  # also if an interrupt comes now
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer for {seconds:g} seconds")
    return done[0]
