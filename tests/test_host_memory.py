"""Rows that ranks of one host read from each other's memory: whose arrive, when, and what fails."""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WorkerPool, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import sar
from sar.comm import one_host
from sar.comm.host_memory import SMALL, Flight, HostMemory, read_memory

WIDE = 700  # numbers of a row: four rows and more are read where they lie


@contextmanager
def connected(size: int, timeout: float = 20.0) -> Iterator[list[HostMemory]]:
    """The ends of ``size`` ranks that all live in this process."""
    peers: list[dict[int, tuple[socket.socket, int]]] = [{} for _ in range(size)]
    for low, high in combinations(range(size), 2):
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peers[low][high], peers[high][low] = ((end, os.getpid()) for end in ends)
    ranks = [HostMemory(rank, mine, timeout) for rank, mine in enumerate(peers)]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.close()


def rows(src: int, dst: int, count: int, width: int) -> torch.Tensor:
    return (1000 * src + 100 * dst + torch.arange(float(count))).view(-1, 1).expand(-1, width)


Counts = list[list[int]]  # [p][q]: rows from p to q


def begin(
    mine: HostMemory, rank: int, counts: Counts, width: int, channel: int = 0
) -> tuple[Flight, torch.Tensor]:
    incoming = [row[rank] for row in counts]
    parts = [rows(rank, peer, count, width) for peer, count in enumerate(counts[rank])]
    recv = torch.full((sum(incoming), width), -1.0)
    send = torch.cat(parts).contiguous()
    return mine.exchange(recv, send, incoming, counts[rank], channel), recv


def check(recv: torch.Tensor, rank: int, counts: Counts, width: int) -> None:
    parts = [rows(peer, rank, row[rank], width) for peer, row in enumerate(counts)]
    assert torch.equal(recv, torch.cat(parts))


@st.composite
def exchanges(draw: Any) -> tuple[int, list[tuple[Counts, int, int]], list[list[int]]]:
    """Ranks; counts, width and channel of some exchanges; in which order each waits for them."""
    size = draw(st.integers(1, 4))
    number = st.integers(0, 5)
    counts = st.lists(st.lists(number, min_size=size, max_size=size), min_size=size, max_size=size)
    one = st.tuples(counts, st.sampled_from([1, WIDE]), st.integers(0, 1))
    steps = draw(st.lists(one, min_size=1, max_size=4))
    return size, steps, [draw(st.permutations(range(len(steps)))) for _ in range(size)]


@settings(max_examples=60)
@given(exchanges())
def test_every_row_arrives_whatever_order_ranks_wait_in(
    plan: tuple[int, list[tuple[Counts, int, int]], list[list[int]]],
) -> None:
    size, steps, orders = plan
    with connected(size) as ranks:

        def case(group: Any) -> None:
            begun = [begin(ranks[group.rank], group.rank, *step) for step in steps]
            for number in orders[group.rank]:
                flight, recv = begun[number]
                flight.wait()
                check(recv, group.rank, *steps[number][:2])
                flight.wait()  # a second time changes nothing

        run_threads(size, case)


def test_a_buffer_is_free_when_the_peer_has_read_it() -> None:
    """Large rows stay the sender's until then; small ones travel in the message."""
    with connected(2) as ranks:
        for width, is_free in ((WIDE * 8, False), (4, True)):
            counts = [[0, 1], [0, 0]]
            flight, _ = begin(ranks[0], 0, counts, width)
            assert (not flight.unread) == is_free
            other, recv = begin(ranks[1], 1, counts, width)
            other.wait()
            flight.wait()
            check(recv, 1, counts, width)


def test_what_comes_early_waits_for_its_exchange() -> None:
    with connected(2) as ranks:
        first, second = [[0, 1], [0, 0]], [[0, 2], [0, 0]]
        begun = [begin(ranks[0], 0, counts, WIDE * 8) for counts in (first, second)]
        mine, recv = begin(ranks[1], 1, first, WIDE * 8)
        mine.wait()  # takes the second's message, too
        check(recv, 1, first, WIDE * 8)
        late, recv = begin(ranks[1], 1, second, WIDE * 8)
        late.wait()
        check(recv, 1, second, WIDE * 8)
        for flight, _ in begun:
            flight.wait()


