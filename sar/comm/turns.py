"""Ranks that are threads and take turns: one of them computes at a time.

A rank hands over where it meets a collective and others have yet to come. Turns go forth and back:
the last of a pass is the first of the next, whose memory is still warm.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from sar.comm.group import Group
from sar.comm.local import Room, Run, ThreadGroup
from sar.errors import CommError, SarError

_HELD = 6  # tensors of its rows that a rank has in a turn


class Between(Protocol):
    """What happens at the edges of a turn, in the thread of its rank, while no other computes."""

    def begin(self, rank: int, following: Sequence[int]) -> None:
        """The turn of ``rank`` begins; ``following``: all ranks as their next turns will come."""

    def end(self, rank: int) -> None:
        """The turn of ``rank`` ends at a collective; not where its function has ended."""


class TableMemory(Protocol):
    """Who has the memory that rows of all ranks lie in."""

    def table_bytes(self, held: int, least: int) -> int:
        """How many bytes of rows may be there now, beside ``held`` bytes of a rank; ``SarError``
        where those are less than ``least``."""

    def new_table(self, num_bytes: int) -> Tensor:
        """Memory of no rank's, uint8 [num_bytes]."""


class TurnGroup(ThreadGroup):
    """A rank of a group whose ranks take turns; made by :meth:`run`.

    Results are those of :class:`ThreadGroup`, bit for bit. Each rank has random states of its own,
    of torch, numpy and Python, as a process has. Nobody waits for a time: ranks that would wait
    for each other are seen at once.
    """

    _room: TurnRoom
    in_turns = True
    table: Table | None = None

    def __init__(self, rank: int, size: int, room: Room) -> None:
        super().__init__(rank, size, room)
        self.pool.limit = 0  # an idle buffer would be memory that survives the turn

    @classmethod
    def run(
        cls,
        size: int,
        fn: Callable[[Group], Any],
        timeout: float = math.inf,
        between: Sequence[Between] = (),
        table: int | TableMemory | None = None,
    ) -> list[Any]:
        """Run ``fn(group)`` on ``size`` threads, one at a time; the results in rank order.

        The first exception (not its consequences on other ranks) is raised again. After an
        interrupt each rank ends at its next collective. ``timeout`` has no meaning here. Sums
        over edges are read from a :class:`Table` of so many bytes, if any, or in that memory.
        """
        memory = _Bytes(table) if isinstance(table, int) else table

        def body(group: Any) -> Any:
            if memory is not None:
                group.table = Table(group, memory)
            return fn(group)

        with RandomStates() as states:
            return cls._run(TurnRun(size, [states, *between]), size, body)

    def turn(self) -> None:
        """Return when all ranks have called this; collective, and one pass of turns. What a rank
        did before, the others see behind it."""
        self._wait_for("a pass of turns")

    @property
    def meetings(self) -> int:
        """How often all ranks have met so far, in collectives of any kind."""
        return self._room.meetings

    @property
    def shared(self) -> dict[Any, Any]:
        """Of all ranks, the parts of this group too; safe without a lock, as one computes."""
        return self._room.run.shared


