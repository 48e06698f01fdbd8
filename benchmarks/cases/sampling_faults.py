"""Ranks of loaders, trainers and servers that die, stop or raise: all others end, and say who."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cluster import ROOT, free_port
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.jobs import LIMIT, SLACK, children, is_alive, send, variable
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions

INJECTIONS = 200
LOCAL, SERVED = "3 ranks with partitions", "2 servers, 2 trainers"
STARTING, STEPPING = "starting", "stepping"
KILL, STOP, RAISE = "kill -9", "SIGSTOP", "a transform raises"
_READY_SECONDS = 60.0


@dataclass
class _Job:
    """Processes by the number of their rank, and where each writes its errors."""

    folder: Path
    started: list[subprocess.Popen]
    ranks: dict[int, int]
    logs: dict[int, Path]
    steppers: list[int]  # ranks that go through a loader, by its own number

    def texts(self, but: int) -> list[str]:
        """What the other ranks wrote; servers write through their launcher."""
        found = {
            path: path.read_text(errors="replace") for r, path in self.logs.items() if r != but
        }
        return list(found.values())


def _run(command: list[str], log: Path, more: dict[str, str]) -> subprocess.Popen:
    with log.open("wb") as errors:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        return subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, stdin=subprocess.DEVNULL,
            stdout=errors, stderr=errors, start_new_session=True,
        )  # fmt: skip


def _start(parts: str, folder: Path, way: str, memory: bool) -> _Job:
    job = _Job(folder, [], {}, {}, [])
    more, place, first = {"SAR_HOST_MEMORY": str(int(memory))}, parts, 0
    folder.mkdir()
    if way == SERVED:
        first = 2
        words = ["sar", "sample-server", parts, "--trainers", "2", "--timeout", str(LIMIT)]
        log = folder / "servers.err"
        job.started.append(_run(words, log, more))
        end = time.monotonic() + _READY_SECONDS
        while not (found := re.search(r" at (\S+)\n", log.read_text())):
            if time.monotonic() > end:
                raise TimeoutError(f"no servers: {log.read_text()}")
            time.sleep(0.05)
        place = found[1]
        job.logs |= {0: log, 1: log}
    size = 2 if way == SERVED else 3
    port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    for rank in range(size):
        log = folder / f"{rank}.err"
        words = ["benchmarks.tasks.sampling_jobs", place, str(folder), "--timeout", str(LIMIT)]
        made = _run(words, log, {**more, **port, "RANK": str(rank)})
        job.started.append(made)
        job.ranks[first + rank], job.logs[first + rank] = made.pid, log
    job.steppers = list(range(size))
    return job


def _find_servers(job: _Job) -> None:
    for pid in children(job.started[0].pid):
        rank = variable(pid, "RANK")
        if rank.isdigit():
            job.ranks[int(rank)] = pid


def _inject(parts: str, folder: Path, draw: random.Random) -> tuple[list[object], float] | None:
    """What was done to whom, whether all ended and were told, and after how long."""
    way, fault = draw.choice([LOCAL, SERVED]), draw.choice([KILL, STOP, RAISE])
    phase = STEPPING if fault == RAISE else draw.choice([STARTING, STEPPING])
    job = _start(parts, folder, way, draw.random() < 0.5)
    try:
        end = time.monotonic() + _READY_SECONDS
        while phase == STEPPING and not all((folder / f"goes-{r}").exists() for r in job.steppers):
            if time.monotonic() > end:
                return None
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 1.5 if phase == STEPPING else 4.0))
        if way == SERVED:
            _find_servers(job)
        able = [r for r in job.ranks if fault != RAISE or not (way == SERVED and r < 2)]
        victim = draw.choice(able)
        pid, first = job.ranks[victim], 2 if way == SERVED else 0
        if fault == RAISE:
            (folder / f"raise-{victim - first}").touch()
        elif not send(pid, signal.SIGKILL if fault == KILL else signal.SIGSTOP):
            return None
        begin = time.monotonic()
        stays = [pid] if fault == STOP and not (way == SERVED and victim < 2) else []
        others = [one for one in [*job.ranks.values()] if one not in stays]
        limit = LIMIT + SLACK + (30.0 if phase == STARTING else 0.0)
        while not _all_ended(job, others, stays) and time.monotonic() - begin < limit:
            time.sleep(0.05)
        seconds, ended = time.monotonic() - begin, _all_ended(job, others, stays)
        name = f"rank {victim}"
        if way == SERVED:
            name = f"server {victim}" if victim < 2 else f"trainer {victim - 2}"
        said = re.compile("a transform that raises" if fault == RAISE else rf"{name}\b")
        texts = job.texts(victim)
        named = all(map(said.search, texts))
        if not (ended and named):
            print(f"rank {victim}, the others said:", *(text[-1500:] for text in texts), sep="\n")
        return [way, phase, fault, ended, named], seconds
    finally:
        for pid in [*job.ranks.values(), *(one.pid for one in job.started)]:
            send(pid, signal.SIGKILL)
        for one in job.started:
            one.wait()


def _all_ended(job: _Job, others: list[int], stays: list[int]) -> bool:
    reaped = [one.poll() is not None for one in job.started if one.pid not in stays]
    return all(reaped) and not any(is_alive(pid) for pid in others)


@benchmark("sampling-faults", "faults")
def faults(options: Options) -> Report:
    """Ranks of loaders, trainers and servers that die, stop or raise, in any phase."""
    draw, rows, missed = random.Random(4), list[tuple[list[object], float]](), 0
    before = set(Path("/dev/shm").iterdir())
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        arrays = community_graph(300, 3000, seed=0, features=8, classes=3)
        cuts = {}
        for size in (2, 3):
            at = Path(name) / f"parts{size}"
            cuts[size] = str(write_partitions(arrays, np.arange(300) % size, at))
        while len(rows) < INJECTIONS and missed < INJECTIONS:
            number = len(rows) + missed
            state = draw.getstate()
            parts = cuts[2 if draw.choice([LOCAL, SERVED]) == SERVED else 3]
            draw.setstate(state)
            found = _inject(parts, Path(name) / str(number), draw)
            print(number, found, flush=True)
            rows += [] if found is None else [found]
            missed += found is None
    left = set(Path("/dev/shm").iterdir()) - before
    table = Table("By fault", ["way", "phase", "fault", "runs", "ended", "named", "longest s"])
    for key in sorted({tuple(map(str, row[:3])) for row, _ in rows}):
        same = [one for one in rows if tuple(map(str, one[0][:3])) == key]
        ended, named = (sum(bool(row[at]) for row, _ in same) for at in (3, 4))
        table.rows.append([*key, len(same), ended, named, max(seconds for _, seconds in same)])
    figures = [
        Figure("injections", len(rows), at_least=INJECTIONS),
        Figure("jobs that did not end in time", sum(not r[3] for r, _ in rows), at_most=0),
        Figure("named", sum(bool(r[4]) for r, _ in rows) / max(1, len(rows)), at_least=0.95),
        Figure("left in /dev/shm", len(left), at_most=0),
    ]
    return Report(figures, [table])
