"""Large exchanges in steps: what begins when, and rows over gloo."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
import torch
from harness import WorkerPool, run_threads
from harness.late import run_late
from harness.nursery import Child, Nursery
from test_comm import case_rotation, check_rotation
from test_launch import environment
from test_start import free_port

from sar.comm.paced import Message, Paced
from sar.errors import CommError
from sar.stream import plan as halo


class Began:
    """A message on its way, which ends when it is told to."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def end(self) -> None:
        self.over.set()

    def wait(self) -> None:
        assert self.over.wait(20)


def test_a_step_begins_when_the_one_before_has_ended() -> None:
    """Exchanges of four ranks over some distances; no message is without rows."""
    begun, counts, looks = SimpleQueue(), ([1] * 4, [1, 1, 1, 0]), SimpleQueue()

    def begin(message: Message, number: int) -> Began:
        begun.put((message, number, one := Began()))
        return one

    def exchange(*distances: int) -> Any:
        return paced.exchange(torch.zeros(4, 1), torch.zeros(3, 1), *counts, distances)

    def step(count: int) -> tuple[list, list[Began]]:
        """What ``count`` messages are, and their ends; nothing else has begun."""
        found = [begun.get(timeout=20) for _ in range(count)]
        time.sleep(0.05)
        assert begun.empty()
        return [(one.peer, one.is_sent, one.is_back, n) for one, n, _ in found], [
            e for *_, e in found
        ]

    paced = Paced(0, begin, lambda: looks.put(1))
    first, second, done = exchange(1, 2), exchange(3), threading.Event()
    second.when_done(done.set)
    told, (message,) = step(1)
    assert told == [(1, False, False, 0)]  # nothing goes to rank 3
    message.end()
    told, both = step(2)
    assert told == [(2, False, True, 0), (2, True, False, 0)]  # rank 2 is either way
    both[0].end()
    time.sleep(0.05)
    assert begun.empty(), "both have to end"
    both[1].end()
    first.wait()
    told, last = step(2)
    assert told == [(3, False, False, 1), (1, True, False, 1)] and not done.is_set()
    threading.Timer(1.5, lambda: [one.end() for one in last]).start()
    second.wait()
    assert done.wait(20) and paced.close(20) is None and not looks.empty()


MEET = """
import atexit
import sys
import time
import torch
import sar
from sar.stream import build_halo_plan, fetch
from sar.stream import plan as halo

rank, size, port = map(int, sys.argv[1:])
halo.LARGE = 0
group = sar.initialize_comms(rank, size, "127.0.0.1", "gloo", master_port_number=port, timeout=300)
wanted = [torch.arange(0 if peer == rank else 40000) for peer in range(size)]
plan = build_halo_plan(group, wanted, 40000)
"""
RAISING = """
for turn in range(3):
    stream = fetch(plan, torch.ones(40000, 64), plan.rounds(1))
    if rank == 1:
        raise ValueError("boom")
    list(stream)
"""
STUCK = """
if rank == 1:
    time.sleep(300)
atexit.register(lambda: print("handler", file=sys.stderr))
stream = fetch(plan, torch.ones(40000, 64), plan.rounds(1))
raise ValueError("boom")
"""


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[str, int], list[Child]]]:
    """Ranks that run a script; rows travel over gloo."""
    ranks: list[Child] = []

    def begin(script: str, size: int) -> list[Child]:
        (tmp_path / "script.py").write_text(MEET + script)
        port = str(free_port())
        words = [[str(tmp_path / "script.py"), str(rank), str(size), port] for rank in range(size)]
        ranks.extend(nursery.start(one, environment(SAR_HOST_MEMORY="0")) for one in words)
        return ranks

    yield begin
    for rank in ranks:
        rank.kill()


def test_a_rank_that_raises_does_not_wait_for_one_that_is_stuck(start: Any) -> None:
    raising, _ = start(STUCK, 2)
    assert raising.wait(60) == 1
    told = raising.text("err")
    assert "ValueError: boom" in told and told.endswith("handler\n")


def test_a_rank_that_raises_with_rows_on_the_wire_ends_with_its_error(start: Any) -> None:
    ranks = start(RAISING, 4)
    assert [rank.wait(60) for rank in ranks] == [1] * 4
    told = [rank.text("err") for rank in ranks]
    assert "ValueError: boom" in told[1]
    assert all("rank 1: ValueError: boom" in told[rank] for rank in (0, 2, 3)), told


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
        return [width >= plan.large_row_bytes for width in (halo.LARGE - 1, halo.LARGE)]

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
    results = sockets.run(4, case_killed, timeout=7.0, may_die={1})  # a rank waits until then
    assert results[1] is None
    for rank in (0, 2, 3):
        assert f"rank {rank}" in results[rank] and "another rank" in results[rank]
