"""Ranks that die or stop, networks that go away, damaged files: nothing waits, nothing is used."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hosts import Hosts, missing
from benchmarks.processes import is_alive, send
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks import mutations
from benchmarks.tasks.jobs import (
    ALONE,
    HOSTS,
    LAUNCHER,
    LIMIT,
    LOADER,
    MAKING,
    MEETING,
    RANKS,
    SERVED,
    SERVERS,
    SERVERS_LAUNCHER,
    SLACK,
    STARTING,
    TORCHRUN,
    TRAINERS,
    TRAINING,
    Job,
    listens,
    reach,
)
from sar.files import PARTIAL, remove_left_over
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions

STOPS, RAISES, CUTS, FLIPS, MUTATIONS = 60, 40, 60, 1000, 2000
Way = tuple[str, bool, tuple[str, ...]]  # of starting ranks, host memory, phases of faults
RANK, TWO, TRAINER, SERVER = "a rank", "two ranks", "a trainer", "a server"
BOTH, ITS_LAUNCHER = "a trainer and a server", "the launcher"
# How often who is killed of which job, over host memory and over sockets, in which phases.
_KILLS: tuple[tuple[int, str, str, tuple[str, ...]], ...] = (
    (25, RANK, ALONE, (MEETING, TRAINING, TRAINING)),
    (20, TWO, ALONE, (TRAINING,)),
    (20, RANK, LOADER, (MAKING, TRAINING)),
    (10, TWO, LOADER, (MAKING, TRAINING)),
    (25, TRAINER, SERVED, (MAKING, TRAINING)),
    (25, SERVER, SERVED, (MAKING, TRAINING)),
    (10, BOTH, SERVED, (MAKING, TRAINING)),
    (5, RANK, LAUNCHER, (STARTING, MEETING, TRAINING)),
    (5, ITS_LAUNCHER, LAUNCHER, (STARTING, MEETING, TRAINING)),
    (5, ITS_LAUNCHER, SERVERS_LAUNCHER, (MAKING, TRAINING)),
)
_TIMEOUT = 300.0  # of killed jobs: users' default, so that nobody ends by waiting
_WAYS: tuple[Way, ...] = (
    (LAUNCHER, True, (STARTING, MEETING, TRAINING)),
    (LAUNCHER, False, (STARTING, MEETING, TRAINING)),
    (ALONE, True, (MEETING, TRAINING)),  # nobody knows of a rank that has not come
    (ALONE, False, (MEETING, TRAINING)),
    (TORCHRUN, True, (TRAINING,)),
)
_SAMPLING: list[Way] = [
    (way, memory, (TRAINING,)) for way in (LOADER, SERVED) for memory in (True, False)
]
_COLUMNS = [
    "way", "phase or transport", "runs", "all ended", "named", "p50 s", "p99 s", "longest s",
    "left",
]  # fmt: skip


@dataclass
class Ending:
    """How a job ended after a fault.

    Attributes:
        phase: in which the fault was, or how rows traveled.
        named: ``None`` where nobody is there to tell of it.
        left: files and processes.
    """

    way: str
    phase: str
    ended: bool
    named: bool | None
    seconds: float
    left: int
    words: list[str]

    def line(self) -> str:
        told = "; ".join(self.words) if self.named is False else ""
        return f"{self.way}, {self.phase}: {self.seconds:.1f} s, ended {self.ended} {told}"


@benchmark("faults-files", "faults")
def files(options: Options) -> Report:
    """Damaged checkpoints and partitions: all rejected, or of the same content."""
    report = Report()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = mutations.campaign(MUTATIONS, 0, folder)
        report.figures += _used(f"{MUTATIONS} mutations of partitions", found)
        run = folder / "run"
        words = ["train", _parts(folder), "--hidden", "16", "--epochs", "3", "--no-progress"]
        command = [sys.executable, "-m", "sar", *words, "--checkpoint", str(run)]
        subprocess.run(command, check=True, capture_output=True)
        found = mutations.checkpoints(FLIPS, 0, run / "checkpoint.pt")
        report.figures += _used(f"{FLIPS} flipped bits of a checkpoint", found)
    return report


def _used(what: str, found: dict[str, int]) -> list[Figure]:
    fine = sum(found.get(key, 0) for key in (mutations.REJECTED, mutations.SAME))
    rejected = Figure(f"{what}, rejected", found.get(mutations.REJECTED, 0))
    return [rejected, Figure(f"{what}, used or unnamed", sum(found.values()) - fine, at_most=0)]


@benchmark("faults-kills", "faults")
def kills(options: Options) -> Report:
    """Ranks, trainers, servers and launchers that are killed: how soon others end and name them."""
    draw, before = random.Random(1), set(Path("/dev/shm").iterdir())
    todo = [(way, memory, phases, whom) for count, whom, way, phases in _KILLS
            for memory in (True, False) for _ in range(count)]  # fmt: skip
    draw.shuffle(todo)
    report = _campaign(len(todo), 1, _kill, 0.99, todo, bound=5.0)
    left = len(set(Path("/dev/shm").iterdir()) - before)
    report.figures.append(Figure("files left in /dev/shm", left, at_most=0))
    return report


@benchmark("faults-stops", "faults")
def stops(options: Options) -> Report:
    """Ranks that are stopped in any phase: the others and the launcher end within timeout + 8 s."""
    ways = [way for way in _WAYS if way[0] != TORCHRUN]  # which waits 30 s for a rank of its own
    return _campaign(STOPS, 2, _stop, 0.95, ways + _SAMPLING)


@benchmark("faults-raises", "faults")
def raises(options: Options) -> Report:
    """Transforms of loaders that raise on one rank: all others end, and say what was raised."""
    return _campaign(RAISES, 4, _raise, 0.95, _SAMPLING)


@benchmark("faults-network", "faults")
def network(options: Options) -> Report:
    """Networks that go away between hosts: every rank ends within timeout + 8 s, with an error."""
    reason = missing()
    if reason is not None:
        return Report(skipped=reason)
    with Hosts(RANKS) as hosts:
        ways = [(HOSTS, False, (MEETING, TRAINING))]
        return _campaign(CUTS, 3, lambda job, draw: _cut(job, draw, hosts), 0.95, ways, hosts)


def _campaign(
    num: int,
    seed: int,
    fault: Callable[[Job, random.Random], Ending | None],
    least_named: float,
    ways: Sequence[Any],
    hosts: Hosts | None = None,
    bound: float = LIMIT + SLACK,
) -> Report:
    draw, endings, missed = random.Random(seed), list[Ending](), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder = Path(name)
        parts = {count: _parts(folder, count) for count in (SERVERS, RANKS)}
        while len(endings) < num and missed < num:
            way, number = ways[len(endings) % len(ways)], len(endings) + missed
            with _job(parts, folder / str(number), way, draw, hosts) as job:
                ending = fault(job, draw)
            print(number, ending and ending.line(), flush=True)
            endings += [] if ending is None else [ending]
            missed += ending is None
    seconds = [one.seconds for one in endings]
    told = [one for one in endings if one.named is not None]
    p99 = float(np.quantile(seconds, 0.99))
    report = Report(
        [
            Figure("jobs", len(endings), at_least=num),
            Figure("jobs that ended before their fault, repeated", missed),
            Figure("jobs that did not end in time", sum(not e.ended for e in endings), at_most=0),
            Figure("files and processes left", sum(one.left for one in endings), at_most=0),
            Figure("named", sum(bool(e.named) for e in told) / len(told), at_least=least_named),
            Figure("median of seconds until all have ended", float(np.median(seconds)), "s"),
        ],
        [_table(endings)],
    )
    report.figures.append(Figure("p99 of seconds until all have ended", p99, "s", at_most=bound))
    return report


def _table(endings: list[Ending]) -> Table:
    table = Table("By how ranks are started and what they did", _COLUMNS)
    for key in sorted({(one.way, one.phase) for one in endings}):
        same = [one for one in endings if (one.way, one.phase) == key]
        seconds = [one.seconds for one in same]
        ended, left = sum(one.ended for one in same), sum(one.left for one in same)
        told = [one.named for one in same if one.named is not None]
        named = f"{sum(told)} of {len(told)}" if told else "-"
        spread = [float(np.quantile(seconds, part)) for part in (0.5, 0.99, 1.0)]
        table.rows.append([*key, len(same), ended, named, *spread, left])
    return table


@contextmanager
def _job(
    parts: dict[int, str], folder: Path, way: Any, draw: random.Random, hosts: Hosts | None
) -> Iterator[Job]:
    phase = draw.choice(way[2])
    first = 1 if way[0] == ALONE else 0  # without rank 0 and its store nobody has met anybody
    late = draw.randrange(first, RANKS) if phase == MEETING else None
    count = SERVERS if way[0] in (SERVED, SERVERS_LAUNCHER) else RANKS
    job = Job(parts[count], folder, way[0], phase, way[1], late, hosts)
    if len(way) > 3:
        job.whom, job.timeout = way[3], _TIMEOUT
    try:
        job.start()
        yield job
    finally:
        job.end()


def _kill(job: Job, draw: random.Random) -> Ending | None:
    victims = _victims(job, draw)
    if not reach(job, victims, draw):
        return None
    targets = [job.ranks[rank] for rank in victims] or [job.started[0].pid]
    if not all([send(pid, signal.SIGKILL) for pid in targets]):
        return None
    ending = _ending(job, f"{job.whom} of {job.way}", victims)
    ending.phase = "memory" if job.memory else "sockets"
    return ending


def _victims(job: Job, draw: random.Random) -> list[int]:
    """Ranks, some others of which tell of it; none where it is the launcher."""
    able = [rank for rank in range(job.size) if rank != job.late]
    trainer, server = draw.randrange(SERVERS, SERVERS + TRAINERS), draw.randrange(SERVERS)
    chosen = {
        RANK: [draw.choice(able)], TWO: draw.sample(able, min(2, len(able) - 1)),
        TRAINER: [trainer], SERVER: [server], BOTH: [trainer, server], ITS_LAUNCHER: [],
    }  # fmt: skip
    return chosen[job.whom]


def _stop(job: Job, draw: random.Random) -> Ending | None:
    victim = draw.choice([rank for rank in range(job.size) if rank != job.late])
    if not reach(job, [victim], draw) or not send(job.ranks[victim], signal.SIGSTOP):
        return None
    job.start_late()  # the others meet, all but this one
    way = f"{job.way}, {'memory' if job.memory else 'sockets'}"
    stays = [] if job.way == LAUNCHER else [job.ranks[victim]]
    return _ending(job, way, [victim], stays, waits=True)


def _raise(job: Job, draw: random.Random) -> Ending | None:
    """In the transform of a rank's loader."""
    first = SERVERS if job.way == SERVED else 0
    victim = draw.randrange(first, job.size)
    if not reach(job, [victim], draw):
        return None
    (job.folder / f"raise-{victim - first}").touch()
    ending = _ending(job, f"{job.way}, a transform raises", [victim])
    ending.named = all("a transform that raises" in words for words in ending.words)
    return ending


