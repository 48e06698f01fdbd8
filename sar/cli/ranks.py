"""The ranks of a command as processes of this machine: watch them, end them all.

They meet in a store of the launcher's, which listens on the loopback interface alone. A rank
reports its failure through a pipe: nothing is written to a disk, nothing from a socket is
unpickled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

from sar.cli.fork_server import REPORT, ForkServer
from sar.comm import serve_store, tell_failure
from sar.errors import CommError, SarError
from sar.partition.child import death
from sar.registry import modules_in_use

FAILED_FIRST = "another rank failed first: "  # how a rank names the cause of its own failure
LOOPBACK = "127.0.0.1", 0  # any port
_PAUSE = 0.05
_TERM_SECONDS = 2.0  # from the polite signal to the other
_REPORT_BYTES = 1 << 16  # what a pipe holds
_MOST_CHARACTERS = 4000  # of a message, so that two of them never fill it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Rank:
    """A process that runs one rank, as the server that started it tells.

    ``report``: class, message and time of its failure, as it told them. ``status``: exit status,
    negative for a signal, ``None`` while it runs. ``by_us``: the launcher ended it. ``noun``: its
    kind.
    """

    number: int
    server: ForkServer
    report: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    by_us: bool = False
    noun: str = "rank"

    @property
    def title(self) -> str:
        return f"{self.noun} {self.number}"

    def poll(self) -> bool:
        """Whether it has ended; its report is read then."""
        if self.status is None:
            self.status = self.server.statuses.get(self.number)
            if self.status is None:
                return False
            pipe = self.server.reports[self.number]
            os.set_blocking(pipe, False)  # a process of its own may still hold the other end
            with suppress(BlockingIOError, ValueError):
                first = os.read(pipe, _REPORT_BYTES).partition(b"\n")[0]
                self.report = json.loads(first or b"{}")
        return True


def run_ranks(
    words: Sequence[str],
    server: ForkServer,
    timeout: float,
    address: tuple[str, int] = LOOPBACK,
    others: int = 0,
    tell: Callable[[str, int], None] | None = None,
) -> None:
    """Run ``words``, a module and its arguments, as ranks of ``server`` until all have ended.

    Ranks end within ``timeout`` seconds of the first that has. They meet at ``address``, as do
    ``others``, who start elsewhere and come behind; ``tell`` is called with it when they can.

    Raises ``SarError`` naming the rank that failed first and why; ``KeyboardInterrupt`` after an
    interrupt. No rank runs any more then, and the server has ended.
    """
    with closing(server):
        store = _store(*address, server.size + others, timeout)
        if tell is not None:
            tell(address[0], store.port)
        common = {
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(server.size),
            "LOCAL_WORLD_SIZE": str(server.size),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for a store that no rank keeps
        }
        noun = "server" if others else "rank"
        ranks = [Rank(number, server, noun=noun) for number in range(server.size)]
        with _signals_kept() as asked:
            try:
                server.fork(words, common, modules_in_use())
                late = _watch(ranks, server, timeout, asked)
                died = server.status
            finally:
                _end(ranks, server)
    failure = _failure(ranks, late, asked, timeout, died)
    if failure is None:
        return
    if others:
        waiting = range(server.size, server.size + others)
        tell_failure(store, str(failure), waiting, will_come=not asked)
    raise failure


def _store(host: str, port: int, size: int, timeout: float) -> Any:
    try:
        return serve_store(host, port, size, timedelta(seconds=timeout))
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}") from error


def _failure(
    ranks: Sequence[Rank],
    late: Sequence[Rank],
    asked: Sequence[signal.Signals],
    timeout: float,
    died: int | None,
) -> BaseException | None:
    if signal.SIGINT in asked:
        return KeyboardInterrupt(f"the launcher of {len(ranks)} ranks was interrupted")
    if asked:
        return SarError(f"stopped by {asked[0].name}; all ranks were ended")
    if died is not None:
        return SarError(f"the parent of the ranks: {death(died)}")
    if late:
        return SarError(
            f"{late[0].title}: did not end within {timeout:g} seconds after other ranks had "
            "ended without an error; is it stopped?"
        )
    failed = [rank for rank in ranks if rank.status]
    return SarError(first_cause(failed)) if failed else None


def report_failure(error: BaseException) -> None:
    """Tell the launcher, if there is one, of this rank's ``error``; the first one counts."""
    descriptor = os.environ.get(REPORT)
    if descriptor is not None:
        message = str(error)[:_MOST_CHARACTERS]
        report = {"kind": type(error).__name__, "message": message, "when": time.time()}
        with suppress(OSError):  # the launcher is gone
            os.write(int(descriptor), json.dumps(report).encode() + b"\n")


def first_cause(failed: Sequence[Rank]) -> str:
    """A line on the rank that failed first, not on those that lost their peer or were ended."""
    rank = min(failed, key=_suspicion)
    if rank.report:
        text = " ".join(str(rank.report["message"]).split()).rpartition(FAILED_FIRST)[2]
        named = re.match(r"(rank|server|trainer)s? \d", text)
        return text if named else f"{rank.title}: {rank.report['kind']}: {text}"
    if rank.status is not None and rank.status < 0:
        name = signal.Signals(-rank.status).name
        hint = "; out of memory?" if rank.status == -signal.SIGKILL else ""
        return f"{rank.title}: killed by {name}{hint}"
    return f"{rank.title}: left with status {rank.status}"


def _suspicion(rank: Rank) -> tuple[int, float]:
    """Sort key of failures: a signal, an error of its own, a status, a lost peer, ended by the
    launcher; among equals the earliest."""
    if rank.report:
        lost_peer = rank.report["kind"] == CommError.__name__
        return 3 if lost_peer else 1, rank.report["when"]
    if rank.by_us:
        return 4, 0.0
    return 0 if rank.status is not None and rank.status < 0 else 2, 0.0


def _watch(
    ranks: Sequence[Rank], server: ForkServer, timeout: float, asked: Sequence[signal.Signals]
) -> list[Rank]:
    """Wait until all have ended, or one has failed, or this process is asked to end. Returns those
    that do not end when others have."""
    last: float | None = None
    while not asked:
        server.look(_PAUSE)
        running = [rank for rank in ranks if not rank.poll()]
        if not running or any(rank.status for rank in ranks):
            return []
        if len(running) < len(ranks):
            last = last or time.monotonic() + timeout
            if time.monotonic() > last:
                return running
    return []


def _end(ranks: Sequence[Rank], server: ForkServer) -> None:
    """End those that run: politely, then by force."""
    server.look()
    if len(server.pids) < len(ranks):  # it is about to start some
        server.end()
    for number, seconds in ((signal.SIGTERM, _TERM_SECONDS), (signal.SIGKILL, _TERM_SECONDS)):
        running = [rank for rank in ranks if not rank.poll()]
        for rank in running:
            rank.by_us = True
            server.send(rank.number, number)
        end = time.monotonic() + seconds
        while not all([rank.poll() for rank in running]) and time.monotonic() < end:
            server.look(_PAUSE)


@contextmanager
def _signals_kept() -> Iterator[list[signal.Signals]]:
    """Inside, signals that ask this process to end are put into the yielded list: an exception of a
    handler may come where it is swallowed, as in a finalizer."""
    asked: list[signal.Signals] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        wanted = [one for one in _SIGNALS if signal.getsignal(one) != signal.SIG_IGN]  # nohup

        def keep(number: int, frame: FrameType | None) -> None:
            asked.append(signal.Signals(number))

        before = {number: signal.signal(number, keep) for number in wanted}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
