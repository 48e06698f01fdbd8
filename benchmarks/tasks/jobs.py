"""Training jobs that something happens to: how they are started, hurt, and seen to end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT, free_port
from benchmarks.forks import Fork
from benchmarks.hosts import Hosts
from benchmarks.processes import children, is_alive, rank_of, send

LIMIT = 6.0  # seconds of the ranks' timeout
SLACK = 8.0  # after it
RANKS = 3
SERVERS = TRAINERS = 2
STARTING, MEETING, MAKING, TRAINING = "starting", "meeting", "making", "training"
LAUNCHER, ALONE, TORCHRUN, HOSTS = "launcher", "alone", "torchrun", "hosts"
LOADER, SERVED, SERVERS_LAUNCHER = "loader", "served", "servers' launcher"
_READY_SECONDS = 90.0
_PAUSE = 0.05


@dataclass
class Job:
    """Ranks that train for ever, and who started them.

    Attributes:
        way: ``launcher`` is ``sar train``, ``alone`` ranks that find each other, ``torchrun``;
            ``loader`` ranks that find each other and sample, ``served`` servers and trainers that
            do, ``servers' launcher`` is ``sar sample-server`` beside trainers.
        phase: in which something happens to it.
        memory: whether ranks of one host may read each other's memory.
        late: a rank that starts only when :meth:`start_late` is called.
        folder: of its checkpoint and of what it says.
        timeout: of its ranks.
        whom: the fault is for.
    """

    parts: str
    folder: Path
    way: str
    phase: str = TRAINING
    memory: bool = True
    late: int | None = None
    hosts: Hosts | None = None
    timeout: float = LIMIT
    whom: str = ""
    started: list[Any] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)

    def start(self) -> None:
        """Start it; the processes of ranks become known with :meth:`find`."""
        self.folder.mkdir()
        self._port = free_port()
        if self.way == LAUNCHER:
            self._run("launcher", [*_PYTHON, *self._train()], {})
        elif self.way == SERVERS_LAUNCHER:
            address = f"127.0.0.1:{self._port}"
            self._run("launcher", [*_PYTHON, *self._serve(), "--address", address], {})
            for rank in range(SERVERS, SERVERS + TRAINERS):
                self._start_rank(rank)
        elif self.way == TORCHRUN:
            torchrun = [*_PYTHON, "torch.distributed.run", "--nproc-per-node", str(RANKS)]
            port = ["--master-addr", "127.0.0.1", "--master-port", str(self._port)]
            self._run("launcher", [*torchrun, *port, "-m", *self._train()], {})
        else:
            for rank in range(self.size):
                if rank != self.late:
                    self._start_rank(rank)

    def start_late(self) -> None:
        """The rank that was held back."""
        if self.late is not None and self.way in (ALONE, HOSTS):
            self._start_rank(self.late)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return SERVERS + TRAINERS if self.way in (SERVED, SERVERS_LAUNCHER) else RANKS

    def title(self, rank: int) -> str:
        """What others call a rank."""
        if self.way not in (SERVED, SERVERS_LAUNCHER):
            return f"rank {rank}"
        return f"server {rank}" if rank < SERVERS else f"trainer {rank - SERVERS}"

    def find(self) -> dict[int, int]:
        """Processes of the ranks that run, by rank."""
        if self.way in (LAUNCHER, TORCHRUN, SERVERS_LAUNCHER):
            for pid in children(self.started[0].pid):
                if (rank := rank_of(pid)) is not None:
                    self.ranks[rank] = pid
        return self.ranks

    def is_training(self) -> bool:
        return self._have("goes", (self.folder / "run" / "checkpoint.pt").exists)

    def have_met(self) -> bool:
        """Whether all ranks that tell have met the others."""
        return self._have("met", self.is_training)

    def _have(self, what: str, else_: Callable[[], bool]) -> bool:
        """Whether each rank that samples has told; for others, what ``else_`` says."""
        if self.way not in (LOADER, SERVED, SERVERS_LAUNCHER):
            return else_()
        count = RANKS if self.way == LOADER else TRAINERS
        return all((self.folder / f"{what}-{rank}").exists() for rank in range(count))

    def words_of(self, name: str) -> str:
        """The last line that a rank, or the launcher, wrote."""
        text = (self.folder / f"{name}.err").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "error:" in line), (lines or [""])[-1])

    def all_ended(self, but: Sequence[int] = ()) -> bool:
        """Whether no process of it runs but those, which are stopped for good."""
        reaped = [one.poll() is not None for one in self.started if one.pid not in but]
        gone = [not is_alive(pid) for pid in self.ranks.values() if pid not in but]
        return all([*reaped, *gone])

    def end(self) -> None:
        """Nothing of it is left after this."""
        for pid in [*self.ranks.values(), *(one.pid for one in self.started)]:
            send(pid, signal.SIGKILL)
        for one in self.started:
            one.wait()

    def _start_rank(self, rank: int) -> None:
        where = {"MASTER_ADDR": "127.0.0.1"} if self.hosts is None else self.hosts.environment()
        words, place, size = self._train(), rank, self.size
        if self.way in (SERVED, SERVERS_LAUNCHER):
            is_server = rank < SERVERS
            words = self._serve() if is_server else self._sample(f"127.0.0.1:{self._port}")
            place, size = (rank, SERVERS) if is_server else (rank - SERVERS, TRAINERS)
        elif self.way == LOADER:
            words = self._sample(self.parts)
        own = {"RANK": str(place), "WORLD_SIZE": str(size), "MASTER_PORT": str(self._port)}
        if self.hosts is None:
            log = self.folder / f"{rank}.err"
            made: Any = Fork(words, {**self._environment(), **where, **own}, log)
            self.started.append(made)
        else:
            before = [*self.hosts.command(rank), *_PYTHON]
            made = self._run(str(rank), [*before, *words], {**where, **own})
        self.ranks[rank] = made.pid  # `ip netns exec` becomes the command

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
        return {**os.environ, **own, "SAR_HOST_MEMORY": str(int(self.memory))}

    def _run(self, name: str, command: list[str], more: dict[str, str]) -> subprocess.Popen:
        with open(self.folder / f"{name}.err", "wb") as errors:
            made = subprocess.Popen(
                command,
                env={**self._environment(), **more},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.started.append(made)
        return made

    def _serve(self) -> list[str]:
        words = ["sar", "sample-server", self.parts, "--trainers", str(TRAINERS)]
        return [*words, "--timeout", str(self.timeout)]

    def _sample(self, place: str) -> list[str]:
        """Of ranks that sample, beside servers or with parts of their own."""
        words = ["benchmarks.tasks.sampling_jobs", place, str(self.folder)]
        return [*words, "--timeout", str(self.timeout)]

    def _train(self) -> list[str]:
        return [
            "sar", "train", self.parts, "--hidden", "8", "--epochs", "100000000", "--no-progress",
            "--timeout", str(self.timeout), "--checkpoint", str(self.folder / "run"),
            "--checkpoint-every", "1",
        ]  # fmt: skip


_PYTHON = [sys.executable, "-m"]


def reach(job: Job, victims: Sequence[int], draw: random.Random) -> bool:
    """Return in a random moment of its phase, with the victims known; whether it was reached."""
    end = time.monotonic() + _READY_SECONDS

    def wait(ready: Callable[[], bool]) -> bool:
        while not ready():
            if time.monotonic() > end or job.started[0].poll() is not None:
                return False
            time.sleep(_PAUSE)
        return True

    if not wait(lambda: set(victims) <= job.find().keys()):
        return False
    if job.phase == STARTING:
        time.sleep(draw.uniform(0.0, 3.0))
        return True
    if job.phase == MAKING:
        found = wait(job.have_met)
        time.sleep(draw.uniform(0.0, 0.5))
        return found
    if job.phase == TRAINING:
        found = wait(job.is_training)
        time.sleep(draw.uniform(0.0, 1.5))
        return found
    found = wait(lambda: set(job.find()) >= set(range(RANKS)) - {job.late})
    others = [pid for rank, pid in job.ranks.items() if rank != job.late]
    held = job.ranks.get(job.late) if job.late is not None else None
    if held is not None and job.way in (LAUNCHER, TORCHRUN):
        send(held, signal.SIGSTOP)  # while it imports
    found = found and wait(lambda: all(listens(pid, job) for pid in others))
    time.sleep(1.0 + draw.uniform(0.0, 0.5))  # they have connected to the store as well
    if held is not None and job.way in (LAUNCHER, TORCHRUN):
        send(held, signal.SIGCONT)
    return found


def listens(pid: int, job: Job) -> bool:
    """Whether a process has a port that takes connections."""
    before = [] if job.hosts is None else ["nsenter", "-t", str(pid), "-n"]
    done = subprocess.run([*before, "ss", "-Hltnp"], capture_output=True, text=True, check=False)
    return f"pid={pid}," in done.stdout