def test_an_exchange_that_nobody_waits_for_keeps_no_buffer() -> None:
    """As after an error that all ranks catch."""
    with connected(2) as ranks:
        counts = [[2, 3], [4, 0]]
        for rank in (0, 1):
            begin(ranks[rank], rank, counts, WIDE * 8)
        begun = [begin(ranks[rank], rank, counts, 1, SMALL)[0] for rank in (0, 1)]
        assert all(one._flights for one in ranks)

        def case(group: Any) -> None:
            begun[group.rank].wait()
            while ranks[group.rank]._flights:
                ranks[group.rank].serve(time.monotonic() + 5)

        run_threads(2, case)
        assert not any(one._flights or one._early for one in ranks)


def test_rows_of_a_rank_that_gave_up_are_not_believed() -> None:
    """It may have freed them: an answer that cannot be given shows it."""
    with connected(2) as ranks:
        counts = [[0, 3], [0, 0]]
        begin(ranks[0], 0, counts, WIDE * 8)
        ranks[0].hang_up()
        assert ranks[0]._flights, "the peer may be reading"
        flight, _ = begin(ranks[1], 1, counts, WIDE * 8)
        with pytest.raises(ConnectionError):
            flight.wait()
        assert flight.coming


def test_what_was_sent_before_a_connection_broke_still_arrives() -> None:
    """A rank that leaves with messages unread resets the connection."""
    with connected(2) as ranks:
        first, second = [[0, 0], [3, 0]], [[0, 1], [0, 0]]
        begin(ranks[1], 1, first, 1)
        flight, recv = begin(ranks[0], 0, first, 1)
        begin(ranks[0], 0, second, 1)  # which nobody reads
        ranks[1].close()
        flight.wait()
        check(recv, 0, first, 1)