class Table:
    """Rows of all ranks, in memory of their process: each writes its own and reads everybody's.

    Memory is taken when rows need it, and given back when they are to take less.
    """

    def __init__(self, group: TurnGroup, memory: TableMemory) -> None:
        self._group, self._memory = group, memory
        self._read_at: int | None = None  # meetings until rows could be read
        self._num_asked = self._num_kept = 0

    def columns(self, num_rows: int, width: int, dtype: torch.dtype, together: int = 1) -> int:
        """How many of ``width`` columns to publish at a time: equal blocks, as few as may be now.
        Each is of ``together`` numbers a row. Called by all ranks, of which the first decides;
        ``SarError`` where not even one fits."""
        column = max(1, num_rows * together * dtype.itemsize)
        held = _HELD * width * column // self._group.size
        self._num_asked += 1
        asked, room = self._group.shared.get("room of the table", (0, 0))
        if asked != self._num_asked:
            room = self._memory.table_bytes(held, column)
            self._group.shared["room of the table"] = self._num_asked, room
        return math.ceil(width / math.ceil(width / (room // column))) if width else 1

    def wait(self) -> None:
        """Return when all have read what was published last; collective if anything was, unless
        they have met since."""
        if self._read_at == self._group.meetings:
            self._group.turn()
        self._read_at = None

    def publish(
        self, rows: list[Tensor], what: Hashable, first: int, num_rows: int
    ) -> list[Tensor]:
        """Write tensors [*, width] of one dtype at row ``first``; returns for each the rows of all
        ranks, [num_rows, width], until the next call. Collective.

        They are to be read before the next collective of any kind, but for a rank's own. The list
        ``rows`` is emptied: they need not survive the turn. ``CommError`` on all ranks
        where they differ in ``what`` the rows are, or in their kind.
        """
        self.wait()
        widths, dtype = [one.shape[1] for one in rows], rows[0].dtype
        shared, sizes = self._group.shared, [num_rows * width for width in widths]
        said = shared.setdefault("rows of the table", {})
        said[self._group.rank] = what, num_rows, *widths, dtype
        self._have(sum(sizes) * dtype.itemsize)
        memory = shared["table"][: sum(sizes) * dtype.itemsize].view(dtype)
        parts = zip(memory.split(sizes), widths, strict=True)
        tables = [part.view(num_rows, width) for part, width in parts]
        for table in tables:
            mine = rows.pop(0)
            table[first : first + len(mine)] = mine
            del mine
        self._group.turn()
        self._read_at = self._group.meetings
        if len(set(said.values())) > 1:
            each = ", ".join(f"rank {rank}: {one}" for rank, one in sorted(said.items()))
            raise CommError(f"ranks sum different rows ({each}); do they run the same layers?")
        return tables

    def _have(self, size: int) -> None:
        """A table of ``size`` bytes, or of more where there is room; nobody reads the last one."""
        shared = self._group.shared
        _, room = shared.get("room of the table", (0, 0))
        if not size <= len(shared.get("table", ())) <= max(size, room):
            shared.pop("table", None)
            shared["table"] = self._memory.new_table(size)

    def own(self, like: Tensor, first: int, num_rows: int) -> Tensor:
        """The rows that this rank published last, as the only tensor; of the shape and dtype of
        ``like``."""
        size = num_rows * like.shape[1] * like.element_size()
        table = self._group.shared["table"][:size].view(like.dtype).view(num_rows, like.shape[1])
        return table[first : first + len(like)]

    def keep(self, values: Tensor, first: int, num_rows: int) -> Tensor:
        """The values of all ranks, [num_rows], in memory once, while a rank has them; ``values``
        are this rank's, from ``first`` on. Collective."""
        known = self._group.shared.setdefault("kept", WeakValueDictionary())
        self._num_kept += 1
        kept = known.get(self._num_kept)
        if kept is None:
            kept = _memory(num_rows * values.element_size()).view(values.dtype)
            known[self._num_kept] = kept
        kept[first : first + len(values)] = values
        self._group.turn()
        return kept


class _Bytes:
    """A :class:`TableMemory` of so many bytes, for the table and a rank."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def table_bytes(self, held: int, least: int) -> int:
        if held + least > self.num_bytes:
            raise SarError(
                f"memory: got {self.num_bytes:,} bytes for a table of rows and a part's own, "
                f"expected at least {held + least:,}, or a graph of more parts"
            )
        return self.num_bytes - held

    def new_table(self, num_bytes: int) -> Tensor:
        return _memory(num_bytes)


def _memory(size: int) -> Tensor:
    """Bytes of numpy's: no rank's own, which would be moved."""
    return torch.from_numpy(np.empty(size, np.uint8))


class RandomStates:
    """Random states of torch, numpy and Python by rank; the caller's come back at the end."""

    def __init__(self) -> None:
        self._first, self._by_rank = self._now(), dict[int, tuple]()

    @staticmethod
    def _now() -> tuple:
        return torch.get_rng_state(), np.random.get_state(), random.getstate()

    @staticmethod
    def _set(states: tuple) -> None:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])

    def begin(self, rank: int, following: Sequence[int]) -> None:
        self._set(self._by_rank.get(rank, self._first))

    def end(self, rank: int) -> None:
        self._by_rank[rank] = self._now()

    def __enter__(self) -> RandomStates:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(self._first)


class TurnRun(Run):
    """Whose turn it is, guarded by ``changed``.

    Attributes:
        holder: the rank that computes, or did last.
        ready: the ranks that could go on, were it their turn.
        waiting: the room in which a rank waits for others, by rank.
        step: 1 on the way forth, -1 on the way back.
        is_stuck: all ranks wait, each for one that will not come.
        is_interrupted: from outside; no rank goes on.
        shared: see :class:`TurnGroup`.
    """

    def __init__(self, size: int, between: Sequence[Between]) -> None:
        super().__init__(timeout=math.inf)
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self._turns = [threading.Condition(lock) for _ in range(size)]  # to wake one rank, not all
        self.holder, self.step, self.is_stuck, self.is_interrupted = 0, 1, False, False
        self.ready, self.waiting = set(range(size)), dict[int, TurnRoom]()
        self.shared = dict[Any, Any]()
        self._between = between

    def new_room(self, members: Sequence[int]) -> TurnRoom:
        return TurnRoom(self, members)

    def begin(self, rank: int) -> None:
        with self.changed:
            self._take(rank)

    def end(self, rank: int, error: BaseException | None = None) -> None:
        with self.changed:
            super().end(rank, error)
            self._wake()
            self._pass_on()

    def interrupt(self, error: BaseException) -> None:
        """Let each rank fail at its next collective, and wait until all have."""
        with self.changed:
            self.is_interrupted = True
            self.first_error = self.first_error or f"{type(error).__name__} from outside"
            self._wake()
            # No join: before Python 3.13 one that is interrupted takes its thread for ended.
            self.changed.wait_for(lambda: len(self.ended) == len(self.threads))

    def wait_in(self, room: TurnRoom, rank: int) -> None:
        """Let others have their turns until ``room`` lets this rank go on."""
        self.waiting[rank] = room
        try:
            for one in self._between:
                one.end(rank)
            self._pass_on()
            self._take(rank)
        finally:
            self.waiting.pop(rank, None)
            self.ready.discard(rank)

    def let_go(self, room: TurnRoom) -> None:
        """Those that wait in ``room`` may go on."""
        self.ready.update(rank for rank, other in self.waiting.items() if other is room)

    def order(self) -> list[int]:
        """The ranks from the one whose turn comes next to the one whose turn comes last."""
        ahead = [rank for rank in range(len(self.threads)) if self._is_ahead(rank)]
        behind = [rank for rank in range(len(self.threads)) if not self._is_ahead(rank)]
        return ahead[:: self.step] + behind[:: -self.step]

    def _is_ahead(self, rank: int) -> bool:
        return (rank - self.holder) * self.step > 0

    def _take(self, rank: int) -> None:
        self._turns[rank].wait_for(lambda: self.holder == rank)
        self.ready.discard(rank)
        for one in self._between:
            one.begin(rank, self.order())

    def _wake(self) -> None:
        """Ranks whose wait will not end well may go on, and raise."""
        waiting = [one for one in self.waiting.items() if one[0] not in self.ready]
        self.ready.update(rank for rank, room in waiting if room.lost())  # which looks at threads

    def _pass_on(self) -> None:
        if not self.ready and self.waiting:
            self.is_stuck = True
            self._wake()
        following = [rank for rank in self.order() if rank in self.ready]
        if following:
            self.step *= 1 if self._is_ahead(following[0]) else -1
            self.holder = following[0]
        self._turns[self.holder].notify()


class TurnRoom(Room):
    """A barrier at which ranks hand over; the last to come goes on."""

    run: TurnRun

    @property
    def meetings(self) -> int:
        return self._turn

    def wait(self, rank: int, call: str) -> list[str]:
        if self.run.is_interrupted:  # also the last to come, whom nobody has to wait for
            raise CommError(f"rank {rank}: {self.run.first_error}")
        return super().wait(rank, call)

    def lost(self) -> str:
        if self.run.is_stuck and not super().lost():
            return f"ranks wait for each other in different collectives{self.run.where()}"
        return super().lost()

    def _let_go(self) -> None:
        self.run.let_go(self)

    def _wait(self, rank: int, is_over: Callable[[], bool]) -> None:
        self.run.wait_in(self, self.members[rank])
