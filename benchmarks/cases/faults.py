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

import numpy as np

from benchmarks.hosts import Hosts, missing
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks import mutations
from benchmarks.tasks.jobs import (
    ALONE,
    HOSTS,
    LAUNCHER,
    LIMIT,
    MEETING,
    RANKS,
    SLACK,
    STARTING,
    TORCHRUN,
    TRAINING,
    Job,
    listens,
    reach,
    send,
)
from sar.files import PARTIAL, remove_left_over
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions

KILLS, STOPS, CUTS, FLIPS, MUTATIONS = 200, 50, 60, 1000, 2000
Way = tuple[str, bool, tuple[str, ...]]  # of starting ranks, host memory, phases of faults
_WAYS: tuple[Way, ...] = (
    (LAUNCHER, True, (STARTING, MEETING, TRAINING)),
    (LAUNCHER, False, (STARTING, MEETING, TRAINING)),
    (ALONE, True, (MEETING, TRAINING)),  # nobody knows of a rank that has not come
    (ALONE, False, (MEETING, TRAINING)),
    (TORCHRUN, True, (TRAINING,)),
)
_COLUMNS = ["way", "phase", "runs", "all ended", "named", "median s", "longest s"]


@dataclass
class Ending:
    """How a job ended after a fault."""

    way: str
    phase: str
    ended: bool
    named: bool
    seconds: float
    left: bool
    words: list[str]

    def line(self) -> str:
        told = "" if self.named else "; ".join(self.words)
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
    """Ranks and launchers that are killed in any phase: how soon the others end, what they tell."""
    return _campaign(KILLS, 1, _kill, {"p99 of seconds until all have ended": 5.0}, 0.95)


@benchmark("faults-stops", "faults")
def stops(options: Options) -> Report:
    """Ranks that are stopped in any phase: the others and the launcher end within timeout + 8 s."""
    ways = [way for way in _WAYS if way[0] != TORCHRUN]  # which waits 30 s for a rank of its own
    return _campaign(STOPS, 2, _stop, {}, 0.95, ways)


@benchmark("faults-network", "faults")
def network(options: Options) -> Report:
    """Networks that go away between hosts: every rank ends within timeout + 8 s, with an error."""
    reason = missing()
    if reason is not None:
        return Report(skipped=reason)
    with Hosts(RANKS) as hosts:
        ways = [(HOSTS, False, (MEETING, TRAINING))]
        return _campaign(CUTS, 3, lambda job, draw: _cut(job, draw, hosts), {}, 0.95, ways, hosts)


def _campaign(
    num: int,
    seed: int,
    fault: Callable[[Job, random.Random], Ending | None],
    bounds: dict[str, float],
    least_named: float,
    ways: Sequence[Way] = _WAYS,
    hosts: Hosts | None = None,
) -> Report:
    draw, endings, missed = random.Random(seed), list[Ending](), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        folder, parts = Path(name), _parts(Path(name))
        while len(endings) < num and missed < num:
            way, number = ways[len(endings) % len(ways)], len(endings) + missed
            with _job(parts, folder / str(number), way, draw, hosts) as job:
                ending = fault(job, draw)
            print(number, ending and ending.line(), flush=True)
            endings += [] if ending is None else [ending]
            missed += ending is None
    seconds = [one.seconds for one in endings]
    told = [one for one in endings if one.way != f"{LAUNCHER} killed"]
    p99 = float(np.quantile(seconds, 0.99))
    report = Report(
        [
            Figure("jobs", len(endings), at_least=num),
            Figure("jobs that ended before their fault, repeated", missed),
            Figure("jobs that did not end in time", sum(not e.ended for e in endings), at_most=0),
            Figure("jobs with something left", sum(one.left for one in endings), at_most=0),
            Figure("named", sum(one.named for one in told) / len(told), at_least=least_named),
            Figure("median of seconds until all have ended", float(np.median(seconds)), "s"),
        ],
        [_table(endings)],
    )
    bound = next(iter(bounds.values()), LIMIT + SLACK)
    report.figures.append(Figure("p99 of seconds until all have ended", p99, "s", at_most=bound))
    return report


def _table(endings: list[Ending]) -> Table:
    table = Table("By how ranks are started and what they did", _COLUMNS)
    for key in sorted({(one.way, one.phase) for one in endings}):
        same = [one for one in endings if (one.way, one.phase) == key]
        seconds = [one.seconds for one in same]
        ended, named = sum(one.ended for one in same), sum(one.named for one in same)
        row = [*key, len(same), ended, named, float(np.median(seconds)), max(seconds)]
        table.rows.append(row)
    return table


