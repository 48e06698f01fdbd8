"""Training out of core that is killed, interrupted or short of memory: it goes on, or says why."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.graphs import community
from harness.nursery import Child, Nursery

import sar
from sar.__main__ import read_words
from sar.errors import SarError

NODES, PARTS, EPOCHS = 24_000, 6, 6
PATIENCE = 60.0

SCRIPT = """
import json, os, signal, sys, time, torch, sar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
at, ended = [], []

def keep(part):
    rows = [torch.full((1 << 20,), float(part.part_id)) for _ in range(4)]
    print("goes", flush=True)
    try:
        while True:
            if "--interrupt" in sys.argv and part.part_id == 5 and not at:
                at.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)  # then the last that a collective waits for
            sar.global_mean(rows[0])
    finally:
        time.sleep(0.1)
        ended.append(part.part_id)

try:
    sar.run_parts(sys.argv[1], keep, directory=sys.argv[2])
except KeyboardInterrupt:
    seconds, stopped = time.monotonic() - at[0], len(ended)
    files = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    files = [one for one in files if sys.argv[2] in one]
    again = sar.run_parts(sys.argv[1], lambda part: part.part_id, directory=sys.argv[2])
    told = {"stopped": stopped, "files": files, "again": again}
    print(json.dumps({"seconds": seconds, "told": told}))
    raise
"""

LOADS = f"""
import json, re, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import sar
from test_out_of_core_faults import load_in_a_worker

taken = int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
options = dict(directory=sys.argv[2], memory=taken + (60 << 20))
print(json.dumps(sar.run_parts(sys.argv[1], load_in_a_worker, **options)))
"""


@pytest.fixture(scope="module")
def parts(partitioned: Any) -> str:
    return partitioned(community(NODES, 6 * NODES, 8, classes=8, features=32), PARTS)


class Run:
    """``sar train --out-of-core`` in ``folder``, as its one process does it."""

    def __init__(self, nursery: Nursery, parts: str, folder: Path) -> None:
        self.nursery, self.parts, self.folder = nursery, parts, folder
        self.saved, self.spill = folder / "run" / "checkpoint.pt", folder / "spill"
        self.report = folder / "report.json"

    def start(self, memory: int, epochs: int = EPOCHS) -> Child:
        words = [
            "train", self.parts, "--hidden", "256", "--batch-norm", "--dropout", "0.3",
            "--epochs", epochs, "--checkpoint", self.saved.parent, "--checkpoint-every", "1",
            "--no-progress", "--debug", "--json", self.report, "--out-of-core", self.spill,
            "--memory", memory, *["--resume"] * self.saved.exists(),
        ]  # fmt: skip
        args = json.dumps(vars(read_words([str(word) for word in words])))
        environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        return self.nursery.start(["-m", "sar.cli.worker", "train", args], environment)

    def finish(self, memory: int) -> dict[str, Any]:
        """What it has saved at the end."""
        child = self.start(memory)
        assert child.wait(PATIENCE) == 0, child.text("err")[-2000:]
        assert [*self.spill.iterdir(), *self.saved.parent.iterdir()] == [self.saved]
        return torch.load(self.saved, weights_only=True)

    def moved(self) -> int:
        told = json.loads(self.report.read_text())["out_of_core"]
        return min(told["read_bytes"], told["written_bytes"])


@pytest.fixture(scope="module")
def least(nursery: Nursery, parts: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Little memory that is enough, also for more epochs."""
    memory = 1 << 20
    for _ in range(6):
        child = Run(nursery, parts, tmp_path_factory.mktemp("least")).start(memory, epochs=1)
        if child.wait(PATIENCE) == 0:
            return memory + (16 << 20)
        found = re.search(r"memory: got [\d,]+ bytes, part .* needs ([\d,]+)", child.text("err"))
        assert found, child.text("err")[-2000:]
        memory = int(found[1].replace(",", "")) + (48 << 20)
    raise AssertionError(f"too little for the sixth time: {memory:,} bytes")


def wait(child: Child, ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        assert child.returncode is None, child.text("err")[-2000:]
        assert time.monotonic() < end, "it does not get there"


@pytest.mark.timeout(240)
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    nursery: Nursery, parts: str, least: int, tmp_path: Path
) -> None:
    """In training, and while a checkpoint is written."""
    whole, killed = (Run(nursery, parts, tmp_path / name) for name in ("whole", "killed"))
    want = whole.finish(least)
    assert whole.moved() > 1 << 20
    for moment in (killed.saved, killed.saved.with_name("checkpoint.pt.partial")):
        child = killed.start(least)
        try:
            wait(child, moment.exists)
        finally:
            child.kill()
        assert child.returncode == -signal.SIGKILL
        assert [one for one in killed.spill.rglob("*") if not one.is_dir()] == []
    assert torch.load(killed.saved, weights_only=True)["epoch"] < EPOCHS
    assert unlike(killed.finish(least), want) == []


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two checkpoints differ, but for what epochs took."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [
            x
            for key in one
            if key != "seconds"
            for x in unlike(one[key], other[key], f"{where} {key}")
        ]
    if isinstance(one, (list, tuple)):
        return [x for pair in zip(one, other, strict=True) for x in unlike(*pair, where)]
    return [] if one == other else [where]


