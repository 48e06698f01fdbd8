"""Large exchanges in steps: who sends to whom, what begins when, and rows over gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WorkerPool, run_threads
from harness.late import run_late
from hypothesis import given
from hypothesis import strategies as st
from test_comm import case_rotation, check_rotation

from sar.comm.paced import Message, Paced, steps_of
from sar.errors import CommError
from sar.stream import plan as halo


def rows_between(src: int, dst: int, num: int) -> torch.Tensor:
    return torch.tensor([[100.0 * src + dst, i] for i in range(num)]).view(num, 2)


def all_steps(counts: list[list[int]], distances: list[int]) -> list[list[list[Message]]]:
    """What each rank sends and receives; ``counts[p][q]`` rows go from p to q."""
    size, found = len(counts), []
    for rank in range(size):
        incoming = [counts[peer][rank] for peer in range(size)]
        send = torch.cat([rows_between(rank, peer, counts[rank][peer]) for peer in range(size)])
        recv = torch.empty(sum(incoming), 2)
        found.append(list(steps_of(rank, recv, send, incoming, counts[rank], distances)))
    return found


@st.composite
def exchanges(draw: Any) -> tuple[list[list[int]], list[int]]:
    size = draw(st.integers(2, 7))
    distances = draw(st.lists(st.integers(1, size - 1), min_size=1, unique=True))
    sign = draw(st.sampled_from([1, -1]))
    distances = [sign * distance for distance in distances]
    counts = [[0] * size for _ in range(size)]
    for rank in range(size):
        for distance in distances:
            counts[(rank + distance) % size][rank] = draw(st.integers(0, 3))
    return counts, distances


@given(exchanges())
def test_every_row_travels_once_and_no_pair_both_ways(
    exchange: tuple[list[list[int]], list[int]],
) -> None:
    counts, distances = exchange
    size, ranks = len(counts), all_steps(*exchange)
    arrived = [[0] * size for _ in range(size)]
    for number in range(len(distances)):
        step = [messages[number] for messages in ranks]
        assert len({tuple(m.is_back for m in messages) for messages in step}) == 1
        for order in range(len(step[0])):  # one collective
            pairs = set()
            for rank, messages in enumerate(step):
                message = messages[order]
                if len(message.send):
                    other = step[message.target][order]
                    assert other.source == rank and len(other.recv) == len(message.send)
                    other.recv.copy_(message.send)
                    arrived[rank][message.target] += len(message.send)
                    pairs.add((rank, message.target))
                    if len(step[0]) == 2:
                        assert message.is_back == (rank > message.target)
            assert not any((b, a) in pairs for a, b in pairs if len(step[0]) == 2)
    assert arrived == counts
    for rank, steps in enumerate(ranks):
        for message in (message for step in steps for message in step):
            num = len(message.recv)
            assert torch.equal(message.recv, rows_between(message.source, rank, num))


class Began:
    """A message on its way, which ends when it is told to."""

    def __init__(self) -> None:
        self.over, self.error = threading.Event(), None

    def end(self, error: Exception | None = None) -> None:
        self.error = error
        self.over.set()

    def wait(self) -> None:
        assert self.over.wait(20)
        if self.error is not None:
            raise self.error


@pytest.fixture
def runway() -> Iterator[tuple[Any, SimpleQueue]]:
    """What begins an exchange of four ranks over some distances, and messages as they begin."""
    begun, counts = SimpleQueue(), ([1] * 4, [1] * 4)

    def begin(message: Message) -> Began:
        begun.put((message.source, message.is_back, one := Began()))
        return one

    paced = Paced(0, begin)
    rows = torch.zeros(4, 1), torch.zeros(4, 1)
    yield paced, lambda *distances: paced.exchange(*rows, *counts, distances), begun
    paced.close(20)


def test_a_step_begins_when_the_one_before_has_ended(runway: Any) -> None:
    _, exchange, begun = runway
    first, second, done = exchange(1, 2), exchange(3), threading.Event()
    second.when_done(done.set)
    source, _, message = begun.get(timeout=20)
    time.sleep(0.05)
    assert source == 1 and begun.empty()
    message.end()
    both = [begun.get(timeout=20) for _ in range(2)]  # rank 2 is either way
    assert [(source, is_back) for source, is_back, _ in both] == [(2, False), (2, True)]
    both[0][2].end()
    time.sleep(0.05)
    assert begun.empty(), "both have to end"
    both[1][2].end()
    first.wait()
    source, _, message = begun.get(timeout=20)
    assert source == 3 and not done.is_set()
    message.end()
    second.wait()
    assert done.wait(20)


def test_an_error_is_raised_where_it_is_waited_for(runway: Any) -> None:
    _, exchange, begun = runway
    bad, good = exchange(1, 2), exchange(3)
    begun.get(timeout=20)[2].end(CommError("cut off"))
    source, _, message = begun.get(timeout=20)
    assert source == 3, "no step of what failed begins"
    message.end()
    good.wait()
    with pytest.raises(CommError, match="cut off"):
        bad.wait()


def test_nothing_begins_at_the_end(runway: Any) -> None:
    paced, exchange, begun = runway
    under_way, waiting = exchange(1), exchange(2)
    message = begun.get(timeout=20)[2]
    assert paced.close(0.05) is not None
    message.end()
    assert paced.close(20) is None
    under_way.wait()
    with pytest.raises(CommError, match="shut down"):
        waiting.wait()
    assert begun.empty()


RAISING = """
import sys
import torch
import sar
from sar.stream import build_halo_plan, fetch
from sar.stream import plan as halo

