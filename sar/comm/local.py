"""Groups of one process: a rank alone, ranks that are threads for tests, and the group in use."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sar.comm.diagnosis import rank_names, user_line, where_ranks_stand
from sar.comm.group import Done, FinalCheck, Group
from sar.comm.meter import Work
from sar.errors import CommError, MistakeWarning


class LocalGroup(Group):
    """One rank and no process group: what runs before ``initialize_comms``."""

    def __init__(self) -> None:
        super().__init__(0, 1, "local", torch.device("cpu"))

    def part(self, members: Sequence[int]) -> LocalGroup:
        return LocalGroup()


class _State(threading.local):
    """A thread's own group, if it has entered :func:`use_group`; else the process' counts."""

    thread_group: Group | None = None


_thread = _State()
_process: dict[str, Group] = {}


def current_group() -> Group:
    """The group made by ``initialize_comms``; before it, a :class:`LocalGroup` of one rank."""
    if _thread.thread_group is not None:
        return _thread.thread_group
    if "group" not in _process:
        return _process.setdefault("local", LocalGroup())
    return _process.get("part") or _process["group"]


def has_group() -> bool:
    """Whether a group has been set; else this process counts as alone."""
    return _thread.thread_group is not None or "group" in _process


def process_group() -> Group | None:
    """The group made by ``initialize_comms``, whatever a thread has entered; ``None`` before."""
    return _process.get("group")


def set_process_group(group: Group | None, part: Group | None = None) -> None:
    """Make ``group``, or a part of it, what :func:`current_group` returns in this process.

    ``None`` forgets both.
    """
    _process.clear()
    if group is not None:
        _process["group"] = group
    if part is not None:
        _process["part"] = part


@contextmanager
def use_group(group: Group) -> Iterator[Group]:
    """Make ``group`` current for this thread inside the ``with`` block."""
    before, _thread.thread_group = _thread.thread_group, group
    try:
        yield group
    finally:
        _thread.thread_group = before


class Run:
    """What all threads of a run share, guarded by ``changed``.

    Attributes:
        ended: the ranks that have returned or failed.
        first_error: in words, of the rank that failed first.
        rooms: of parts of the ranks, by parent room, members and number of the part.
    """

    def __init__(self, timeout: float) -> None:
        self.changed, self.timeout = threading.Condition(), timeout
        self.threads: list[threading.Thread] = []
        self.ended, self.first_error = set[int](), ""
        self.rooms: dict[Any, Room] = {}

    def new_room(self, members: Sequence[int]) -> Room:
        return Room(self, members)

    def begin(self, rank: int) -> None:
        """A rank's thread has started."""

    def interrupt(self, error: BaseException) -> None:
        """The caller was interrupted while ranks run; they go on."""

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """Note that a rank is gone, and wake those that wait for it."""
        with self.changed:
            self.ended.add(rank)
            if error is not None and not isinstance(error, CommError):
                text = f"rank {rank}: {type(error).__name__}: {error}"
                self.first_error = self.first_error or text
            self.changed.notify_all()

    def where(self) -> str:
        ranks = set(range(len(self.threads))) - self.ended
        return where_ranks_stand({rank: user_line(self.threads[rank]) for rank in ranks})


class Room:
    """A barrier of ``members`` of a run, with a slot for what each of them offers."""

    def __init__(self, run: Run, members: Sequence[int]) -> None:
        self.run, self.members = run, list(members)
        self.slots: list[Any] = [None] * len(members)
        self._here, self._turn, self._is_left = dict[int, str](), 0, False
        self._calls = list[str]()  # of the last that met, by rank

    def wait(self, rank: int, call: str) -> list[str]:
        """Return when all are here, with what each of them calls; raise ``CommError`` when one is
        gone or does not come."""
        run = self.run
        with run.changed:
            turn = self._turn
            self._here[rank] = call
            if len(self._here) == len(self.members) and not self._is_left:
                self._calls = [self._here[one] for one in range(len(self.members))]
                self._here, self._turn = {}, turn + 1
                self._let_go()
                return self._calls
            self._wait(rank, lambda: self._turn != turn or bool(self.lost()))
            if self._turn == turn:
                why, self._is_left = self.lost() or self._late(), True
                self._let_go()
                raise CommError(f"rank {rank}: {why}")
            return self._calls

    def _let_go(self) -> None:
        self.run.changed.notify_all()

    def _wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        self.run.changed.wait_for(is_over, self.run.timeout)

    def lost(self) -> str:
        """Why a member will not come, "" as far as nothing is known."""
        if self.run.first_error:
            return f"stopped because another rank failed first: {self.run.first_error}"
        gone = sorted(self.run.ended.intersection(self.members))
        if gone:
            return f"{rank_names(gone)} has ended{self.run.where()}; does every rank get there?"
        return "a collective has failed before" if self._is_left else ""

    def _late(self) -> str:
        late = [one for rank, one in enumerate(self.members) if rank not in self._here]
        within = f"did not answer within the timeout ({self.run.timeout:g} s)"
        return f"a collective failed: {rank_names(late)} {within}{self.run.where()}"


