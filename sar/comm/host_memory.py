"""Rows between the ranks of one host, read from the sender's memory.

Through sockets the kernel copies a row twice, and threads wake for it on both sides: a fifth of the
processor time of many ranks on a host. Here a rank tells each peer, over a Unix socket of that
pair, where the rows for it lie. The peer copies them to where they belong (``process_vm_readv``)
and says so; the sender's buffer is free then. Small messages hold their rows themselves.

Nothing runs in the background. Whoever waits for one exchange serves all that are in flight, so
ranks may wait for theirs in different orders. One thread of a process exchanges at a time.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from torch import Tensor

from sar.comm.failure import FailureBoard

ROWS, SMALL = range(2)  # channels: exchanges of one may pass those of the other
_HEAD = struct.Struct("<BB6xQQQ")  # kind, channel, number of the exchange, address, bytes
_HERE, _INSIDE, _READ = range(3)  # kinds: rows at an address, rows behind the head, "I read them"
_SMALL_BYTES = 8192  # what a message may hold itself: copied once more, but never answered
_LONGEST_POLL = 2**31 - 1  # milliseconds
_Key = tuple[int, int]  # channel and number
_Part = tuple[int, int]  # address and bytes


class _Span(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def read_memory(pid: int, address: int, into: int, nbytes: int) -> None:
    """Copy bytes of process ``pid`` of this host to the address ``into`` of this one. Raises
    ``OSError``: it has ended, or the system does not permit it."""
    while nbytes:
        mine, theirs = _Span(into, nbytes), _Span(address, nbytes)
        done = _libc().process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
        if done <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"process {pid} cannot be read, {os.strerror(number)}")
        address, into, nbytes = address + done, into + done, nbytes - done


class Flight:
    """An exchange in flight: address and bytes of rows that are still ``coming``, by peer; peers
    that have ``unread`` rows; ``buffers``, kept until then, whatever becomes of the caller."""

    def __init__(
        self, memory: HostMemory, key: _Key, buffers: tuple[Tensor, ...], coming: dict[int, _Part]
    ) -> None:
        self._memory, self.key, self.buffers = memory, key, buffers
        self.coming, self.unread = coming, set[int]()

    def wait(self) -> None:
        """Serve all exchanges until this one's rows have come and its buffers are free."""
        memory = self._memory
        end = time.monotonic() + memory.timeout
        try:
            while self.coming or self.unread:
                missing = memory.gone and memory.gone & (self.coming.keys() | self.unread)
                if missing:
                    raise ConnectionError(f"rank {min(missing)} has left")
                memory.serve(end)
        except (RuntimeError, OSError) as error:
            memory.on_failure(error)
            raise