rank, port = int(sys.argv[1]), int(sys.argv[2])
halo.LARGE = 0
group = sar.initialize_comms(rank, 4, "127.0.0.1", "gloo", master_port_number=port, timeout=20)
wanted = [torch.arange(0) if peer == rank else torch.arange(40000) for peer in range(4)]
plan = build_halo_plan(group, wanted, 40000)
for turn in range(3):
    stream = fetch(plan, torch.ones(40000, 64), plan.rounds(1))
    if rank == 1:
        raise ValueError("boom")
    list(stream)
"""


STUCK = """
import atexit
import sys
import torch
import sar
from sar.stream import build_halo_plan, fetch

rank, port = int(sys.argv[1]), int(sys.argv[2])
group = sar.initialize_comms(rank, 2, "127.0.0.1", "gloo", master_port_number=port, timeout=300)
wanted = [torch.arange(0) if peer == rank else torch.arange(40000) for peer in range(2)]
plan = build_halo_plan(group, wanted, 40000)
if rank == 1:
    time.sleep(300)
atexit.register(lambda: print("handler", file=sys.stderr))
sys.stderr.reconfigure(write_through=False, line_buffering=False)
stream = fetch(plan, torch.ones(40000, 64), plan.rounds(1))
raise ValueError("boom")
"""


def start(script: str, size: int) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-c", script]
    return [
        subprocess.Popen([*words, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]


def test_a_rank_that_raises_does_not_wait_for_one_that_is_stuck() -> None:
    raising, stuck = start(STUCK, 2)
    try:
        told = raising.communicate(timeout=60)[1]
    finally:
        stuck.kill()
        stuck.communicate()
        raising.kill()
    assert raising.returncode == 1
    assert "ValueError: boom" in told and told.endswith("handler\n")


def test_a_rank_that_raises_with_rows_on_the_wire_ends_with_its_error() -> None:
    ranks = start(RAISING, 4)
    told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1] * 4, told
    assert "ValueError: boom" in told[1]
    assert all("rank 1: ValueError: boom" in told[rank] for rank in (0, 2, 3))


def case_large(group: Any, pattern: str, num_rounds: int) -> Any:
    """The rotation with rows that count as large, between exchanges that do not."""
    with mock.patch.object(halo, "LARGE", 0):
        first = case_rotation(group, pattern, num_rounds, False)
        group.all_to_all(torch.ones(group.size, 1), [1] * group.size, [1] * group.size)
        assert case_rotation(group, pattern, num_rounds, True) == first
    return first


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_large_rows_and_gradients_over_processes(size: int, sockets: WorkerPool) -> None:
    for num_rounds in (1, 2, 4):
        for pattern in ("mixed", "everything", "one pair"):
            results = sockets.run(size, case_large, pattern, num_rounds)
            check_rotation(size, pattern, results)


@pytest.mark.parametrize("run", [run_threads, run_late])
def test_the_distances_of_a_round_are_those_its_rows_travel(run: Any) -> None:
    with mock.patch.object(halo, "LARGE", 0):
        for num_rounds in (1, 2, 3):
            results = run(4, case_rotation, "mixed", num_rounds, False)
            check_rotation(4, "mixed", results)


def test_large_is_a_matter_of_the_busiest_rank_and_alike_on_all() -> None:
    def case(group: Any) -> list[bool]:
        wanted = [torch.arange(0)] * group.size
        if group.rank == 0:
            wanted[1] = torch.arange(6)
        plan = halo.build_halo_plan(group, wanted, 6)
        return [plan.is_large(width) for width in (halo.LARGE - 1, halo.LARGE)]

    assert run_threads(4, case) == [[False, True]] * 4


def case_killed(group: Any) -> str:
    """Rank 1 dies while large steps are under way and queued."""
    wanted = [torch.arange(0) if p == group.rank else torch.arange(5000) for p in range(group.size)]
    with mock.patch.object(halo, "LARGE", 0):
        plan = halo.build_halo_plan(group, wanted, 5000)
        stream = halo_stream(plan)
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(2):
                list(stream)
                stream = halo_stream(plan)
        except CommError as error:
            return str(error)
    return "nothing"


def halo_stream(plan: halo.HaloPlan) -> Any:
    from sar.stream import fetch

    return fetch(plan, torch.ones(5000, 64), plan.rounds(1))


def test_a_rank_killed_between_steps_ends_the_others(sockets: WorkerPool) -> None:
    results = sockets.run(4, case_killed, timeout=30.0, may_die={1})
    assert results[1] is None
    for rank in (0, 2, 3):
        assert f"rank {rank}" in results[rank] and "another rank" in results[rank]