class ThreadGroup(Group):
    """A rank of a group whose ranks are threads; made by :meth:`run`."""

    def __init__(self, rank: int, size: int, room: Room) -> None:
        super().__init__(rank, size, "threads", torch.device("cpu"))
        self._room, self._parts = room, Counter[tuple[int, ...]]()

    @classmethod
    def run(cls, size: int, fn: Callable[[Group], Any], timeout: float = 60.0) -> list[Any]:
        """Run ``fn(group)`` on ``size`` threads and return the results in rank order.

        The first exception (not its consequences on other ranks) is raised again.
        """
        return cls._run(Run(timeout), size, fn)

    @classmethod
    def _run(cls, run: Run, size: int, fn: Callable[[Group], Any]) -> list[Any]:
        results: list[Any] = [None] * size
        failures: list[BaseException] = []
        room = run.new_room(range(size))
        reports: dict[int, str] = {}
        checks: list[FinalCheck] = []

        def body(rank: int) -> None:
            group = cls(rank, size, room)
            try:
                run.begin(rank)
                with use_group(group):
                    results[rank] = fn(group)
                if group.final_check is not None:
                    reports[rank] = group.final_check.report()
                    checks[:] = [group.final_check] if rank == 0 else checks
                run.end(rank)
            except BaseException as error:  # noqa: BLE001 - handed to the caller below
                failures.append(error)
                run.end(rank, error)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
        run.threads += threads
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            run.interrupt(error)
            raise
        if failures:
            causes = [error for error in failures if not isinstance(error, CommError)]
            first = (causes or failures)[0]
            try:
                raise first
            finally:  # the error's frames hold these names: a cycle, with all tensors of the ranks
                failures.clear()
                del first, causes
        if checks and (problem := checks[0].compare(reports)):
            warnings.warn(problem, MistakeWarning, stacklevel=2)
        return results

    def part(self, members: Sequence[int]) -> ThreadGroup:
        ranks = tuple(members)
        self._parts[ranks] += 1
        key = id(self._room), ranks, self._parts[ranks]
        made = self._room.run.new_room([self._room.members[rank] for rank in ranks])
        room = self._room.run.rooms.setdefault(key, made)
        return type(self)(ranks.index(self.rank), len(ranks), room)

    def _meet(self, call: str, offering: Any, read: Callable[[list[Any]], Any]) -> Any:
        """Offer a value, read everybody's, and leave together."""
        room = self._room
        room.slots[self.rank] = offering
        self._wait_for(call)
        result = read([*room.slots])
        self._wait_for(call)
        room.slots[self.rank] = None  # nobody reads it any more: memory may be free
        return result

    def _wait_for(self, call: str) -> None:
        """Return when all have called this, and raise on all where one calls something else."""
        calls = self._room.wait(self.rank, call)
        if len(set(calls)) > 1:
            raise self._calls_differ(", ".join(f"{rank}: {one}" for rank, one in enumerate(calls)))

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._read("all_gather", tensor, lambda parts: [part.clone() for part in parts])

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        def reduced(parts: list[Tensor]) -> Tensor:  # before ranks leave: not each has all parts
            stack = torch.stack(parts)
            return stack.sum(0) if op == "sum" else stack.amax(0) if op == "max" else stack.amin(0)

        tensor.copy_(self._read(op, tensor, reduced))

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._read("broadcast", tensor, lambda parts: parts[src].clone()))

    def _read(self, call: str, tensor: Tensor, read: Callable[[list[Tensor]], Any]) -> Any:
        """What is read of everybody's tensor; ``call`` is named as in :mod:`sar.comm.direct`."""
        return self._meet(f"{call} of {tensor.numel()} {tensor.dtype}", tensor, read)

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

        recv.copy_(self._meet("exchange", (send, send_counts), gather))
        return Done()