@pytest.mark.parametrize("is_child", [True, False])
def test_a_forked_child_cuts_no_connection(is_child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has copies of the sockets; those of the rank itself end the connection for both."""
    with connected(2) as ranks, ranks[0]._sockets[1].dup() as copy:
        if is_child:
            monkeypatch.setattr(os, "getpid", lambda: -1)
        ranks[0].hang_up()
        if is_child:
            assert copy.send(b"still there")
        else:
            with pytest.raises(BrokenPipeError):
                copy.send(b"gone")


def test_small_collectives_may_pass_the_stream() -> None:
    """One rank waits for a reduction first, the other for rows."""
    with connected(2) as ranks:
        counts = [[0, 9], [9, 0]]

        def case(group: Any) -> None:
            kinds = (0, SMALL) if group.rank else (SMALL, 0)
            begun = [begin(ranks[group.rank], group.rank, counts, WIDE, kind) for kind in kinds]
            for flight, recv in begun:
                flight.wait()
                check(recv, group.rank, counts, WIDE)

        run_threads(2, case)


@pytest.mark.parametrize("width", [1, WIDE * 8])
def test_unequal_numbers_are_refused(width: int) -> None:
    with connected(2) as ranks:
        begin(ranks[0], 0, [[0, 3], [0, 0]], width)
        flight, _ = begin(ranks[1], 1, [[0, 2], [0, 0]], width)
        sent, wanted = 3 * width * 4, 2 * width * 4
        text = f"rank 0 sends {sent} bytes, rank 1 expected {wanted}"
        with pytest.raises(RuntimeError, match=text):
            flight.wait()


@pytest.mark.parametrize("width", [1, WIDE * 8])
def test_early_rows_that_nobody_asked_for_are_refused(width: int) -> None:
    with connected(2) as ranks:
        nothing, some = [[0, 0], [0, 0]], [[0, 3], [0, 0]]
        begin(ranks[0], 0, some, width)
        begin(ranks[0], 0, some, width)
        mine, _ = begin(ranks[1], 1, some, width)
        mine.wait()
        ranks[1].serve(time.monotonic() + 5)
        with pytest.raises(RuntimeError, match="rank 1 expected 0"):
            begin(ranks[1], 1, nothing, width)


@pytest.mark.parametrize("counts", [([2, 0], [1, 0]), ([2, 0], [0, 0]), ([0, 0], [1, 0])])
def test_own_rows_have_to_be_as_many(counts: tuple[list[int], list[int]]) -> None:
    with connected(2) as ranks:
        recv, send = (torch.zeros(sum(each), 4) for each in counts)
        with pytest.raises(ValueError, match="counts: got .* bytes for this rank, expected"):
            ranks[0].exchange(recv, send, *counts)
        begin(ranks[0], 0, [[1, 0], [0, 0]], 4)[0].wait()


def test_a_peer_that_takes_no_messages_is_named() -> None:
    with connected(2) as ranks:
        counts = [[0, 1], [0, 0]]
        one_host._make_ready(ranks[0]._sockets[1], 1.0)
        with pytest.raises(TimeoutError, match="rank 1 takes no messages"):
            for _ in range(10_000):
                begin(ranks[0], 0, counts, 2000)


def test_rows_that_nobody_asked_for_are_refused() -> None:
    with connected(3) as ranks:
        begin(ranks[0], 0, [[0, 3, 0], [0] * 3, [0] * 3], 1)
        flight, _ = begin(ranks[1], 1, [[0] * 3, [0] * 3, [0, 2, 0]], 1)
        with pytest.raises(RuntimeError, match="rank 0 sends 12 bytes, rank 1 expected 0"):
            flight.wait()


@pytest.mark.parametrize("is_sender", [True, False])
def test_a_peer_that_has_left_is_named(is_sender: bool) -> None:
    """Whether its rows are missing, or it has not read what it was sent."""
    with connected(3) as ranks:
        counts = [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
        counts[2 if is_sender else 0][0 if is_sender else 2] = 1
        flight, _ = begin(ranks[0], 0, counts, WIDE * 8)
        ranks[2].close()
        begun = time.monotonic()
        with pytest.raises(ConnectionError, match="rank 2 has left"):
            flight.wait()
        assert time.monotonic() - begun < 5


def test_rows_of_a_rank_that_has_left_since_still_arrive() -> None:
    with connected(2) as ranks:
        counts = [[0, 0], [3, 0]]
        begin(ranks[1], 1, counts, 1)
        ranks[1].close()
        flight, recv = begin(ranks[0], 0, counts, 1)
        flight.wait()
        check(recv, 0, counts, 1)


def test_waiting_ends_at_the_timeout() -> None:
    with connected(2, timeout=0.2) as ranks:
        flight, _ = begin(ranks[0], 0, [[0, 0], [1, 0]], 1)
        with pytest.raises(TimeoutError, match="no answer for 0.2 seconds"):
            flight.wait()


def test_memory_that_is_not_there_is_an_error() -> None:
    into = ctypes.create_string_buffer(8)
    with pytest.raises(OSError, match="cannot be read"):
        read_memory(os.getpid(), 0, ctypes.addressof(into), 8)


@pytest.mark.parametrize("name", ["strided", "count"])
def test_buffers_that_cannot_be_read_as_they_lie(name: str) -> None:
    """Addresses are all that peers get: a wrong one would read or write anything."""
    with connected(2) as ranks:
        buffer = torch.zeros(4, 6)[:, ::2] if name == "strided" else torch.zeros(3, 3)
        for pair in ((buffer, torch.zeros(4, 3)), (torch.zeros(4, 3), buffer)):
            with pytest.raises(ValueError, match="buffer: got .* for 4 rows, expected as many"):
                ranks[0].exchange(*pair, [0, 4], [0, 4])


def met(size: int, able: int | None = None) -> list[bool]:
    """Whether each of some threads was connected, after one exchange if so.

    Args:
        able: the only rank with tensors in the processor's memory; all by default.
    """

    def case(group: Any) -> bool:
        is_able = able in (None, group.rank)
        found = one_host.connect(group.rank, group.size, group.all_gather, 10.0, is_able)
        if found is None:
            return False
        counts = [[peer + 1] * size for peer in range(size)]
        flight, recv = begin(found, group.rank, counts, WIDE)
        flight.wait()
        check(recv, group.rank, counts, WIDE)
        group.all_reduce(torch.zeros(1))
        found.close()
        return True

    return run_threads(size, case)


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_of_one_host_find_each_other(size: int) -> None:
    assert met(size) == [True] * size


def test_one_rank_elsewhere_keeps_all_on_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter([1, 1, 2])
    lock = threading.Lock()

    def host() -> int:
        with lock:
            return next(hosts)

    monkeypatch.setattr(one_host, "_host", host)
    assert met(3) == [False] * 3


def test_tensors_on_another_device_keep_all_on_the_network() -> None:
    assert met(3, able=1) == [False] * 3


@pytest.mark.parametrize("what", ["_address", "_host"])
def test_an_error_on_the_way_keeps_all_on_the_network(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without such sockets, or without /proc: nobody waits for who cannot come."""
    real, calls, lock = getattr(one_host, what), iter([True, False, True]), threading.Lock()

    def failing(*arguments: Any) -> Any:
        with lock:
            if not next(calls):
                raise FileNotFoundError(2, "nothing of that kind here")
        return real(*arguments)

    monkeypatch.setattr(one_host, what, failing)
    assert met(3) == [False] * 3


def test_one_rank_that_may_not_read_keeps_all_on_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    permitted = iter([True, True, False, True, True, True])
    lock = threading.Lock()

    def read(pid: int, address: int, into: int, nbytes: int) -> None:
        with lock:
            if not next(permitted):
                raise PermissionError(1, "not here")
        read_memory(pid, address, into, nbytes)

    monkeypatch.setattr(one_host, "read_memory", read)
    assert met(3) == [False] * 3


def test_a_stranger_that_calls_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = one_host._address
    called: list[socket.socket] = []

    def address(word: int) -> bytes:
        for text in (b"hello", b"x" * one_host._HELLO.size):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            called.append(stranger)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET):
                try:
                    stranger.connect(real(word))
                    stranger.send(text)
                except OSError:  # nobody listens there yet
                    pass
        return real(word)

    monkeypatch.setattr(one_host, "_address", address)
    assert met(3) == [True] * 3
    for stranger in called:
        stranger.close()