def _cut(job: Job, draw: random.Random, hosts: Hosts) -> Ending | None:
    victim = draw.choice([rank for rank in range(RANKS) if rank != job.late])
    space, hub = hosts.names[victim], hosts.names[0].rpartition("-")[0] + "-hub"
    kinds = {
        "its link": (space, "link set eth0 down", "link set eth0 up"),
        "the switch's port": (hub, f"link set port{victim} down", f"link set port{victim} up"),
        "its route": (space, "route add blackhole 10.77.0.0/25", "route del 10.77.0.0/25"),
    }
    kind = draw.choice(list(kinds))
    where, cut, mend = kinds[kind]
    if not reach(job, [victim], draw):
        return None
    subprocess.run(["ip", "-n", where, *cut.split()], check=True)
    try:
        job.start_late()
        return _ending(job, f"{HOSTS}, {kind}", [], waits=True)
    finally:
        subprocess.run(["ip", "-n", where, *mend.split()], check=True)


def _ending(
    job: Job,
    way: str,
    victims: list[int],
    stays: Sequence[int] = (),
    waits: bool = False,
) -> Ending:
    """Wait for the end of a job, and look at what it left.

    Args:
        stays: processes that are stopped for good.
        waits: ranks notice by waiting: seconds count from when the last of them has come.
    """
    begin = last = time.monotonic()
    coming = [pid for pid in job.find().values() if pid not in stays]
    while not job.all_ended(stays) and time.monotonic() - last < 2 * (LIMIT + SLACK):
        time.sleep(0.05)
        if waits and job.phase != TRAINING and (come := [p for p in coming if listens(p, job)]):
            coming = [pid for pid in coming if pid not in come]
            last = time.monotonic()
    seconds = time.monotonic() - (last if waits else begin)
    job.end()
    for folder in (job.folder, job.folder / "run"):
        remove_left_over(folder, ["checkpoint.pt"])  # as the next start does
    left = [one for one in job.folder.rglob("*") if one.match("sar-*") or one.suffix == PARTIAL]
    words, named = _words(job, victims), None
    if job.whom != ITS_LAUNCHER or job.way != LAUNCHER:  # whose ranks the kernel ends
        named = bool(words) and all(map(_names(job, victims).search, words))
    running = sum(map(is_alive, job.ranks.values()))
    return Ending(
        way, job.phase, seconds <= LIMIT + SLACK, named, seconds, len(left) + running, words
    )


