"""Runs that end at any moment: every epoch that was done is in the files that grow with them."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.cluster import ROOT
from benchmarks.processes import children, send, variable
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from sar.partition.sources.generate import community_graph
from sar.partition.write import write_partitions

ENDS, EPOCHS, RANKS = 20, 60, 2
KILLED, RANK_KILLED = "launcher killed", "rank 0 killed"
INTERRUPTED, FULL = "interrupt", "full disk"
_DEADLINE = 180.0
_LINE, _HEADER = 270, 2000  # about the bytes of an epoch's line, and of the first one


@dataclass
class Ending:
    """A run that ended early, and what was wrong with its files.

    Attributes:
        told: epochs on the screen. written: epochs in the file. resumed: in the end.
    """

    way: str
    told: int
    written: int
    resumed: int
    wrong: list[str]


class Run:
    """`sar train` on two ranks, with its files in a folder."""

    def __init__(self, parts: str, run: Path, disk: Path) -> None:
        self.parts, self.run, self.lines = parts, run, disk / "out.jsonl"
        self.json = disk / "out.json"

    def start(self, limit: int | None = None) -> subprocess.Popen:
        """Goes on from its checkpoint, if there is one. ``limit``: bytes of a file."""
        words = ["train", self.parts, "--hidden", "8", "--dropout", "0.3", "--timeout", "20"]
        words += ["--epochs", str(EPOCHS), "--checkpoint", str(self.run), "--checkpoint-every", "7"]
        words += ["--json", str(self.json), "--mfgs", "off"]
        words += ["--resume"] * (self.run / "checkpoint.pt").exists()

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        return subprocess.Popen(
            [sys.executable, "-m", "sar", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare,
        )  # fmt: skip

    def epochs(self) -> list[tuple[int, float, float]]:
        """Number, loss and metric of each line; raises ``ValueError`` for a damaged one."""
        if not self.lines.exists():
            return []
        found = [json.loads(line) for line in self.lines.read_text().splitlines()[1:]]
        return [(one["epoch"], one["loss"], one["val_accuracy"]) for one in found]


@benchmark("result-faults", "faults")
def faults(options: Options) -> Report:
    """`sar train` that is killed, interrupted or out of disk at any moment: no epoch is lost."""
    draw, endings = random.Random(11), list[Ending]()
    with tempfile.TemporaryDirectory(prefix="results-") as name:
        folder = Path(name)
        graph = community_graph(300, 2400, 3, classes=3, features=8)
        parts = str(write_partitions(graph, np.arange(300) % RANKS, folder / "parts", "g"))
        whole = Run(parts, folder / "run", folder / "whole")
        _, errors = whole.start().communicate(timeout=_DEADLINE)
        expected = whole.epochs()
        if len(expected) != EPOCHS:
            raise RuntimeError(errors)
        ways: dict[str, Callable] = {
            KILLED: _kill_launcher, RANK_KILLED: _kill_rank, INTERRUPTED: _interrupt, FULL: _fill,
        }  # fmt: skip
        for number in range(ENDS):
            way = list(ways)[number % len(ways)]
            at = folder / str(number)
            at.mkdir()
            with _disk(at / "disk", way == FULL) as disk:
                run = Run(parts, at / "run", disk)
                ending = _end(way, run, ways[way], expected, draw)
            print(number, ending, flush=True)
            endings.append(ending)
    return _report(endings)


def _end(
    way: str,
    run: Run,
    fault: Callable[[Run, random.Random], tuple[str, str]],
    expected: list[tuple[int, float, float]],
    draw: random.Random,
) -> Ending:
    """End a run, look at its files, and let it go on."""
    output, errors = fault(run, draw)
    lines = [line.removeprefix("epoch ").partition(f"/{EPOCHS}") for line in output.splitlines()]
    told = max((int(epoch) for epoch, slash, _ in lines if slash), default=0)
    wrong, written = list[str](), list[tuple[int, float, float]]()
    try:
        written = run.epochs()
    except ValueError as error:
        wrong.append(f"a damaged line: {error}")
    if written != expected[: len(written)]:
        wrong.append("other epochs than in an undisturbed run")
    if len(written) < told:
        wrong.append(f"{told} epochs told of, {len(written)} written")
    if way == FULL and not (str(run.lines) in errors and "could not be written" in errors):
        wrong.append(f"the file is not named: {errors.strip().splitlines()[-1:]}")
    _, errors = run.start().communicate(timeout=_DEADLINE)
    resumed = run.epochs()
    if resumed != expected:
        wrong.append(f"resumed, other epochs: {errors.strip().splitlines()[-1:]}")
    if len(json.loads(run.json.read_text())["epochs"]) != EPOCHS:
        wrong.append("resumed, another final file")
    return Ending(way, told, len(written), len(resumed), wrong)


def _kill_launcher(run: Run, draw: random.Random) -> tuple[str, str]:
    return _signalled(run, draw, lambda pid: send(pid, signal.SIGKILL))


def _interrupt(run: Run, draw: random.Random) -> tuple[str, str]:
    return _signalled(run, draw, lambda pid: send(pid, signal.SIGINT))


def _kill_rank(run: Run, draw: random.Random) -> tuple[str, str]:
    def kill(launcher: int) -> None:
        for pid in children(launcher):
            if variable(pid, "RANK") == "0":
                send(pid, signal.SIGKILL)

    return _signalled(run, draw, kill)


def _signalled(run: Run, draw: random.Random, fault: Callable[[int], object]) -> tuple[str, str]:
    """A moment after a random number of lines; with the header alone, or none, as it starts."""
    lines, end = draw.randrange(EPOCHS - 5), time.monotonic() + _DEADLINE
    process = run.start()
    while lines > 4 and time.monotonic() < end and process.poll() is None:
        if run.lines.exists() and run.lines.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.1 if lines > 4 else 10.0))
    fault(process.pid)
    return process.communicate(timeout=_DEADLINE)


def _fill(run: Run, draw: random.Random) -> tuple[str, str]:
    """The disk has room for a random number of lines; it is free again when the run has ended."""
    room = _HEADER + draw.randrange((EPOCHS - 10) * _LINE)
    disk = run.lines.parent
    if not os.path.ismount(disk):
        return run.start(limit=max(room, 1 << 14)).communicate(timeout=_DEADLINE)
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(b"x" * (free - room))
    try:
        return run.start().communicate(timeout=_DEADLINE)
    finally:
        filler.unlink()


@contextmanager
def _disk(folder: Path, small: bool) -> Iterator[Path]:
    """A folder, on a disk of its own where that is wanted and this user may mount one."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    mounted = small and subprocess.run(words, capture_output=True, check=False).returncode == 0
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def _report(endings: list[Ending]) -> Report:
    table = Table("By how runs end", ["way", "runs", "epochs written", "wrong"])
    for way in sorted({one.way for one in endings}):
        same = [one for one in endings if one.way == way]
        written = ", ".join(str(one.written) for one in same)
        table.rows.append([way, len(same), written, sum(bool(one.wrong) for one in same)])
    figures = [
        Figure("runs", len(endings), at_least=ENDS),
        Figure("runs that ended in an epoch", sum(0 < o.written < EPOCHS for o in endings)),
        Figure("runs with anything wrong", sum(bool(one.wrong) for one in endings), at_most=0),
    ]
    return Report(figures, [table])
