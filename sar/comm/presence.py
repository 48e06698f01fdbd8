"""Which ranks' processes have ended, asked of their hosts after a collective has failed.

A transport says that a connection broke, not whose process ended first. So every rank listens on a
port of its own that nobody ever serves: as long as the process lives, working or stopped, the
kernel takes connections for it; when it has ended, by whatever signal, the kernel refuses them.
Nothing runs in the background, and nothing is read.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

_BACKLOG = 128
_ASK_SECONDS = 1.0  # for hosts that say nothing at all
_LOOPBACK = "127."
NAME_LENGTH = 3


class Presence:
    """This rank's port, and those of the others.

    Args:
        address: IPv4, of this host on the network that joins the ranks.

    Raises ``OSError`` where it cannot listen there.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._others: dict[int, tuple[str, int]] = {}

    def name(self) -> list[int]:
        """What the others have to know: host, address, port."""
        address, port = self._listener.getsockname()
        return [_host(), int.from_bytes(socket.inet_aton(address), "big"), port]

    def learn(self, rank: int, name: Sequence[int]) -> None:
        """Take the :meth:`name` of a rank, or zeros of one that does not listen."""
        host, address, port = name
        dotted = socket.inet_ntoa(address.to_bytes(4, "big"))
        is_reachable = not dotted.startswith(_LOOPBACK) or host == _host()
        if port and is_reachable:
            self._others[rank] = dotted, port

    def ended(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose process has ended for certain; takes a second at most.

        A rank whose whole host is gone, or behind a broken network, is not among them.
        """
        calls: dict[int, tuple[int, socket.socket]] = {}
        try:
            for rank in ranks:
                if rank in self._others:
                    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                    one.setblocking(False)
                    calls[one.fileno()] = rank, one
                    one.connect_ex(self._others[rank])
            return sorted(_refused(calls))
        finally:
            for _, one in calls.values():
                one.close()

    def close(self) -> None:
        """From now on this rank counts as ended; harmless the second time."""
        with suppress(OSError):
            self._listener.close()


def _host() -> int:
    """A number that ranks behind one loopback interface have alike, and no others."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        text = boot.read_text(encoding="ascii") + os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux, or hidden
        text = socket.gethostname()
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "little")


def _refused(calls: dict[int, tuple[int, socket.socket]]) -> Iterable[int]:
    """The ranks that are refused, until all hosts have answered or a second is over."""
    poll, waiting = select.poll(), set(calls)
    for number in waiting:
        poll.register(number, select.POLLOUT)
    end = time.monotonic() + _ASK_SECONDS
    while waiting and (left := end - time.monotonic()) > 0:
        for number, _ in poll.poll(left * 1000):
            rank, one = calls[number]
            poll.unregister(number)
            waiting.discard(number)
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED:
                yield rank
