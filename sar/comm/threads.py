"""Ranks that are threads of one process: the same streaming without a network, for tests."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.comm.current import use_group
from sar.comm.group import Done, Farewell, Group, Work
from sar.errors import CommError, MistakeWarning


class _Room:
    """What the threads of one group share: a barrier and a slot per rank.

    Attributes:
        rooms: of the whole run, to end them all; those of parts by their members and number.
    """

    def __init__(self, size: int, timeout: float, rooms: dict[Any, _Room] | None = None) -> None:
        self.barrier, self.timeout = threading.Barrier(size, timeout=timeout), timeout
        self.slots: list[Any] = [None] * size
        self.rooms = {} if rooms is None else rooms
        self.rooms.setdefault(id(self), self)

    def abort(self) -> None:
        """Wake all who wait in any room of the run."""
        for room in list(self.rooms.values()):
            room.barrier.abort()


class ThreadGroup(Group):
    """A rank of a group whose ranks are threads; made by :meth:`run`."""

    def __init__(self, rank: int, size: int, room: _Room) -> None:
        super().__init__(rank, size, "threads", torch.device("cpu"))
        self._room, self._parts = room, Counter[tuple[int, ...]]()

    @classmethod
    def run(cls, size: int, fn: Callable[[Group], Any], timeout: float = 60.0) -> list[Any]:
        """Run ``fn(group)`` on ``size`` threads and return the results in rank order.

        The first exception (not its consequences on other ranks) is raised again.
        """
        room, results, failures = _Room(size, timeout), [None] * size, []
        words: dict[int, str] = {}
        judges: list[Farewell] = []

        def body(rank: int) -> None:
            group = cls(rank, size, room)
            try:
                with use_group(group):
                    results[rank] = fn(group)
                if group.farewell is not None:
                    words[rank] = group.farewell.word()
                    judges[:] = [group.farewell] if rank == 0 else judges
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                failures.append(error)
                room.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            causes = [error for error in failures if not isinstance(error, CommError)]
            raise (causes or failures)[0]
        if judges and (told := judges[0].judge(words)):
            warnings.warn(told, MistakeWarning, stacklevel=2)
        return results

    def beside(self) -> ThreadGroup:
        made = _Room(self.size, self._room.timeout, self._room.rooms)
        return ThreadGroup(self.rank, self.size, self._meet(made, lambda rooms: rooms[0]))

    def part(self, members: Sequence[int]) -> ThreadGroup:
        chosen = tuple(members)
        self._parts[chosen] += 1
        key = id(self._room), chosen, self._parts[chosen]
        made = _Room(len(chosen), self._room.timeout, self._room.rooms)
        room = self._room.rooms.setdefault(key, made)
        return ThreadGroup(chosen.index(self.rank), len(chosen), room)

    def _meet(self, offering: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Offer a value, read everybody's, and leave together."""
        self._room.slots[self.rank] = offering
        try:
            self._room.barrier.wait()
            result = read(self._room.slots)
            self._room.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CommError(f"rank {self.rank}: another rank failed or never came") from error
        self._room.slots[self.rank] = None  # nobody reads it any more: memory may be free
        return result

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def reduced(parts: list[Tensor]) -> Tensor:
            stack = torch.stack([part.clone() for part in parts])
            if op == "sum":
                return stack.sum(0)
            return stack.amax(0) if op == "max" else stack.amin(0)

        tensor.copy_(self._meet(tensor, reduced))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meet(tensor, lambda parts: [part.clone() for part in parts])

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._meet(tensor, lambda parts: parts[src].clone()))

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        def gather(offers: list[tuple[Tensor, list[int]]]) -> Tensor:
            mine = [rows.split(counts)[self.rank] for rows, counts in offers]
            if [len(rows) for rows in mine] != recv_counts:
                got = [len(rows) for rows in mine]
                raise CommError(f"rank {self.rank}: got {got} rows, expected {recv_counts}")
            return torch.cat(mine)

        recv.copy_(self._meet((send, send_counts), gather))
        return Done()
