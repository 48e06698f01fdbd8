"""What error messages say of other ranks: whose process has ended, which lines ranks stand in.

A transport says that a connection broke, not whose process ended first. So every rank listens on a
port that nobody serves: the kernel takes connections to it while the process lives, working or
stopped, and refuses them when it has ended, by whatever signal. Nothing runs in the background.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import FrameType

import torch

ADDRESS_LENGTH = 3
_BACKLOG = 128
_ASK_SECONDS, _ASK_AGAIN_SECONDS = 1.0, 0.1  # for hosts that say nothing at all
_LOOPBACK = "127."
_MOST_LINES, _MOST_PLACES, _MOST_CHARACTERS, _MOST_NAMED = 3, 4, 100, 8
_SAR, _TORCH = (str(Path(one).parents[1]) for one in (__file__, torch.__file__))
_INSTALLED = (_SAR, _TORCH, *sysconfig.get_paths().values(), "<frozen", "<string>")


class Liveness:
    """Which ranks' processes still run: this rank's port, and the addresses of the others.
    ``address`` is this host's IPv4 on the network that joins the ranks. Raises ``OSError`` where
    this process cannot listen there."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._others: dict[int, tuple[str, int]] = {}
        self._silent = set[int]()  # the ranks that did not answer when asked last

    def address(self) -> list[int]:
        """Host number, IPv4 as a number, and port: what others pass to :meth:`learn`."""
        address, port = self._listener.getsockname()
        return [_host(), int.from_bytes(socket.inet_aton(address), "big"), port]

    def learn(self, rank: int, address: Sequence[int]) -> None:
        """Keep the :meth:`address` of a rank; zeros stand for one that does not listen."""
        host, number, port = address
        dotted = socket.inet_ntoa(number.to_bytes(4, "big"))
        is_reachable = not dotted.startswith(_LOOPBACK) or host == _host()
        if port and is_reachable:
            self._others[rank] = dotted, port

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose process has ended for certain; takes a second at most. A rank
        whose whole host is gone, or behind a broken network, is not among them; once silent it is
        waited for a tenth of that."""
        calls: dict[int, tuple[int, socket.socket]] = {}
        try:
            for rank in ranks:
                if rank in self._others:
                    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                    one.setblocking(False)
                    calls[one.fileno()] = rank, one
                    one.connect_ex(self._others[rank])
            return sorted(self._refused(calls))
        finally:
            for _, one in calls.values():
                one.close()

    def _refused(self, calls: dict[int, tuple[int, socket.socket]]) -> Iterator[int]:
        """Ranks whose port refuses, until all hosts have answered or the time is over."""
        poll, waiting = select.poll(), {rank: number for number, (rank, _) in calls.items()}
        for number in calls:
            poll.register(number, select.POLLOUT)
        begin = time.monotonic()
        while waiting:
            most = _ASK_SECONDS if waiting.keys() - self._silent else _ASK_AGAIN_SECONDS
            answers = poll.poll(max(0.0, begin + most - time.monotonic()) * 1000)
            if not answers:
                break
            for number, _ in answers:
                rank, one = calls[number]
                poll.unregister(number)
                del waiting[rank]
                self._silent.discard(rank)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                    yield rank
        self._silent.update(waiting)

    def close(self) -> None:
        """Stop listening: from now on others see this rank as ended; harmless the second time."""
        with suppress(OSError):
            self._listener.close()


def _host() -> int:
    """A number that processes behind one loopback interface share, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        text = boot.read_text(encoding="ascii") + os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or hidden
        text = socket.gethostname()
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def user_line(thread: threading.Thread | None = None) -> str:
    """The innermost line of the user's code that a thread is in, and what called it; "" for none.
    This thread's by default; the main thread's where that has none, as in the autograd engine."""
    frames = _frames()
    for one in (thread or threading.current_thread(), threading.main_thread()):
        stack = traceback.extract_stack(frames[one.ident]) if one.ident in frames else []
        lines = [
            _line(step) for step in reversed(stack) if not step.filename.startswith(_INSTALLED)
        ]
        if lines:
            return ", called in ".join(lines[:_MOST_LINES])
    return ""


def _frames() -> dict[int, FrameType]:
    """The frames of all threads, read without the garbage collector: what it finds may let another
    thread go on, which in Python before 3.11.9 then waits for this one for ever (gh-106883)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def where_ranks_stand(lines: Mapping[int, str]) -> str:
    """The end of a message: the :func:`user_line` of each rank, as far as it is known."""
    ranks: dict[str, list[int]] = {}
    for rank, line in sorted(lines.items()):
        if line:
            ranks.setdefault(line, []).append(rank)
    told = [f"{rank_names(those)} stood in {line}" for line, those in ranks.items()][:_MOST_PLACES]
    if len(ranks) > 1:
        told.append("is one of these lines run by some ranks only, as under `if rank == 0`?")
    return "".join(f"; {one}" for one in told)


def rank_names(ranks: list[int], names: Sequence[str] = ()) -> str:
    """ "rank 1", "ranks 1, 2" or the ranks' ``names``, of the first few."""
    shown = ", ".join(names[rank] if names else str(rank) for rank in ranks[:_MOST_NAMED])
    more = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    noun = "" if names else "rank " if len(ranks) == 1 else "ranks "
    return f"{noun}{shown}{more}"


def _line(step: traceback.FrameSummary) -> str:
    here = os.path.relpath(step.filename)
    file = step.filename if here.startswith("..") else here
    text = f"{file}:{step.lineno}"
    return f"{text} `{step.line[:_MOST_CHARACTERS]}`" if step.line else text
