"""Large exchanges in steps: who sends to whom, what begins when, and rows over gloo."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WorkerPool, run_threads
from harness.late import run_late
from hypothesis import given
from hypothesis import strategies as st
from test_comm import case_rotation, check_rotation

from sar.comm import paced
from sar.comm.paced import Lane, Message, Turn, Turns, steps_of, when_all_done
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


class Flight:
    """A collective that ends when it is told to."""

    def __init__(self) -> None:
        self.over, self.callbacks = threading.Event(), []

    def end(self) -> None:
        self.over.set()
        for callback in self.callbacks:
            callback()

    def wait(self) -> None:
        assert self.over.wait(5)

    def when_done(self, callback: Callable[[], None]) -> None:
        if self.over.is_set():
            callback()
        else:
            self.callbacks.append(callback)


class Runway:
    """A lane whose turns write down when they begin."""

    def __init__(self) -> None:
        self.lane, self.begun = Lane(), []
        self.flights: dict[str, list[Flight]] = {}

    def add(self, name: str, large: bool = True, number: int = 1) -> Turn:
        self.flights[name] = [Flight() for _ in range(number)]

        def begin() -> list[Flight]:
            self.begun.append(name)
            return self.flights[name]

        turn = Turn(begin)
        self.lane.add(turn, large)
        return turn


def test_a_large_turn_waits_for_the_end_of_the_one_before() -> None:
    runway = Runway()
    first = runway.add("a", number=2)
    runway.add("b")
    runway.flights["a"][0].end()
    assert runway.begun == ["a"], "both of its collectives have to end"
    runway.flights["a"][1].end()
    assert runway.begun == ["a", "b"]
    first.wait(lambda: None)


def test_a_small_turn_waits_for_the_beginning_of_those_before() -> None:
    runway = Runway()
    runway.add("a", large=False)
    runway.add("b")
    runway.add("c", large=False)
    assert runway.begun == ["a", "b", "c"]
    runway.add("d")
    runway.add("e", large=False)
    assert runway.begun == ["a", "b", "c"], "the same order on all ranks"
    runway.flights["b"][0].end()
    assert runway.begun == ["a", "b", "c", "d", "e"]


def test_an_error_is_raised_where_it_is_waited_for_and_frees_the_lane() -> None:
    runway = Runway()

    def refuse() -> list[Flight]:
        raise CommError("no connection")

    runway.add("a")
    bad = Turn(refuse)
    runway.lane.add(bad, large=True)
    runway.add("c")
    runway.flights["a"][0].end()
    assert runway.begun == ["a", "c"]
    with pytest.raises(CommError, match="no connection"):
        bad.wait(lambda: None)


def test_thousands_of_turns_that_end_at_once() -> None:
    class Ended:
        def wait(self) -> None:
            return None

        def when_done(self, callback: Callable[[], None]) -> None:
            callback()

    lane, begun = Lane(), []
    gate = Flight()
    lane.add(Turn(lambda: [gate]), large=True)
    turns = []
    for number in range(5000):

        def begin(number: int = number) -> list[Any]:
            begun.append(number)
            return [Ended()]

        turns.append(Turn(begin))
        lane.add(turns[-1], large=True)
    gate.end()
    assert begun == list(range(5000))
    Turns(turns, lambda: None).wait()


def test_an_exchange_is_done_when_its_last_turn_is() -> None:
    runway = Runway()
    both = Turns([runway.add("a"), runway.add("b")], lambda: None)
    done: list[bool] = []
    both.when_done(lambda: done.append(True))
    runway.flights["a"][0].end()
    assert runway.begun == ["a", "b"] and not done
    runway.flights["b"][0].end()
    assert done == [True]
    when_all_done([], lambda: done.append(True))
    assert done == [True, True]


def test_a_turn_that_may_never_end_is_looked_after() -> None:
    runway = Runway()
    turn, seen = runway.add("a", number=2), []

    def check() -> None:
        seen.append(1)
        if len(seen) == 2:
            raise CommError("another rank left")

    with mock.patch.object(paced, "_CHECK_SECONDS", 0.01):
        with pytest.raises(CommError, match="left"):
            Turns([turn], check).wait()
        late = runway.add("b")
        with pytest.raises(CommError, match="left"):
            seen.clear()
            Turns([late], check).wait()
    for flight in runway.flights["a"]:
        flight.end()
    Turns([turn], check).wait()


def test_the_first_work_of_a_turn_that_fails_is_raised() -> None:
    class Failed(Flight):
        def wait(self) -> None:
            raise CommError("cut off")

    flights = [Flight(), Failed()]
    turn = Turn(lambda: flights)
    turn.start()
    flights[1].end()
    with pytest.raises(CommError, match="cut off"):
        Turns([turn], lambda: None).wait()


def test_a_lane_settles_when_what_is_under_way_has_ended() -> None:
    runway = Runway()
    runway.add("a")
    runway.add("b")
    runway.lane.settle(0.05)  # gives up
    ending = threading.Timer(0.1, runway.flights["a"][0].end)
    ending.start()
    begin = time.monotonic()
    runway.lane.settle(30.0)
    ending.join()
    assert time.monotonic() - begin < 20
    assert runway.begun == ["a"]
    Lane().settle(30.0)


def test_a_cleared_lane_begins_nothing_more() -> None:
    runway = Runway()
    runway.add("a")
    runway.add("b")
    runway.lane.clear()
    runway.flights["a"][0].end()
    assert runway.begun == ["a"]


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
