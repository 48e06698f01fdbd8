"""How ranks start, meet and end: who can reach them, and that nobody waits without an end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.nursery import Child, Nursery
from test_launch import ROOT, environment, ranks_below, wait_for

import sar
from benchmarks.hosts import Hosts, missing
from sar.__main__ import main
from sar.cli.fork_server import ForkServer
from sar.cli.ranks import run_ranks
from sar.errors import SarError

LIMIT = 10  # seconds of the ranks' timeout; on a loaded machine they need some to meet
SLACK = 20  # seconds after it in which all have ended, on a loaded machine, too


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = "synthetic:nodes=200,edges=1600,classes=3,features=8"
    return sar.partition_graph(source, tmp_path_factory.mktemp("graph") / "parts", 2)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with Hosts(2) as hosts:
        yield hosts


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


def listening(before: list[str]) -> list[str]:
    """Local addresses that take connections, as ``ss`` lists them in a host."""
    done = subprocess.run(
        [*before, "ss", "-Hltn"], capture_output=True, text=True, check=True, timeout=30
    )
    return [line.split()[3] for line in done.stdout.splitlines()]


def is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]", "[::ffff:127."))


# ---------------------------------------------------------------- who can reach them


KNOCK = """
import socket, sys
reached = []
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), timeout=5).close()
        reached.append(port)
    except OSError:
        pass
print(*reached)
"""


@pytest.mark.system
def test_another_host_finds_no_port_of_a_job_on_one(
    parts: str, two_hosts: Hosts, tmp_path: Path
) -> None:
    """Where all ranks are on one host, but send rows over gloo."""
    inside = two_hosts.command(0)
    words = ["train", parts, "--hidden", "8", "--epochs", "1000000", "--checkpoint"]
    more = [str(tmp_path), "--checkpoint-every", "1", "--no-progress"]
    process = subprocess.Popen(
        [*inside, sys.executable, "-m", "sar", *words, *more],
        env=environment(SAR_HOST_MEMORY="0"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        checkpoint = tmp_path / "checkpoint.pt"
        wait_for(lambda: checkpoint.exists() or process.poll() is not None)
        ranks = ranks_below(process.pid)
        assert len(ranks) == 2, process.stderr
        found = listening(inside)
        assert len(found) > len(ranks) and all(map(is_loopback, found)), found
        ports = [address.rpartition(":")[2] for address in found]
        done = subprocess.run(
            [*two_hosts.command(1), sys.executable, "-c", KNOCK, two_hosts.addresses[0], *ports],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        assert done.stdout.split() == []
    finally:
        end(process)


MEETING = """
import os, subprocess, sys, time
import sar, torch
from sar.errors import CommError
begin = time.monotonic()
try:
    group = sar.initialize_comms(backend="gloo", timeout={limit})
    {after}
except CommError as error:
    print("seconds", time.monotonic() - begin)
    print("error", error)
    raise
"""


def join(
    hosts: Hosts, rank: int, after: str, before: str = "", limit: int = LIMIT
) -> subprocess.Popen[str]:
    """A rank on a host of its own, which joins the other."""
    own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500", **hosts.environment()}
    code = before + MEETING.format(after=after, limit=limit)
    words = [*hosts.command(rank), sys.executable, "-c", code]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, env=environment(**own), text=True, **pipes)


@pytest.mark.system
def test_ranks_of_several_hosts_listen_on_the_network_that_joins_them(two_hosts: Hosts) -> None:
    ranks = [join(two_hosts, rank, "print('met', flush=True); time.sleep(60)") for rank in range(2)]
    try:
        for host, rank in enumerate(ranks):
            assert rank.stdout is not None and rank.stdout.readline() == "met\n"
            found = listening(two_hosts.command(host))
            named = two_hosts.addresses[host]
            assert found and all(named in one or is_loopback(one) for one in found), found
    finally:
        for rank in ranks:
            end(rank)


CUT = """
import subprocess
from sar.comm import process
def cut(*words, new_group=process.dist.new_group, **more):
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    return new_group(*words, **more)
process.dist.new_group = cut
"""


@pytest.mark.system
def test_a_network_that_goes_away_while_ranks_meet(two_hosts: Hosts, tmp_path: Path) -> None:
    imported = "from sar.comm import process\n"  # the limit is not that of imports
    limit, ready = 6, imported + TOGETHER.format(folder=tmp_path, size=2)
    try:
        before = [ready, CUT + ready]
        ranks = [join(two_hosts, rank, "sar.shutdown()", before[rank], limit) for rank in range(2)]
        for number, rank in enumerate(ranks):
            out, errors = rank.communicate(timeout=60)
            seconds, error = out.splitlines()[:2]
            assert float(seconds.split()[1]) < limit + SLACK, out
            assert f"rank {number} of 2: could not meet the other ranks" in error
            assert "did not answer" in error
            assert rank.returncode == 1 and "CommError" in errors
    finally:
        subprocess.run([*two_hosts.command(1), "ip", "link", "set", "eth0", "up"], check=True)


# ---------------------------------------------------------------- meeting in vain


@pytest.fixture
def alone(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """``alone(rank, size, port, limit)`` is a rank that waits for others at most ``limit``."""
    started: list[Child] = []

    def start(
        rank: int, size: int, port: int, limit: int, after: str = "", before: str = "", **more: str
    ) -> Child:
        script = tmp_path / f"meeting{len(started)}.py"
        script.write_text(before + MEETING.format(after=after, limit=limit))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        given = environment(**where, RANK=str(rank), WORLD_SIZE=str(size), **more)
        started.append(nursery.start([str(script)], given))
        return started[-1]

    yield start
    for one in started:
        one.kill()


TOGETHER = """
import os, time
from pathlib import Path
import sar, torch
Path(f"{folder}/here-" + os.environ["RANK"]).touch()
while len(list(Path("{folder}").glob("here-*"))) < {size}:
    time.sleep(0.01)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.system
