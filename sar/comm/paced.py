"""Large exchanges over sockets: a permutation of the ranks at a time.

An all-to-all of large messages uses links badly. Several senders to one rank share its link while
their own are half idle. And two ranks that send to each other over one connection take turns: what
says that a buffer is ready to receive lies behind the other direction's rows. So large exchanges go
out in steps. In the step of distance d every rank receives from the rank d ahead and sends to the
rank d behind: each link carries one message in and one out. A step begins when the one before has
ended here. Where a step has two ranks send to each other, either direction has its own connection.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

Callback = Callable[[], None]

_CHECK_SECONDS = 1.0


class Ends(Protocol):
    """What tells when it has ended."""

    def when_done(self, callback: Callback) -> None:
        """Call back when it has ended or failed, in any thread."""


class Begun(Ends, Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when it has ended; raise if it failed."""


@dataclass(frozen=True)
class Message:
    """An all-to-all in which a rank has at most one source and one target.

    Attributes:
        recv, send: the rows; empty where there is nobody.
        source, target: ranks.
        is_back: goes from higher to lower ranks, while another one goes up.
    """

    recv: Tensor
    send: Tensor
    source: int
    target: int
    is_back: bool = False


def steps_of(
    rank: int,
    recv: Tensor,
    send: Tensor,
    recv_counts: list[int],
    send_counts: list[int],
    distances: Sequence[int],
) -> Iterator[list[Message]]:
    """Per distance what this rank sends and receives: one message, or one either way."""
    size = len(recv_counts)
    recv_ends, send_ends = [*accumulate(recv_counts)], [*accumulate(send_counts)]
    for distance in distances:
        source, target = (rank + distance) % size, (rank - distance) % size
        arriving = recv[recv_ends[source] - recv_counts[source] : recv_ends[source]]
        leaving = send[send_ends[target] - send_counts[target] : send_ends[target]]
        message = Message(arriving, leaving, source, target)
        yield [message] if source != target else _two_ways(rank, message)


def _two_ways(rank: int, both: Message) -> list[Message]:
    """A message to and from the same rank as the one that goes up and the one that goes back."""
    peer = both.source
    inward = Message(both.recv, both.send[:0], peer, peer, is_back=peer > rank)
    outward = Message(both.recv[:0], both.send, peer, peer, is_back=rank > peer)
    return [outward, inward] if inward.is_back else [inward, outward]


class Turn:
    """Collectives that begin together, at once or when the lane is free for them."""

    def __init__(self, begin: Callable[[], list[Begun]]) -> None:
        self._begin, self._begun, self._lock = begin, threading.Event(), threading.Lock()
        self._works: list[Begun] = []
        self._callbacks: list[Callback] = []
        self._error: Exception | None = None

    def start(self) -> None:
        """Begin; what goes wrong is raised where it is waited for."""
        try:
            self._works = self._begin()
        except Exception as error:  # noqa: BLE001
            self._error = error
        with self._lock:
            self._begun.set()
        for callback in self._callbacks:
            when_all_done(self._works, callback)

    def wait(self, check: Callback) -> None:
        """Return when all have ended; raise for the first that fails, or what ``check`` does."""
        while not self._begun.wait(_CHECK_SECONDS):
            check()
        if self._error is not None:
            raise self._error
        ended: SimpleQueue[Begun] = SimpleQueue()
        for work in self._works:
            work.when_done(partial(ended.put, work))
        for _ in self._works:
            _next(ended, check).wait()

    def when_done(self, callback: Callback) -> None:
        with self._lock:
            if not self._begun.is_set():
                self._callbacks.append(callback)
                return
        when_all_done(self._works, callback)


def _next(ended: SimpleQueue[Begun], check: Callback) -> Begun:
    while True:
        try:
            return ended.get(timeout=_CHECK_SECONDS)
        except Empty:
            check()


class Turns:
    """The turns of one exchange.

    Args:
        check: called every second while a turn is waited for. It raises where the turn may never
            end, as gloo does not always tell that a message was cut off.
    """

    def __init__(self, turns: list[Turn], check: Callback) -> None:
        self._turns, self._check = turns, check

    def wait(self) -> None:
        for turn in self._turns:
            turn.wait(self._check)

    def when_done(self, callback: Callback) -> None:
        when_all_done(self._turns, callback)


def when_all_done(works: Sequence[Ends], callback: Callback) -> None:
    """Call back once, when the last of them has ended."""
    lock, left = threading.Lock(), len(works)

    def one_done() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            callback()

    if not works:
        callback()
    for work in works:
        work.when_done(one_done)


class Lane:
    """Begins turns in the order they came, of large ones each when the one before has ended.

    A small turn only waits for those before it to begin: so collectives of one process group begin
    in the same order on all ranks.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: deque[tuple[Turn, bool]] = deque()
        self._is_taken = False  # by a large turn
        self._is_starting = False  # some thread is in _advance

    def add(self, turn: Turn, large: bool) -> None:
        """Begin ``turn`` when it may."""
        with self._lock:
            self._waiting.append((turn, large))
        self._advance()

    def is_idle(self) -> bool:
        """Whether all turns that came have begun, so that a small one need not queue."""
        with self._lock:
            return not self._waiting and not self._is_starting

    def clear(self) -> None:
        """Forget the turns that have not begun."""
        with self._lock:
            self._waiting.clear()

    def settle(self, seconds: float) -> None:
        """Begin nothing more; return when no large turn is under way, or after ``seconds``."""
        with self._lock:
            self._waiting.clear()
            self._lock.wait_for(lambda: not self._is_taken, seconds)

    def _advance(self) -> None:
        """Begin what may begin, in one thread: a loop, as turns may end while they are begun."""
        with self._lock:
            if self._is_starting:
                return
            self._is_starting = True
        while (turn := self._next()) is not None:
            turn.start()

    def _next(self) -> Turn | None:
        with self._lock:
            if not self._waiting or (self._waiting[0][1] and self._is_taken):
                self._is_starting = False
                return None
            turn, large = self._waiting.popleft()
            self._is_taken |= large
        if large:
            turn.when_done(self._free)
        return turn

    def _free(self) -> None:
        with self._lock:
            self._is_taken = False
            self._lock.notify_all()
        self._advance()
