"""What a failing rank leaves in the store for the others, and whom they name if it left nothing.

:func:`guarded` bounds waits inside torch or the system: it gives up when a rank has failed.

Note [Stuck threads]
A thread that was given up holds things of torch that may abort the process while it is taken down,
also when the thread has ended. So such a process ends at once, after its exit handlers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sar.comm.diagnosis import Liveness, rank_names, user_line, where_ranks_stand
from sar.errors import CommError

_T = TypeVar("_T")

_FIRST_ERROR = "sar/first_error"
_SOME_LEFT = "sar/left"  # after an error
_LEFT = "sar/left/{}"  # by rank
_STUCK = "sar/stuck/{}"  # where ranks stand whose collective has failed, by rank
_REPORTS, _REPORT = "sar/words/{}", "sar/word/{}/{}"  # by rank; by their number and rank
_STORE_SECONDS = 2.0  # to wait for an answer of the store
_WORD_SECONDS = 1.0  # for the failing rank to leave its error
_CALL_SECONDS = 1.5  # for all that live to say so
_LEAVE_SECONDS = 2.0  # for others to see that a rank has left
_PAUSE, _WORD_PAUSE = 0.1, 0.01
_LOOK_SECONDS = 0.5  # from one look at who has ended to the next, while ranks connect
_GRACE_SECONDS = 1.5  # for what waits to end by itself then, with the better error
_DELAY_SECONDS = 5.0  # for what a rank has sent before it ended to arrive
_TEXT = 2000  # characters
stuck_threads: list[threading.Thread] = []  # wait for others in vain; see Note [Stuck threads]
_GONE = "died or left early: the process has ended without a word"


@dataclass(eq=False)
class FailureBoard:
    """This rank's view of the store, if there is one, in which failing ranks leave their error.

    Attributes:
        liveness: ``None`` where this rank could not listen: no rank is said to have ended then.
        keeper: the rank whose process the store is in; ``None``: a launcher's.
        is_gone: the process that keeps the store has ended.
        explained: the last result of :meth:`explain`; whoever sees it set begins nothing more.
    """

    rank: int
    size: int
    store: dist.Store | None
    liveness: Liveness | None = None
    keeper: int | None = None
    names: Sequence[str] = ()
    is_gone: bool = False
    explained: str | None = None
    _unanswered: threading.Thread | None = None  # a question that waits too long

    @property
    def is_lost(self) -> bool:
        """Whether the store does not answer, for now or for ever."""
        return self.is_gone or (self._unanswered is not None and self._unanswered.is_alive())

    def leave(self, error: BaseException) -> None:
        """Record that this rank leaves, and why, unless another's error is the cause."""
        is_own = not isinstance(error, CommError)
        text = f"{self.called([self.rank])}: {type(error).__name__}: {error}"
        self.leave_word(text if is_own else None)

    def leave_word(self, text: str | None) -> None:
        """Record that this rank leaves, with a text; the first rank's text is kept."""

        def tell(store: dist.Store) -> None:
            if text is not None:
                store.compare_set(_FIRST_ERROR, "", text[:_TEXT])
            store.set(_LEFT.format(self.rank), "")
            store.set(_SOME_LEFT, "")

        self._ask(tell)

    def wait_for_others(
        self, ranks: Iterable[int] | None = None, seconds: float = _LEAVE_SECONDS
    ) -> None:
        """Return when ``ranks``, or all, have left after an error, or after ``seconds``. The store
        ends with this process, and they still have to read it. Who has ended is not waited for."""
        end = time.monotonic() + seconds
        readers = set(range(self.size) if ranks is None else ranks)
        if self.liveness is not None:
            readers -= set(self.liveness.ended(readers & set(self.missing(_LEFT))))
        while not readers.isdisjoint(self.missing(_LEFT)) and time.monotonic() < end:
            time.sleep(_PAUSE)

    def some_left(self) -> bool:
        return bool(self._ask(lambda store: store.check([_SOME_LEFT])))

    def first_error(self) -> str | None:
        """What the first failing rank reported, or ``None`` when nothing is known."""

        def read(store: dist.Store) -> str | None:
            return store.get(_FIRST_ERROR).decode() if store.check([_FIRST_ERROR]) else None

        return self._ask(read)

    def missing(self, key: str) -> list[int]:
        """The ranks that have not set ``key``; none when the store does not answer."""
        everyone = list(range(self.size))
        there = self._ask(partial(_known, key=key, ranks=everyone))
        return [] if there is None else [rank for rank in everyone if rank not in there]

    def collect_reports(self, rank: int, size: int, report: str) -> dict[int, str]:
        """Leave a report at the end; rank 0 gets those that come within a second."""

        def ask(store: dist.Store) -> dict[int, str]:
            number = store.add(_REPORTS.format(rank), 1)  # a store may outlive several groups
            key, end = _REPORT.format(number, "{}"), time.monotonic() + _WORD_SECONDS
            store.set(key.format(rank), report)
            if rank:
                return {}
            everyone, here = list(range(size)), {0}
            while len(here) < size and time.monotonic() < end:
                time.sleep(_WORD_PAUSE)
                here = _known(store, key, everyone)
            return {one: store.get(key.format(one)).decode() for one in here}

        return self._ask(ask) or {}

    def explain(self, error: str) -> str:
        """Who failed first, when a collective of this rank failed with ``error``; takes seconds."""
        self._stand()
        self.explained = f"{self.called([self.rank])}: {self._explain(error)}"
        return self.explained

    def _explain(self, error: str) -> str:
        end = time.monotonic() + _WORD_SECONDS
        while True:
            first = self.first_error() or self.ended()
            if first is not None:
                mine = where_ranks_stand({self.rank: user_line()}) if _GONE in first else ""
                first += f"{mine}; does every rank get there?" if mine else ""
                return f"stopped because another rank failed first: {first}"
            if time.monotonic() > end:
                break
            time.sleep(_PAUSE)
        who = self.silent()
        if who is None:
            lost, apart = (
                "another rank left or did not answer in time",
                "all ranks wait, for different things",
            )
            who = lost if self.store is None or self.is_lost else apart
        return f"a collective failed: {who} ({error}){self._where()}"

    def _stand(self) -> None:
        """Tell the others in which line this rank waits in vain."""
        line = user_line()
        self._ask(lambda store: store.set(_STUCK.format(self.rank), line))

    def _where(self) -> str:
        """The lines in which this rank stands, and the others that have told theirs."""

        def read(store: dist.Store) -> dict[int, str]:
            known = _known(store, _STUCK, list(range(self.size)))
            return {rank: store.get(_STUCK.format(rank)).decode() for rank in known}

        return where_ranks_stand({self.rank: user_line(), **(self._ask(read) or {})})

    def ended(self, ranks: Sequence[int] = ()) -> str | None:
        """Name the ranks whose processes ended without a word; also told to the others."""
        gone = self._ended_ranks(ranks or range(self.size))
        left = self._ask(partial(_known, key=_LEFT, ranks=gone)) if gone else None
        gone = [rank for rank in gone if rank not in (left or ())]
        if not gone:
            return None
        if left is None:  # there is no store, or it may have ended with rank 0: others follow
            gone = gone[:1]
        text = f"{self.called(gone)}: {_GONE}"
        self._ask(lambda store: store.compare_set(_FIRST_ERROR, "", text))
        return text

    def _ended_ranks(self, ranks: Iterable[int]) -> list[int]:
        if self.liveness is None:
            return []
        return self.liveness.ended(rank for rank in ranks if rank != self.rank)

    def hopeless(self) -> str | None:
        """Why waiting for all to meet is in vain: a rank has failed or ended, or the store has."""
        return self.first_error() or self.ended() or self.gone()

    def meeting_ends_in(self) -> float | None:
        """Seconds that a wait for all to meet may last yet; ``None``: nobody is missing."""
        return _GRACE_SECONDS if self.hopeless() else None

    def exchange_ends_in(self) -> float | None:
        """Seconds that a collective may last yet; ``None``: nobody is missing. A rank that has
        ended may have left in the usual way, its part done."""
        if self._ask(lambda store: store.check([_SOME_LEFT]) or store.check([_FIRST_ERROR])):
            return 0.0
        return _DELAY_SECONDS if self._ended_ranks(range(self.size)) else None

    def gone(self) -> str | None:
        """A text that names the keeper of the store if it has ended."""
        if not self.is_gone:
            return None
        keeper = "the launcher" if self.keeper is None else self.called([self.keeper])
        return f"{keeper}, which keeps the ranks' store, has ended"

    def silent(self) -> str | None:
        """Name the ranks that do not say within seconds that they, too, wait for somebody."""
        self._stand()
        end = time.monotonic() + _CALL_SECONDS
        while (waiting := self.missing(_STUCK)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        if self.is_gone:
            return self.gone()
        if self.is_lost and self.keeper is not None and self.keeper != self.rank:
            keeper = self.called([self.keeper])
            return f"{keeper}, which keeps the ranks' store, did not answer in time"
        return f"{self.called(waiting)} did not answer within the timeout" if waiting else None

    def called(self, ranks: list[int]) -> str:
        return rank_names(ranks, self.names)

    def _ask(self, question: Callable[[dist.Store], _T]) -> _T | None:
        """Ask the store for a bounded time: its host may be gone without a word, or busy. ``None``
        without an answer, and as long as an earlier question waits for its own."""
        answers: list[_T] = []
        store = self.store
        if store is None or self.is_lost:
            return None

        def body() -> None:
            try:
                answers.append(question(store))
            except dist.DistNetworkError:
                self.is_gone = True
            except (RuntimeError, ValueError):  # nothing there
                pass

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        thread.join(_STORE_SECONDS)
        if thread.is_alive():
            self._unanswered = thread
        return answers[0] if answers else None


def _known(store: Any, key: str, ranks: list[int]) -> set[int]:
    return {rank for rank in ranks if store.check([key.format(rank)])}


def guarded(
    make: Callable[[], _T],
    ends_in: Callable[[], float | None],
    device: torch.device,
    limit: float,
) -> _T:
    """Return or raise what ``make`` does; ``TimeoutError`` after ``limit`` seconds, or those that
    ``ends_in`` gives it when a rank has failed. A thread runs it, on ``device``: what torch waits
    for has limits of its own, one behind the other, or none, and a network or a rank that goes away
    before it has connected is not noticed."""
    outcome: Future[_T] = Future()
    index = torch.cuda.current_device() if device.type == "cuda" else None

    def body() -> None:
        try:
            if index is not None:
                torch.cuda.set_device(index)
            outcome.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised below
            outcome.set_exception(error)

    thread = threading.Thread(target=body, name="sar-connecting", daemon=True)
    stuck_threads.append(thread)  # also if an interrupt comes now
    thread.start()
    _watch(thread, ends_in, limit)
    if not outcome.done():
        raise TimeoutError("no answer")
    stuck_threads.remove(thread)
    return outcome.result()


def _watch(thread: threading.Thread, ends_in: Callable[[], float | None], limit: float) -> None:
    """Return when the thread or the time has ended, or a rank that it needs has."""
    end = time.monotonic() + limit
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, _LOOK_SECONDS))
        if left > _LOOK_SECONDS and thread.is_alive() and (rest := ends_in()) is not None:
            end = min(end, time.monotonic() + rest)  # what ended may have met all before
