"""Cuts that are interrupted: what they leave is used once, where it fits, and then is gone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tasks.cuts import ENDS, Cut, end_and_resume, files_of, kept_cuts, start, write_plain
from sar.__main__ import main
from sar.partition import run

SMALL = "synthetic:nodes=300,edges=2000,features=3"
RANDOM = ("--method", "random")
Call = Callable[..., str]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture) -> Call:
    """`sar partition` into ``tmp_path/out``; what it prints."""

    def partition(*arguments: str, source: str = SMALL, status: int = 0) -> str:
        capsys.readouterr()
        words = [source, "--parts", "3", "--out", str(tmp_path / "out"), *arguments]
        assert main(["partition", *words]) == status
        return capsys.readouterr().out

    return partition


@pytest.fixture
def interrupted(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The same, interrupted when its cut is made."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def partition(*arguments: str, **options: str) -> str:
        with monkeypatch.context() as patched:
            patched.setattr(run, "write_partitions", interrupt)
            return call(*arguments, status=130, **options)

    return partition


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with every cut that is made."""
    made: list[object] = []
    assign = run.assign

    def count(*arguments: object, **options: object) -> object:
        made.append(arguments)
        return assign(*arguments, **options)

    monkeypatch.setattr(run, "assign", count)
    return made


def test_a_kept_cut_is_used_once(
    call: Call, interrupted: Call, cuts: list[object], tmp_path: Path
) -> None:
    call()
    whole = files_of(tmp_path / "out")
    for balance in ([], ["--balance", "edges,halo"]):
        interrupted("--overwrite", *balance)
        assert files_of(tmp_path / "out") == whole, "what is there stays until the end"
        assert sorted(os.listdir(tmp_path)) == ["out", "out.cut"]
        made = len(cuts)
        text = call("--overwrite", *balance)
        assert "resumed  the cut of a run that was interrupted" in text and len(cuts) == made
        assert (files_of(tmp_path / "out") == whole) == (not balance)
        assert os.listdir(tmp_path) == ["out"]
        assert "resumed" not in call("--overwrite", *balance) and len(cuts) == made + 1
        whole = files_of(tmp_path / "out")
    assert len(cuts) == 5


@pytest.mark.parametrize(
    "change",
    [
        ["--seed", "1"],
        ["--parts", "4"],
        ["--method", "random"],
        ["--balance", "edges"],
        ["--balance", "nodes"],
        ["--self-loops", "add"],
        ["--symmetrise"],
    ],
)
def test_other_options_make_no_use_of_it(
    change: list[str], call: Call, interrupted: Call, cuts: list[object], tmp_path: Path
) -> None:
    interrupted()
    kept = kept_cuts(tmp_path / "out")
    said = call(*change)
    if change == ["--symmetrise"]:  # so is the graph, and its edges are in that order already
        assert len(cuts) in (1, 2)
    else:
        assert len(cuts) == 2 and "resumed" not in said
    assert len(kept) == 1 and os.listdir(tmp_path) == ["out"], "no cut outlives a run that ends"


def test_another_graph_makes_no_use_of_it(
    call: Call, interrupted: Call, cuts: list[object], tmp_path: Path
) -> None:
    """Nor does the same file with one edge changed."""
    content = {"num_nodes": 60, "src": np.arange(60), "dst": np.arange(60) * 7 % 60}
    path = tmp_path / "g.npz"
    np.savez(path, **content)
    interrupted(source=str(path))
    content["dst"][7] += 1
    np.savez(path, **content)
    assert "resumed" not in call(source=str(path)) and len(cuts) == 2


def test_a_damaged_cut_is_made_again(
    call: Call, interrupted: Call, cuts: list[object], tmp_path: Path
) -> None:
    call(*RANDOM)
    whole = files_of(tmp_path / "out")
    interrupted("--overwrite", *RANDOM)
    (kept,) = kept_cuts(tmp_path / "out")
    content = kept.read_bytes()
    rng, used = np.random.default_rng(5), 0
    damaged = [b"", content[:-1], content[: len(content) // 2], b"\0" * len(content)]
    for at in rng.integers(0, len(content), 12):
        damaged.append(content[:at] + bytes([content[at] ^ int(rng.integers(1, 256))]))
        damaged[-1] += content[at + 1 :]
    for one in damaged:
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(one)
        used += "resumed" in call("--overwrite", *RANDOM)
        assert files_of(tmp_path / "out") == whole
        assert os.listdir(tmp_path) == ["out"]
    assert used <= 6, "a byte that nothing reads, of a date perhaps"
    wrong = {"parts": np.zeros(299, np.int16), "unbalanced": np.zeros(300, np.int16)}
    for arrays in (wrong, {"parts": np.zeros(300, np.float32)}):
        kept.parent.mkdir(exist_ok=True)
        np.savez(kept, **arrays)
        assert "resumed" not in call("--overwrite", *RANDOM)


def test_a_folder_of_that_name_that_is_somebody_elses(call: Call, tmp_path: Path) -> None:
    (tmp_path / "out.cut").mkdir()
    (tmp_path / "out.cut" / "mine.npz").write_text("mine")
    call()
    assert (tmp_path / "out.cut" / "mine.npz").read_text() == "mine"


@pytest.mark.system
def test_killed_again_and_again(tmp_path: Path) -> None:
    source = str(write_plain(tmp_path / "g", 4_000, 60_000))
    cut = Cut("new folder", [source, "--parts", "3", "--symmetrise", "--balance", "edges"])
    begin = time.monotonic()
    assert main(["partition", *cut.arguments, "--out", str(tmp_path / "whole")]) == 0
    cut.seconds, cut.whole = time.monotonic() - begin, files_of(tmp_path / "whole")
    ending = end_and_resume(cut, tmp_path / "run", 3, signal.SIGKILL, random.Random(2))
    assert ending.wrong == []


@pytest.mark.system
@pytest.mark.parametrize("number", list(ENDS))
def test_asked_to_end(number: signal.Signals, tmp_path: Path) -> None:
    """The files of the run are removed, the exit status tells of the signal."""
    source = str(write_plain(tmp_path / "g", 4_000, 60_000))
    out = tmp_path / "run" / "out"
    job = start([source, "--parts", "3", "--symmetrise"], out)
    while job.poll() is None and not list(tmp_path.glob("run/sar-*/*")):
        time.sleep(0.005)
    job.send_signal(number)
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == ENDS[number]
    assert not (tmp_path / "run").exists() or os.listdir(tmp_path / "run") in ([], ["out.cut"])