def test_namespaces_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def host_where(**other: str) -> int:
        monkeypatch.setattr(os, "readlink", lambda path: other.get(Path(path).name, "same"))
        return one_host._host()

    assert host_where() == host_where() > 0
    assert len({host_where(), host_where(net="another"), host_where(pid="another")}) == 3


def test_the_switch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(one_host.SWITCH, text)
        assert one_host.is_wanted() is wanted
    monkeypatch.setenv(one_host.SWITCH, "0")
    assert met(2) == [False] * 2
    monkeypatch.setenv(one_host.SWITCH, "no")
    with pytest.raises(ValueError, match="SAR_HOST_MEMORY: got 'no', expected 0 or 1"):
        sar.initialize_comms(0, 1)


def test_yama_lets_ranks_read_each_other_when_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    class Libc:
        def prctl(self, *arguments: Any) -> int:
            asked.append(arguments[0])
            return 0

    monkeypatch.setattr(one_host.ctypes, "CDLL", lambda name: Libc())
    for text, calls in (("0\n", 0), ("1\n", 1), ("2\n", 1)):
        (tmp_path / "scope").write_text(text)
        monkeypatch.setattr(one_host, "_YAMA", tmp_path / "scope")
        one_host._permit_reading()
        assert len(asked) == calls
    assert asked == [0x59616D61]


def case_transport(group: Any) -> bool:
    assert group.has_wire is (group._host is None)
    return group._host is not None


def test_processes_of_one_host_use_its_memory_unless_told(
    processes: WorkerPool, sockets: WorkerPool
) -> None:
    assert processes.run(3, case_transport) == [True] * 3
    assert sockets.run(3, case_transport) == [False] * 3


def case_out_of_order(group: Any) -> list[float]:
    """One rank reduces before it begins to send rows, the others while they are in flight."""
    counts = [0 if peer == group.rank else 50 for peer in range(group.size)]
    send = torch.full((sum(counts), WIDE), float(group.rank))
    recv, total = torch.empty_like(send), torch.ones(3)
    if group.rank == 1:
        group.all_reduce(total)
        group.exchange(recv, send, counts, counts).wait()
    else:
        work = group.exchange(recv, send, counts, counts)
        group.all_reduce(total)
        work.wait()
    return [float(total.sum()), *recv[:, 0].unique().tolist()]


def test_a_reduction_may_pass_the_rows(either: WorkerPool) -> None:
    expected = [[9.0, *(float(peer) for peer in range(3) if peer != rank)] for rank in range(3)]
    assert either.run(3, case_out_of_order) == expected
