"""Rows that ranks of one host read from each other's memory: whose arrive, when, and what fails."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import pytest
import torch
from harness import WorkerPool, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st

import sar
from sar.comm import one_host
from sar.comm.host_memory import Flight, HostMemory

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
    return mine.exchange(recv, send, incoming, counts[rank], channel=channel), recv


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


@pytest.mark.parametrize("width", [1, WIDE * 8])
def test_unequal_numbers_are_refused(width: int) -> None:
    with connected(2) as ranks:
        begin(ranks[0], 0, [[0, 3], [0, 0]], width)
        flight, _ = begin(ranks[1], 1, [[0, 2], [0, 0]], width)
        sent, wanted = 3 * width * 4, 2 * width * 4
        text = f"rank 0 sends {sent} bytes, rank 1 expected {wanted}"
        with pytest.raises(RuntimeError, match=text):
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


def test_waiting_ends_at_the_timeout() -> None:
    with connected(2, timeout=0.2) as ranks:
        flight, _ = begin(ranks[0], 0, [[0, 0], [1, 0]], 1)
        with pytest.raises(TimeoutError, match="no answer for 0.2 seconds"):
            flight.wait()


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


@pytest.mark.parametrize(
    ("what", "error", "number"),
    [
        ("_address", FileNotFoundError(2, "nothing of that kind here"), 1),
        ("_host", FileNotFoundError(2, "nothing of that kind here"), 1),
        ("read_memory", PermissionError(1, "not here"), 2),
        ("_host", None, 2),
        ("", None, 0),
    ],
)
def test_one_rank_that_cannot_keeps_all_on_the_network(
    what: str, error: OSError | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system without such sockets, or without /proc; one that does not permit reading; another
    host; tensors on another device: nobody waits for who cannot come."""
    calls, lock = iter(range(100)), threading.Lock()
    real = getattr(one_host, what, None)

    def failing(*arguments: Any) -> Any:
        with lock:
            fails = next(calls) == number
        if fails and error is not None:
            raise error
        return real(*arguments) + 1 if fails else real(*arguments)  # type: ignore[misc]

    if what:
        monkeypatch.setattr(one_host, what, failing)
    assert met(3, able=None if what else 1) == [False] * 3


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


def test_the_switch_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv(one_host.SWITCH, text)
        assert one_host.is_wanted() is wanted
    monkeypatch.setenv(one_host.SWITCH, "0")
    assert met(2) == [False] * 2
    monkeypatch.setenv(one_host.SWITCH, "no")
    with pytest.raises(ValueError, match="SAR_HOST_MEMORY: got 'no', expected 0 or 1"):
        sar.initialize_comms(0, 1)


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