def start_script(nursery: Nursery, parts: str, tmp_path: Path, *words: str) -> Child:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    child = nursery.start([str(script), parts, str(tmp_path / "spill"), *words], dict(os.environ))
    assert child.line(PATIENCE) == "goes", child.text("err")[-2000:]
    return child


def test_an_interrupt_ends_a_script_and_leaves_nothing(
    nursery: Nursery, parts: str, tmp_path: Path
) -> None:
    """No part that still runs, no file and no lock, as the next run in the same process shows."""
    child = start_script(nursery, parts, tmp_path, "--interrupt")
    try:
        child.wait(PATIENCE)
    finally:
        child.kill()
    assert "KeyboardInterrupt" in child.text("err")
    said = json.loads(child.text("out").splitlines()[-1])
    assert said["told"] == {"stopped": PARTS, "files": [], "again": [*range(PARTS)]}
    assert said["seconds"] < 5
    assert list((tmp_path / "spill").iterdir()) == []


def test_a_folder_is_free_when_its_run_was_killed(
    nursery: Nursery, parts: str, tmp_path: Path
) -> None:
    child = start_script(nursery, parts, tmp_path)
    try:
        with pytest.raises(SarError, match="in use by another run"):
            sar.run_parts(parts, lambda part: part.part_id, directory=tmp_path / "spill")
    finally:
        child.kill()
    assert sar.run_parts(parts, lambda part: part.part_id, directory=tmp_path / "spill") == [
        *range(PARTS)
    ]


class Sums(torch.utils.data.Dataset):
    """Sums of rows that were out at the fork, once ``ready``, beside more than there is room for.

    An item's rows are read by numpy, which asks nobody, or by torch.
    """

    def __init__(self, rows: list[torch.Tensor], ready: Any) -> None:
        self.rows, self.ready = rows, ready

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> float:
        assert self.ready.wait(PATIENCE)
        kept = push_out()
        row = self.rows[item].numpy() if item % 2 else self.rows[item]
        del kept
        return float(row.mean())


def push_out() -> list[torch.Tensor]:
    """More rows than there is room for."""
    return [torch.full((1 << 20,), 7.0) for _ in range(16)]


def load_in_a_worker(part: Any) -> list[float]:
    """What a forked worker finds in this part's rows of before, and whether they stay as they are
    when both have written on."""
    rows = [torch.full((1 << 20,), float(part.part_id + more)) for more in range(4)]
    sar.current_group().turn()
    context = torch.multiprocessing.get_context("fork")
    ready = context.Event()
    more = push_out()
    loader = torch.utils.data.DataLoader(
        Sums(rows, ready), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    coming = iter(loader)
    rows.pop()  # in this process
    for row in rows:
        row += 100
    more += push_out()
    ready.set()
    found = [float(one) for one in coming]
    sar.current_group().turn()
    assert all((one == part.part_id + more + 100).all() for more, one in enumerate(rows))
    assert all((one == 7).all() for one in more)
    return found


def test_a_loader_forks_workers(nursery: Nursery, parts: str, tmp_path: Path) -> None:
    """A worker reads what was there at the fork, and writes nothing into its parent's file."""
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    child = nursery.start([str(script), parts, str(tmp_path / "spill")], dict(os.environ))
    try:
        assert child.wait(PATIENCE) == 0, child.text("err")[-2000:]
    finally:
        child.kill()
    want = [[float(rank + more) for more in range(4)] for rank in range(PARTS)]
    assert json.loads(child.text("out")) == want


def test_a_folder_that_cannot_be_made_is_named(parts: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SarError, match=f"directory: got '{place}', where no file can be made"):
            sar.run_parts(parts, print, directory=place)


def fails_in_one_part(part: Any) -> None:
    if part.part_id == 2:
        raise KeyError("mine")
    sar.current_group().turn()


def test_an_error_names_its_part(parts: str, tmp_path: Path) -> None:
    with pytest.raises(KeyError) as caught:
        sar.run_parts(parts, fails_in_one_part, directory=tmp_path)
    assert getattr(caught.value, "__notes__", ["in part 2"]) == ["in part 2"]


def keep_and_fail(part: Any, kept: list[Any]) -> None:
    rows = torch.zeros(1 << 20)
    kept.append(weakref.ref(rows.untyped_storage()))
    sar.current_group().turn()
    raise ValueError(rows[0].item())


def test_a_failed_run_holds_no_tensor(parts: str, tmp_path: Path) -> None:
    """Its maps would hold the file, and so the room on the disk that the next try needs."""
    kept: list[Any] = []
    gc.disable()
    try:
        with suppress(ValueError):
            sar.run_parts(parts, keep_and_fail, (kept,), directory=tmp_path)
        assert len(kept) == PARTS
        assert all(one() is None for one in kept)
    finally:
        gc.enable()