class HostMemory:
    """A rank's end of the exchange with all others; see :func:`sar.comm.one_host.connect`.

    Attributes:
        gone: peers that have left.
        on_failure: is told of an error before it is raised, and may raise another one.
        board, refuse: the group's failure board, and what is called, to raise, when an exchange
            begins after the end of the group or after a failure that the board has explained.
    """

    def __init__(
        self, rank: int, peers: dict[int, tuple[socket.socket, int]], timeout: float
    ) -> None:
        self._rank, self.timeout, self._process = rank, timeout, os.getpid()
        self._sockets = {peer: one for peer, (one, _) in peers.items()}
        self._pids = {peer: pid for peer, (_, pid) in peers.items()}
        self._ranks = {one.fileno(): peer for peer, one in self._sockets.items()}
        self._poll = select.poll()
        for number in self._ranks:
            self._poll.register(number, select.POLLIN)
        self.gone = set[int]()
        self.on_failure: Callable[[Exception], None] = lambda error: None
        self.board: FailureBoard | None = None
        self.refuse: Callable[[], None] = lambda: None
        self._is_closed = False
        self._begun = [0, 0]  # exchanges of each channel
        self._flights: dict[_Key, Flight] = {}
        self._early: dict[tuple[_Key, int], bytes] = {}  # of exchanges that begin here later

    def exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        distances: Sequence[int] = (),
        channel: int = ROWS,
    ) -> Flight:
        """:meth:`sar.comm.group.Group.exchange` of contiguous tensors on the CPU. Raises
        ``RuntimeError`` when a peer sends something else, ``OSError`` when it has ended,
        ``ValueError`` for buffers that are not contiguous, or do not fit the counts."""
        if self._is_closed or (self.board is not None and self.board.explained is not None):
            self.refuse()
        coming, going = _parts(recv, recv_counts), _parts(send, send_counts)
        into, wanted = coming.pop(self._rank, (0, 0))
        address, nbytes = going.pop(self._rank, (0, 0))
        if nbytes != wanted:
            raise ValueError(f"counts: got {nbytes} bytes for this rank, expected {wanted}")
        ctypes.memmove(into, address, nbytes)
        key = channel, self._begun[channel]
        self._begun[channel] += 1
        flight = self._flights[key] = Flight(self, key, (recv, send), coming)
        try:
            for step in range(1, len(self._sockets) + 1):  # not all to the same rank first
                peer = (self._rank + step) % (len(self._sockets) + 1)
                if peer in going:
                    self._post(flight, peer, *going[peer])
            for peer in self._sockets:
                early = self._early.pop((key, peer), None)
                if early is not None:
                    self._copy_rows(flight, peer, early)
        except (RuntimeError, OSError) as error:
            self.on_failure(error)
            raise
        if not flight.coming and not flight.unread:
            self._flights.pop(key, None)  # whether or not somebody ever waits for it
        return flight

    def hang_up(self) -> None:
        """Close all sockets: peers that wait for this rank raise; what they may read stays."""
        for one in self._sockets.values():
            if os.getpid() == self._process:  # a forked child holds copies, and may end
                with suppress(OSError):  # the peer was faster
                    one.shutdown(socket.SHUT_RDWR)
            one.close()
        self.gone.update(self._sockets)

    def close(self) -> None:
        """Hang up and free all buffers: whoever could answer has read what was there."""
        self._is_closed = True
        self.hang_up()
        self._flights.clear()

    def _post(self, flight: Flight, peer: int, address: int, nbytes: int) -> None:
        kind, rows = _HERE, b""
        if nbytes <= _SMALL_BYTES:
            kind, rows = _INSIDE, ctypes.string_at(address, nbytes)
        else:
            flight.unread.add(peer)
        with suppress(ConnectionError):  # what it sent before it left still counts
            self._tell(peer, _HEAD.pack(kind, *flight.key, address, nbytes) + rows)

    def _tell(self, peer: int, message: bytes) -> None:
        try:
            self._sockets[peer].send(message)
        except BlockingIOError as error:
            raise TimeoutError(f"rank {peer} takes no messages") from error

    def serve(self, end: float) -> None:
        """Take a message of every peer that sent one; wait for the first until ``end``."""
        ready = self._poll.poll(min(max(0.0, end - time.monotonic()) * 1000, _LONGEST_POLL))
        if not ready and time.monotonic() >= end:
            raise TimeoutError(f"no answer for {self.timeout:g} seconds")
        for number, _ in ready:
            peer = self._ranks[number]
            try:
                message = self._sockets[peer].recv(_HEAD.size + _SMALL_BYTES)
            except ConnectionError:  # told once; what it sent before can be read then
                continue
            if message:
                self._take(peer, message)
            else:
                self.gone.add(peer)
                self._poll.unregister(number)

    def _take(self, peer: int, message: bytes) -> None:
        kind, channel, number, _, _ = _HEAD.unpack_from(message)
        key = channel, number
        if kind != _READ and number >= self._begun[channel]:
            self._early[key, peer] = message
            return
        flight = self._flights.get(key) or Flight(self, key, (), {})  # over: expects nothing
        if kind == _READ:
            flight.unread.discard(peer)
        else:
            self._copy_rows(flight, peer, message)
        if not flight.coming and not flight.unread:
            self._flights.pop(key, None)

    def _copy_rows(self, flight: Flight, peer: int, message: bytes) -> None:
        """Copy a peer's rows to their place."""
        kind, channel, number, address, nbytes = _HEAD.unpack_from(message)
        into, wanted = flight.coming.get(peer, (0, 0))
        if nbytes != wanted:
            self.hang_up()  # no later message can be believed
            raise RuntimeError(
                f"ranks call different things, or for different numbers; rank {peer} sends "
                f"{nbytes} bytes, rank {self._rank} expected {wanted}"
            )
        if kind == _INSIDE:
            ctypes.memmove(into, message[_HEAD.size :], nbytes)
        else:
            read_memory(self._pids[peer], address, into, nbytes)
            # An answer that arrives shows that the peer was there, and kept the rows, all the time.
            self._tell(peer, _HEAD.pack(_READ, channel, number, 0, 0))
        del flight.coming[peer]


def _parts(buffer: Tensor, counts: Sequence[int]) -> dict[int, _Part]:
    """Address and bytes of each rank's rows in ``buffer``, of the ranks that have some."""
    if not buffer.is_contiguous() or buffer.device.type != "cpu" or sum(counts) != len(buffer):
        raise ValueError(
            f"buffer: got {tuple(buffer.shape)} with strides {buffer.stride()} on {buffer.device} "
            f"for {sum(counts)} rows, expected as many rows, contiguous, on the CPU"
        )
    address, row = buffer.data_ptr(), buffer.nbytes // max(1, buffer.shape[0])
    parts = {}
    for rank, count in enumerate(counts):
        if count * row:
            parts[rank] = address, count * row
        address += count * row
    return parts
