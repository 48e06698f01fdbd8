"""`sar sample-server` and trainers that hold no partition, as processes."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness.nursery import Child, Nursery
from test_launch import environment, ranks_below

import sar
from sar.__main__ import main

LIMIT = 11  # seconds of the ranks' timeout where one of them fails
LONG = 300  # that of users
START = 60  # seconds until all have met, on a busy machine

TRAINER = textwrap.dedent("""
    import os, signal, sys, torch, sar
    from torch.nn import functional as F
    from sar.sampling import connect

    victim, number = int(sys.argv[2]), int(sys.argv[3])
    with connect(sys.argv[1], 2, timeout=float(sys.argv[4])) as servers:
        model = torch.nn.Linear(8, 3)
        sar.sync_params(model)
        seeds = servers.nodes(mask="train_mask")
        for cycle in range(5):  # loaders that end are forgotten on all ranks
            options = {"batch_size": 8, "as_": "tensors", "prefetch": cycle % 3}
            with servers.NeighborLoader([4, 4], seeds, **options) as loader:
                for step, batch in enumerate(loader):
                    if step == cycle:
                        break
        with servers.NeighborLoader([4, 4], seeds, batch_size=8, as_="tensors") as loader:
            for epoch in range(2):
                for step, batch in enumerate(loader):
                    if (epoch, step) == (1, 1) and servers.group.rank == victim:
                        os.kill(os.getpid(), number)
                    x = batch.node_data["_N"]["feat"][: batch.batch_size]
                    y = batch.node_data["_N"]["label"][: batch.batch_size]
                    model.zero_grad()
                    sar.global_mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                    sar.gather_grads(model)
        print("sum", float(sum(p.grad.abs().sum() for p in model.parameters())))
""")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = "synthetic:nodes=60,edges=400,seed=3,classes=3,features=8"
    return sar.partition_graph(source, tmp_path_factory.mktemp("graph") / "parts", 2)


@contextmanager
def servers(nursery: Nursery, parts: str, limit: float = LIMIT) -> Iterator[tuple[Child, str]]:
    """The command for two trainers, running, and the address that it tells."""
    words = ["-m", "sar", "sample-server", parts, "--timeout", str(limit), "--trainers", "2"]
    process = nursery.start(words, environment())
    try:
        yield process, process.line(START).strip().rpartition(" at ")[2]
    finally:
        process.kill()


@contextmanager
def trainers(
    nursery: Nursery, folder: Path, address: str, victim: int, number: int, limit: float = LIMIT
) -> Iterator[list[Child]]:
    """Two, each of which knows its place from the environment alone."""
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    words = [str(script), address, str(victim), str(number), str(limit)]
    places = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    running = [nursery.start(words, environment() | place) for place in places]
    try:
        yield running
    finally:
        for one in running:
            one.kill()


def test_a_trainer_that_dies_is_named(nursery: Nursery, parts: str, tmp_path: Path) -> None:
    """At once: nobody waits for a process that is gone."""
    with servers(nursery, parts, LONG) as (process, address):
        with trainers(nursery, tmp_path, address, 1, signal.SIGKILL, LONG) as running:
            hit(running[1], signal.SIGKILL)
            check_trainer_1_is_named(process, running[0])


def test_a_trainer_that_stops_and_a_server_that_dies_are_named(
    nursery: Nursery, parts: str, tmp_path: Path
) -> None:
    """Two jobs at the same time, as most of it is waiting."""
    with ExitStack() as jobs:

        def start(victim: int) -> tuple[Child, list[Child]]:
            """One trainer stops, so that the epoch does not end."""
            process, address = jobs.enter_context(servers(nursery, parts))
            (folder := tmp_path / str(victim)).mkdir()
            given = nursery, folder, address, victim, signal.SIGSTOP
            running = jobs.enter_context(trainers(*given))
            hit(running[victim], signal.SIGSTOP)
            return process, running

        stopped, (waits, _) = start(1)
        died, (holds, ends) = start(0)
        os.kill(ranks_below(died.pid)[0], signal.SIGKILL)
        check_trainer_1_is_named(stopped, waits)
        assert ends.wait(START)
        holds.kill()
        assert died.wait(START) == 2
        assert "server 0: killed by SIGKILL" in died.text("err")
        assert "server 0: " in ends.text("err")


def check_trainer_1_is_named(process: Child, other: Child) -> None:
    """By the servers and by the other trainer, long before a user's timeout."""
    assert other.wait(START) and process.wait(START) == 2
    for text in (other.text("err"), process.text("err")):
        assert re.search("trainer 1(:| did not)", text), text
    assert "CommError: trainer 0: " in other.text("err")


def hit(victim: Child, number: int) -> None:
    """Return when a trainer's signal has reached it."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if victim.returncode is not None:
            assert victim.returncode == -number, victim.text("err")
            return
        if number == signal.SIGSTOP:
            state = Path(f"/proc/{victim.pid}/stat").read_text().rpartition(") ")[2]
            if state.startswith("T"):
                return
        time.sleep(0.02)
    pytest.fail(f"no signal reached the trainer in {START} s: {victim.text('err')}")


def test_trainers_and_servers_that_do_not_fit(nursery: Nursery, parts: str, tmp_path: Path) -> None:
    """As many in all, but other kinds: each tells both, at once, as all have come."""
    with servers(nursery, parts, LONG) as (process, address):
        script = tmp_path / "trainer.py"
        script.write_text("import sys; from sar.sampling import connect; connect(sys.argv[1], 1)")
        places = [{"RANK": rank, "WORLD_SIZE": "3"} for rank in "12"]
        wrong = [nursery.start([str(script), address], environment() | one) for one in places]
        try:
            assert all(one.wait(START) for one in wrong) and process.wait(START) == 2
        finally:
            for one in wrong:
                one.kill()
        for text in (process.text("err"), *(one.text("err") for one in wrong)):
            assert "1 servers and 3 trainers" in text and "2 servers and 2 trainers" in text


BAD = [
    (["--trainers", "0"], "--trainers: got '0', expected an integer of 1 or more"),
    (["--trainers", "1", "--address", "here"], "--address: got 'here', expected HOST:PORT"),
    (["--trainers", "1", "--address", "192.0.2.7:0"], "cannot listen at 192.0.2.7:0"),
    (["--trainers", "1", "--nproc", "3"], "got a graph of 2 parts for 3 ranks"),
    (["--trainers", "1", "--timeout", "0"], "--timeout: got '0', expected a number of more than 0"),
    (["--trainers", "1", "--adress", "a:1"], "did you mean --address?"),
]


@pytest.mark.parametrize(("words", "text"), BAD)
def test_wrong_words(
    words: list[str], text: str, parts: str, capsys: pytest.CaptureFixture
) -> None:
    """Before anything starts."""
    try:
        assert main(["sample-server", parts, *words]) == 2
    except SystemExit as end:
        assert end.code == 2
    assert text in capsys.readouterr().err