@contextmanager
def _job(
    parts: str, folder: Path, way: Way, draw: random.Random, hosts: Hosts | None
) -> Iterator[Job]:
    phase = draw.choice(way[2])
    first = 1 if way[0] == ALONE else 0  # without rank 0 and its store nobody has met anybody
    late = draw.randrange(first, RANKS) if phase == MEETING else None
    job = Job(parts, folder, way[0], phase, way[1], late, hosts)
    try:
        job.start()
        yield job
    finally:
        job.end()


def _kill(job: Job, draw: random.Random) -> Ending | None:
    able = [rank for rank in range(RANKS) if rank != job.late]
    most = min(2, len(able) - 1)  # somebody has to tell of it
    victims = draw.sample(able, 1 if draw.random() < 0.75 else most)
    if not reach(job, victims, draw):
        return None
    way = f"{job.way}, {'memory' if job.memory else 'sockets'}"
    if job.way == LAUNCHER and draw.random() < 0.2:
        victims, way = [], f"{LAUNCHER} killed"
    targets = [job.ranks[rank] for rank in victims] or [job.started[0].pid]
    if not all([send(pid, signal.SIGKILL) for pid in targets]):
        return None
    return _ending(job, way, victims, LIMIT + SLACK)


def _stop(job: Job, draw: random.Random) -> Ending | None:
    victim = draw.choice([rank for rank in range(RANKS) if rank != job.late])
    if not reach(job, [victim], draw) or not send(job.ranks[victim], signal.SIGSTOP):
        return None
    job.start_late()  # the others meet, all but this one
    way = f"{job.way}, {'memory' if job.memory else 'sockets'}"
    stays = [] if job.way == LAUNCHER else [job.ranks[victim]]
    return _ending(job, way, [victim], LIMIT + SLACK, stays, waits=True)


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
        return _ending(job, f"{HOSTS}, {kind}", [], LIMIT + SLACK, waits=True)
    finally:
        subprocess.run(["ip", "-n", where, *mend.split()], check=True)


def _ending(
    job: Job,
    way: str,
    victims: list[int],
    limit: float,
    stays: Sequence[int] = (),
    waits: bool = False,
) -> Ending:
    """Wait for the end of a job, and look at what it left.

    Args:
        limit: seconds in which it has to end.
        stays: processes that are stopped for good.
        waits: ranks notice by waiting: seconds count from when the last of them has come.
    """
    begin = last = time.monotonic()
    coming = [pid for pid in job.find().values() if pid not in stays]
    while not job.all_ended(stays) and time.monotonic() - last < 2 * limit:
        time.sleep(0.05)
        if waits and job.phase != TRAINING and (come := [p for p in coming if listens(p, job)]):
            coming = [pid for pid in coming if pid not in come]
            last = time.monotonic()
    seconds = time.monotonic() - (last if waits else begin)
    job.end()
    for folder in (job.folder, job.folder / "run"):
        remove_left_over(folder, ["checkpoint.pt"])  # as the next start does
    left = [one for one in job.folder.rglob("*") if one.match("sar-*") or one.suffix == PARTIAL]
    words = _words(job, victims)
    named = bool(words) and all(map(_names(victims).search, words))
    return Ending(way, job.phase, seconds <= limit, named, seconds, bool(left), words)


def _names(victims: list[int]) -> re.Pattern:
    """What an error that names one of them holds; of a network, an error that names any rank."""
    either = "|".join(map(str, victims)) or "."
    by_torch = rf"rank\s*: ({either}) \(local_rank"
    return re.compile(rf"ranks? [\d, ]*\b({either})\b|{by_torch}")


def _words(job: Job, victims: list[int]) -> list[str]:
    """What is told of the end: by the launcher, else by every rank that nothing happened to."""
    if job.way == LAUNCHER:
        return [job.words_of("launcher")]
    if job.way == TORCHRUN:
        return [(job.folder / "launcher.err").read_text(encoding="utf-8", errors="replace")]
    return [job.words_of(str(rank)) for rank in job.ranks if rank not in victims]


def _parts(folder: Path) -> str:
    graph = community_graph(300, 2400, 3, classes=3, features=8)
    return write_partitions(graph, np.arange(300) % RANKS, folder / "parts", "g")
