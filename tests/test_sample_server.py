"""`sar sample-server` and trainers that hold no partition, as processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from test_launch import ROOT, environment

from sar.__main__ import main
from sar.partition.generate import community_graph
from sar.partition.write import write_partitions

LIMIT = 15  # seconds of the ranks' timeout where one of them fails
SLACK = 10

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
                    sar.global_mean(F.cross_entropy(model(x), y, reduction="none")).backward()
                    sar.gather_grads(model)
        print("sum", float(sum(p.grad.abs().sum() for p in model.parameters())))
""")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    arrays = community_graph(200, 1600, 3, classes=3, features=8)
    folder = tmp_path_factory.mktemp("graph")
    return write_partitions(arrays, np.arange(200) % 2, folder / "parts")


@contextmanager
def servers(parts: str, *more: str, limit: float = LIMIT) -> Iterator[tuple[subprocess.Popen, str]]:
    """The command, running, and the address that it tells."""
    words = [sys.executable, "-m", "sar", "sample-server", parts, "--timeout", str(limit), *more]
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield process, line.strip().rpartition(" at ")[2]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def trainers(
    folder: Path, address: str, victim: int, number: int, limit: float = LIMIT
) -> list[subprocess.Popen]:
    """Two, each of which knows its place from the environment alone."""
    script = folder / "trainer.py"
    script.write_text(TRAINER)
    words = [sys.executable, str(script), address, str(victim), str(number), str(limit)]
    return [
        subprocess.Popen(
            words,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment() | {"RANK": str(rank), "WORLD_SIZE": "2"},
        )  # fmt: skip
        for rank in range(2)
    ]


@pytest.mark.parametrize("through_memory", ["1", "0"])
def test_two_servers_and_two_trainers(
    through_memory: str, parts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All end with status 0; the trainers have the same gradients."""
    monkeypatch.setenv("SAR_HOST_MEMORY", through_memory)
    with servers(parts, "--trainers", "2", limit=60) as (process, address):
        running = trainers(tmp_path, address, -1, 0, limit=60)
        outputs = [one.communicate(timeout=90) for one in running]
        assert [one.returncode for one in running] == [0, 0], outputs
        sums = {re.findall(r"sum ([0-9.]+)", out)[0] for out, _ in outputs}
        assert len(sums) == 1
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_dies_or_stops_is_named(number: int, parts: str, tmp_path: Path) -> None:
    with servers(parts, "--trainers", "2") as (process, address):
        running = trainers(tmp_path, address, 1, number)
        try:
            began = time.monotonic()
            _, told = running[0].communicate(timeout=90)
            assert running[0].returncode
            _, heard = process.communicate(timeout=LIMIT + SLACK)
            assert time.monotonic() - began < LIMIT + SLACK + 30
        finally:
            running[1].kill()
            running[1].communicate()
        assert process.returncode == 2
        for text in (told, heard):
            assert "rank 3" in text
        assert "ranks 0 to 1 are servers, 2 to 3 trainers" in told


def test_a_server_that_dies_is_named(parts: str, tmp_path: Path) -> None:
    with servers(parts, "--trainers", "2") as (process, address):
        running = trainers(tmp_path, address, 0, signal.SIGSTOP)  # so that the epoch does not end
        time.sleep(8)
        found = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        )
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
        _, told = running[1].communicate(timeout=LIMIT + SLACK + 30)
        running[0].kill()
        running[0].communicate()
        _, heard = process.communicate(timeout=LIMIT + SLACK)
        assert running[1].returncode and process.returncode == 2
        assert "rank 0: killed by SIGKILL" in heard
        assert "rank 0" in told


BAD = [
    (["--trainers", "0"], "--trainers: got 0, expected at least 1"),
    (["--trainers", "1", "--address", "here"], "--address: got 'here', expected HOST:PORT"),
    (["--trainers", "1", "--address", "192.0.2.7:0"], "cannot listen at 192.0.2.7:0"),
    (["--trainers", "1", "--nproc", "3"], "got a graph of 2 parts for 3 ranks"),
    (["--trainers", "1", "--timeout", "0"], "--timeout: got 0.0, expected more than 0"),
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