def test_ranks_that_do_not_come_are_named(alone: Callable[..., Child]) -> None:
    rank = alone(0, 3, free_port(), 2)
    assert rank.wait(60) == 1
    out = rank.text("out")
    assert "ranks 1, 2 did not come" in out and "waiting for the others" in out


@pytest.mark.system
def test_ranks_that_count_differently_say_so(alone: Callable[..., Child]) -> None:
    """At once, not when the last one is missed."""
    port = free_port()
    both = [alone(rank, size, port, 60) for rank, size in ((0, 2), (1, 3))]
    for rank, one in enumerate(both):
        assert one.wait(SLACK) == 1
        assert f"rank {rank} of" in one.text("out") and re.search(
            r"rank \d was started as one of \d ranks, others of \d", one.text("out")
        )


@pytest.mark.system
def test_a_rank_is_killed_while_ranks_meet(alone: Callable[..., Child]) -> None:
    """The others wait for rank 2, but not until the limit; be it the one that keeps the store."""
    jobs = [[alone(rank, 3, port, 60) for rank in range(2)] for port in (free_port(), free_port())]
    wait_for(lambda: all(listens(rank.pid) for both in jobs for rank in both))
    time.sleep(2)  # they have connected to the store as well
    for victim, both in enumerate(jobs):
        os.kill(both[victim].pid, signal.SIGKILL)
    for victim, both in enumerate(jobs):
        assert both[1 - victim].wait(SLACK) == 1
        out = both[1 - victim].text("out")
        assert f"rank {1 - victim} of 3: could not meet the other ranks" in out
        assert f"(rank {victim}: died or left early" in out


def listens(pid: int) -> bool:
    """Whether it has come: to its port that says so."""
    done = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True, timeout=30)
    return f"pid={pid}," in done.stdout


# ---------------------------------------------------------------- ranks that are stopped


@pytest.mark.system
def test_a_stopped_rank_is_named_and_holds_nobody(
    alone: Callable[..., Child], tmp_path: Path
) -> None:
    """Through memory and through sockets, at the same time, as most of it is waiting."""
    stop = "group.rank == 1 and os.kill(os.getpid(), 19); group.all_reduce(torch.ones(1))"
    limit, jobs = 6, []
    for memory in ("1", "0"):
        (here := tmp_path / memory).mkdir()
        ready = TOGETHER.format(folder=here, size=3)  # so that the limit is not that of imports
        given, port = {"SAR_HOST_MEMORY": memory}, free_port()
        jobs.append([alone(rank, 3, port, limit, stop, ready, **given) for rank in range(3)])
    for ranks in jobs:
        for rank in (0, 2):
            assert ranks[rank].wait(60) == 1
            seconds, error = ranks[rank].text("out").splitlines()[:2]
            assert "rank 1 did not answer within the timeout" in error
            assert float(seconds.split()[1]) < 2 * limit + SLACK  # also to meet


@pytest.mark.usefixtures("bare")
def test_a_rank_that_stops_after_its_last_collective(tmp_path: Path) -> None:
    """Nobody waits for it but the launcher."""
    code = "import os\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 19)"
    (tmp_path / "stopped_last.py").write_text(code)
    paths = environment(PYTHONPATH=f"{tmp_path}:{ROOT}")
    with pytest.raises(SarError, match="rank 1: did not end within 1 seconds after other ranks"):
        run_ranks(["stopped_last"], ForkServer(2, paths), 1.0)


# ---------------------------------------------------------------- how many


def test_many_ranks_start_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    path = sar.partition_graph("synthetic:nodes=60,edges=300", tmp_path / "parts", 5)
    assert main(["train", path]) == 2
    error = capsys.readouterr().err
    assert "5 parts" in error and "at most 4 a core; give --nproc 5" in error
