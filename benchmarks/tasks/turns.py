"""Training out of core that is killed again and again, and what it leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from dgl.nn import SAGEConv
from torch import Tensor, nn

import sar
from benchmarks.cluster import ROOT
from benchmarks.processes import children, is_alive, send

STARTING, TRAINING, SAVING, EVALUATING, ENDING = (
    "starting", "training", "saving", "evaluating", "ending",
)  # fmt: skip
PHASES = (STARTING, TRAINING, TRAINING, SAVING, EVALUATING)  # and at last ENDING
_DOES = "SAR_BENCH_DOES"  # a file that says what the model does
_PATIENCE, _SECONDS_TO_DIE = 120.0, 5.0


class Net(nn.Module):
    """SAGE with batch norm and dropout that tells whether it trains."""

    def __init__(self, in_feats: int, out_feats: int, hidden: int = 64) -> None:
        super().__init__()
        widths = [in_feats, hidden, hidden, out_feats]
        self.layers = nn.ModuleList(
            SAGEConv(*pair, "mean") for pair in zip(widths, widths[1:], strict=False)
        )
        self.norms = nn.ModuleList(sar.DistributedBN1D(hidden) for _ in widths[2:])

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        if _DOES in os.environ:
            Path(os.environ[_DOES]).write_text(TRAINING if self.training else EVALUATING)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = F.dropout(F.relu(norm(layer(graph, x))), 0.3, self.training)
        return self.layers[-1](graph, x)


@dataclass
class Chain:
    """A run that is killed, resumed, killed again, and that ends.

    Attributes:
        folder: of all that it writes.
        epochs: that it trains.
        memory: bytes of its process.
        wrong: what is not as it should be, in words.
        phases: in which it was killed.
    """

    parts: str
    folder: Path
    epochs: int
    memory: int
    wrong: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("spill", "run", "tmp"):
            (self.folder / name).mkdir(parents=True)
        self.saved = self.folder / "run" / "checkpoint.pt"

    def start(self) -> subprocess.Popen:
        """``sar train``, that goes on where something is saved."""
        for name in ("does", "report.json"):
            (self.folder / name).unlink(missing_ok=True)
        words = [
            "train", self.parts, "--model", f"{__name__}:Net", "--epochs", str(self.epochs),
            "--no-progress", "--checkpoint", str(self.saved.parent), "--checkpoint-every", "1",
            "--out-of-core", str(self.folder / "spill"), "--memory", str(self.memory),
            "--json", str(self.folder / "report.json"), *["--resume"] * self.saved.exists(),
        ]  # fmt: skip
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen(
            [sys.executable, "-m", "sar", *words],
            env={**os.environ, **own, _DOES: str(self.folder / "does")},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def finish(self) -> dict[str, Any]:
        """Let it end; what it saved then."""
        last = self.start()
        try:
            _, errors = last.communicate(timeout=_PATIENCE)
        finally:
            last.kill()
        if last.returncode:
            self.wrong.append(f"the last run ended with {last.returncode}: {errors[-500:]}")
            return {}
        found = [one for name in ("spill", "run", "tmp") for one in (self.folder / name).iterdir()]
        left = [one for one in found if one != self.saved and not one.match("torchinductor*")]
        self.wrong += [f"left at the end: {one}" for one in left]
        return torch.load(self.saved, weights_only=True)

    def moved(self) -> int:
        """Bytes that the run that ended read and wrote."""
        told = json.loads((self.folder / "report.json").read_text())["out_of_core"]
        return told["read_bytes"] + told["written_bytes"]

    def kill(self, phase: str, draw: random.Random) -> bool:
        """Kill it in a phase, by its launcher, its process, or both; False where it ended before"""
        run = self.start()
        try:
            if not self._reach(phase, run, draw):
                return False
            below = [one for one in children(run.pid) if is_alive(one)]
            ours = [run.pid, *below]
            for pid in draw.choice([ours, ours[:1], ours[-1:]]):
                send(pid, signal.SIGKILL)
            _, errors = run.communicate(timeout=_PATIENCE)
            if not run.returncode:
                return False
            if run.returncode > 0 and "SIGKILL" not in errors:
                self.wrong.append(f"{phase}: status {run.returncode}, said {errors[-500:]}")
            self._look(below)
        finally:
            for pid in (run.pid, *children(run.pid)):
                send(pid, signal.SIGKILL)
            run.communicate()
        self.phases.append(phase)
        return True

    def _reach(self, phase: str, run: subprocess.Popen, draw: random.Random) -> bool:
        """Return in a random moment of a phase; False where the run ends before."""
        if phase == STARTING:
            time.sleep(draw.uniform(0.0, 4.0))
            return run.poll() is None
        does, partial = self.folder / "does", self.saved.with_name("checkpoint.pt.partial")
        for _ in range(draw.choice([1, 1, 2, 3])):  # epochs
            if phase == SAVING:
                found = _wait(run, partial.exists, 0.0)
            elif phase == ENDING:
                found = _wait(run, (self.folder / "report.json").exists, 0.0)
            else:
                found = _wait(run, lambda: does.exists() and does.read_text() == phase, 0.001)
            if not found:
                return False
            if phase in (SAVING, ENDING):
                return True
            time.sleep(draw.uniform(0.0, 0.3))
        return run.poll() is None

    def _look(self, below: list[int]) -> None:
        """After a kill: no process, and no file but what the next start takes over."""
        last = time.monotonic() + _SECONDS_TO_DIE
        while (alive := [pid for pid in below if is_alive(pid)]) and time.monotonic() < last:
            time.sleep(0.01)
        self.wrong += [f"process {pid} stays behind" for pid in alive]
        files = [one for one in (self.folder / "spill").rglob("*") if not one.is_dir()]
        self.wrong += [f"left in the folder: {one}" for one in files]


def _wait(run: subprocess.Popen, ready: Callable[[], bool], pause: float) -> bool:
    last = time.monotonic() + _PATIENCE
    while not ready():
        if run.poll() is not None or time.monotonic() > last:
            return False
        time.sleep(pause)
    return True


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ, but for what epochs took."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [where]
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        keys = [key for key in one if key != "seconds"]
        return [x for key in keys for x in differences(one[key], other[key], f"{where} {key}")]
    if isinstance(one, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [x for at, pair in pairs for x in differences(*pair, f"{where} {at}")]
    return [] if one == other else [f"{where}: {one!r}, not {other!r}"]
