"""The harness itself: it must end what hangs, name what failed first, and leave nothing."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from harness import HarnessTimeout, RankFailed, WorkerPool, relative_error, run_threads
from harness.leaks import State, leaked


def case_sum(group, value):
    return group.all_reduce(torch.tensor([float(value + group.rank)])).item()


def case_sleep(group):
    if group.rank == 1:
        time.sleep(1000)
    return group.rank


def case_raise_on_one(group):
    if group.rank == 1:
        raise KeyError("only rank one is wrong")
    group.all_reduce(torch.zeros(1))


def case_exit_on_one(group):
    if group.rank == 1:
        os._exit(3)
    group.all_reduce(torch.zeros(1))


def case_never_come(group):
    if group.rank == 0:
        group.all_reduce(torch.zeros(1))


def case_who(group):
    return os.getpid(), group.rank, group.size, torch.get_num_threads()


def test_results_in_rank_order(processes: WorkerPool) -> None:
    assert run_threads(3, case_sum, 2) == [9.0] * 3
    assert processes.run(3, case_sum, 2) == [9.0] * 3


def test_workers_are_reused_by_groups_of_any_size(processes: WorkerPool) -> None:
    three = processes.run(3, case_who)
    two = processes.run(2, case_who)
    assert [w[0] for w in two] == [w[0] for w in three[:2]]
    assert [w[1:] for w in three] == [(r, 3, 1) for r in range(3)]
    assert [w[1:] for w in two] == [(r, 2, 1) for r in range(2)]


def test_the_first_error_wins_and_what_hangs_is_ended(tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path)
    with pytest.raises(RankFailed, match="(?s)rank 1 failed first.*only rank one is wrong") as got:
        workers.run(2, case_raise_on_one)
    assert (got.value.rank, got.value.kind) == (1, "KeyError")
    with pytest.raises(RankFailed, match="rank 1 failed first.*\n.*code 3") as got:
        workers.run(2, case_exit_on_one)
    assert (got.value.rank, got.value.kind, got.value.died) == (1, "exit", (1,))
    with pytest.raises(RankFailed) as got:
        workers.run(2, case_never_come, timeout=1.0)
    assert (got.value.rank, got.value.kind) == (0, "CommError"), "before the harness"
    pids = [who[0] for who in workers.run(2, case_who)]
    with pytest.raises(HarnessTimeout, match=r"(?s)ranks \[1\] still ran after 1.*case_sleep"):
        workers.run(2, case_sleep, deadline=1.0)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_threads_raise_the_first_error() -> None:
    with pytest.raises(KeyError, match="only rank one is wrong"):
        run_threads(3, case_raise_on_one)


def test_threads_that_hang_are_reported_with_their_stacks() -> None:
    release = threading.Event()

    def wait(group):
        if group.rank == 1:
            release.wait(100)

    try:
        with pytest.raises(HarnessTimeout, match="(?s)wait on 2 threads.*release.wait"):
            run_threads(2, wait, deadline=0.3)
    finally:
        release.set()  # a thread cannot be killed; let it go


def test_leaks_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.leaks._PATIENCE", 0.0)
    release = threading.Event()
    before = State.now()
    thread = threading.Thread(target=release.wait)
    thread.start()
    assert "threads" in leaked(before)[0]
    release.set()
    thread.join()
    with monkeypatch.context() as patch:
        patch.setenv("SAR_TEST_LEAK", "1")
        patch.chdir(tmp_path)
        (tmp_path / "left").touch()
        patch.setattr(torch, "get_num_threads", lambda: 77)
        words = " ".join(leaked(before))
        assert "SAR_TEST_LEAK" in words and "left" in words and "77" in words
    child = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    assert str(child) in " ".join(leaked(before))
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert not leaked(before)


def test_relative_error_is_strict() -> None:
    one, inf = torch.tensor([1.0, -2.0]), torch.tensor([1.0, float("inf")])
    cases = [
        (one, one, 0),
        (torch.tensor([1.0, -2.2]), one, pytest.approx(0.1)),
        (one[:1], one, float("inf")),
        (torch.tensor([1.0, float("nan")]), one, float("inf")),
        (inf, inf, 0),
        (-inf, inf, float("inf")),
        (torch.zeros(2), torch.zeros(2), 0),
        (torch.ones(2), torch.zeros(2), 1),
    ]
    for got, want, error in cases:
        assert relative_error(got, want) == error
