"""Ranks that take different ways through a script: told at once, with the line of each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WorkerPool, run_threads
from harness.graphs import mixed
from harness.nursery import Nursery
from harness.parts import Cutter
from test_launch import environment
from test_start import free_port

import sar
from sar.comm import Group
from sar.errors import CommError

HINT = "is one of these lines run by some ranks only, as under `if rank == 0`?"


def caught(call: Callable[[], Any]) -> tuple[str, float]:
    begin = time.monotonic()
    try:
        call()
    except CommError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


def case_collectives(group: Group) -> tuple[str, float]:
    def call() -> None:
        if group.rank == 0:
            group.all_reduce(torch.ones(1))  # first
        else:
            group.all_gather(torch.ones(2))  # second

    return caught(call)


def evaluate(graph: Any, x: torch.Tensor) -> torch.Tensor:
    return graph.aggregate(x, "mean")  # first


def case_evaluation(group: Group, path: str) -> tuple[str, float]:
    data = sar.load_partition_data(path)
    graph = sar.construct_full_graph(data)
    x, model = torch.ones(graph.num_nodes(), 3), torch.nn.Linear(2, 2)

    def call() -> None:
        if group.rank == 0:
            evaluate(graph, x)
        sar.sync_params(model)  # second

    return caught(call)


def case_agreements(group: Group) -> tuple[str, float]:
    """Both call the same collective, of one length."""

    def call() -> None:
        if group.rank == 0:
            sar.manual_seed(0)  # first
        else:
            group.agree(None, "my own", alike=1)  # second

    return caught(call)


def check_both(results: list[tuple[str, float]]) -> None:
    """Long before the timeout."""
    for rank, (message, taken) in enumerate(results):
        assert message.startswith(f"rank {rank}: "), message
        for other, mark in enumerate(("first", "second")):
            line = rf"rank {other} stood in \S*test_apart\.py:\d+ `[^`]+# {mark}`"
            assert re.search(line, message), message
        assert message.endswith(HINT) and taken < 30, (message, taken)


@pytest.mark.parametrize("case", [case_collectives, case_agreements])
def test_different_collectives_name_the_lines_of_all(case: Any, either: WorkerPool) -> None:
    check_both(either.run(2, case, timeout=50.0))
    check_both(run_threads(2, case, timeout=50.0))


def test_an_evaluation_on_one_rank(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")
    results = run_threads(2, case_evaluation, path, timeout=50.0)
    check_both(results)
    assert "test_apart.py" in results[0][0].partition(", called in ")[2], "who called evaluate"


SCRIPT = """
import os, sys, time, torch, sar
open("here-" + os.environ["RANK"], "w").close()
while not (os.path.exists("here-0") and os.path.exists("here-1")):
    time.sleep(0.01)  # so that the limit is not that of imports
group = sar.initialize_comms(timeout=5)
what = sys.argv[1]
try:
    if what == "lengths":
        if group.rank == 0:
            group.all_reduce(torch.ones(1))  # first
        group.all_reduce(torch.ones(5000))  # second
    if what == "rows":
        if group.rank == 0:
            group.all_to_all(torch.ones(2, 1), [1, 1], [1, 1])  # first
        group.all_reduce(torch.ones(1))  # second
    if what == "through" and group.rank == 0:
        group.all_reduce(torch.ones(1))  # first
except sar.CommError:
    sys.excepthook(*sys.exc_info())  # as at the end of an interpreter
"""


def errors_of(what: str, nursery: Nursery, folder: Path, **more: str) -> list[str]:
    """What two ranks of the script say last."""
    (folder / "train.py").write_text(SCRIPT)
    common = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), **more}
    ranks = [
        nursery.start(["train.py", what], environment(**common, RANK=str(rank)), folder)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.wait(60)
        return [(rank.text("err").strip().splitlines() or [""])[-1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.system
@pytest.mark.parametrize(("what", "memory"), [("lengths", "1"), ("rows", "1"), ("rows", "0")])
def test_processes_name_the_lines_of_all(
    what: str, memory: str, nursery: Nursery, tmp_path: Path
) -> None:
    """Also where ranks wait for different things, which only the timeout ends."""
    for message in errors_of(what, nursery, tmp_path, SAR_HOST_MEMORY=memory):
        assert re.search(r"; rank 0 stood in train\.py:\d+ `[^`]+# first`", message), message
        assert re.search(r"; rank 1 stood in train\.py:\d+ `[^`]+# second`", message), message
        assert message.endswith(HINT)


@pytest.mark.system
def test_a_rank_that_is_through_with_its_script(nursery: Nursery, tmp_path: Path) -> None:
    """The one that still waits says in which line."""
    waits, ended = errors_of("through", nursery, tmp_path)
    assert "rank 1: died or left early" in waits and not ended
    assert re.search(r"; rank 0 stood in train\.py:\d+ `[^`]+# first`", waits), waits
    assert waits.endswith("does every rank get there?")


def test_threads_name_who_failed_and_who_is_through() -> None:
    def fails(group: Group) -> str:
        if group.rank == 1:
            raise ValueError("of its own")
        with pytest.raises(CommError) as error:
            group.all_reduce(torch.ones(1))
        said.append(str(error.value))
        raise error.value

    said: list[str] = []
    with pytest.raises(ValueError, match="of its own"):
        run_threads(3, fails)
    cause = "stopped because another rank failed first: rank 1: ValueError: of its own"
    assert sorted(said) == [f"rank 0: {cause}", f"rank 2: {cause}"]

    def returns(group: Group) -> tuple[str, float]:
        return caught(lambda: group.rank == 1 or group.all_reduce(torch.ones(1)))  # waits

    begin = time.monotonic()
    message, _ = run_threads(2, returns, timeout=50)[0]
    assert time.monotonic() - begin < 30, "it is known at once that nobody comes"
    assert re.match(r"rank 0: rank 1 has ended; rank 0 stood in .*# waits`", message), message


def test_a_thread_that_does_not_come_is_named_with_its_line() -> None:
    done = torch.zeros(1)

    def case(group: Group) -> tuple[str, float]:
        while group.rank == 1 and not done:
            time.sleep(0.05)  # elsewhere
        message = caught(lambda: group.all_reduce(torch.ones(1)))
        done.fill_(1)
        return message

    (message, _), (later, _) = run_threads(2, case, timeout=1)
    assert "rank 1 did not answer within the timeout (1 s)" in message
    assert "rank 0 stood in" in message and re.search("rank 1 stood in .*# elsewhere", message)
    assert later, "the group is of no use any more"