def _names(job: Job, victims: list[int]) -> re.Pattern:
    """What an error that names one of them holds; of a network, an error that names any rank."""
    if job.way in (SERVED, SERVERS_LAUNCHER):
        return re.compile("|".join(map(job.title, victims or range(SERVERS))))
    either = "|".join(map(str, victims)) or "."
    by_torch = rf"rank\s*: ({either}) \(local_rank"
    return re.compile(rf"ranks? [\d, ]*\b({either})\b|{by_torch}")


def _words(job: Job, victims: list[int]) -> list[str]:
    """What is told of the end: by the launcher, else by every rank that nothing happened to."""
    if job.way == LAUNCHER:
        return [job.words_of("launcher")]
    if job.way == TORCHRUN:
        return [(job.folder / "launcher.err").read_text(encoding="utf-8", errors="replace")]
    tell = [rank for rank in job.ranks if rank not in victims]
    if job.way == SERVERS_LAUNCHER:
        tell = [rank for rank in tell if rank >= SERVERS]
    return [job.words_of(str(rank)) for rank in tell]


def _parts(folder: Path, count: int = RANKS) -> str:
    graph = community_graph(300, 2400, 3, classes=3, features=8)
    return write_partitions(graph, np.arange(300) % count, folder / f"parts{count}", "g")
