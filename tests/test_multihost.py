"""Hosts that are network namespaces: what they are told, what they count, what is left behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, missing

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "multihost.sh"


@pytest.fixture(scope="module")
def _hosts_possible() -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)


needs_hosts = pytest.mark.usefixtures("_hosts_possible")


def multihost(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def namespaces() -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines()}


@pytest.mark.system
@needs_hosts
def test_two_hosts_reduce_and_count_what_they_send() -> None:
    code = """
        import torch, sar
        group = sar.initialize_comms(backend="gloo")
        rows = torch.full((100_000,), float(group.rank + 1))
        print("sum", group.all_reduce(rows)[-1].item())
    """
    done = multihost(
        "--hosts", "2", "--rate", "1gbit", "--", sys.executable, "-c", textwrap.dedent(code)
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"[0] sum 3.0", "[1] sum 3.0"} <= set(lines)
    for rank, line in enumerate(lines[-2:]):
        host, status, sent, received = map(int, line.split())
        assert (host, status) == (rank, 0)
        assert 400_000 < sent < 500_000 and 400_000 < received < 500_000


@needs_hosts
def test_a_failing_host_ends_the_others_and_nothing_stays() -> None:
    command = 'if [ "$RANK" = 1 ]; then exit 7; fi; sleep 50'
    done = multihost("--hosts", "2", "--grace", "0", "--", "sh", "-c", command)
    assert done.returncode == 7, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[-2:]] == [
        ["0", "137"],
        ["1", "7"],
    ]


@needs_hosts
def test_held_hosts_end_with_their_owner() -> None:
    with Hosts(2) as hosts:
        assert set(hosts.names) <= namespaces()
        hosts.set_rate("100mbit")
        shown = subprocess.run(
            ["tc", "-n", hosts.names[1], "qdisc", "show", "dev", "eth0"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "rate 100Mbit" in shown.stdout
        assert len(hosts.sent_bytes()) == 2
        sleeper = subprocess.Popen([*hosts.command(0), "sleep", "50"])
    assert sleeper.wait(timeout=10) != 0
    assert not set(hosts.names) & namespaces()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "0", "--", "true"], "--hosts: got '0', expected 1 to 250"),
        (["--hosts"], "--hosts: got nothing"),
        (["--hosts", "2", "--rate", "fast", "--", "true"], "--rate: got 'fast'"),
        (["--hosts", "2"], "multihost.sh --hosts P"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    done = multihost(*words)
    assert done.returncode == 2 and message in done.stderr
