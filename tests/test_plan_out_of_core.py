"""What is predicted of training out of core is what it takes: bytes, memory, its least."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness.graphs import bibliography, community

from sar.__main__ import main
from sar.plan import Costs, Turns

JOB = Path(__file__).parent / "harness" / "turns.py"
NODES, DEGREE, PARTS, WIDTH, CLASSES = 40_000, 5, 4, 128, 8
OWN = f"{Path(__file__).parent / 'harness' / 'own_library.py'}:Library"
COSTS = Costs(1e5, 1e3, 1e2, 0.1, 1e-6, 1e-8, [], [], [], 0.0, 0.0, 0.0, 1, 2e8, 1000)
LEAST = Turns(400 << 20, 410 << 20, 900_000_000, 300_000_000, 350_000_000, [(64, 3)] * 2, False)
MOST = Turns(900 << 20, 900 << 20, 0, 0, 0, [(64, 1)] * 2, False)


@pytest.fixture(scope="module")
def parts(partitioned: Any) -> str:
    graph = community(NODES, DEGREE * NODES, CLASSES, classes=CLASSES, features=WIDTH)
    return partitioned(graph, PARTS, "random")


@pytest.fixture(scope="module")
def library(partitioned: Any) -> str:
    return partitioned(bibliography(20_000, features=WIDTH), PARTS, "random")


@pytest.fixture(scope="module")
def small(partitioned: Any) -> str:
    return partitioned(community(600, 3600, CLASSES, classes=CLASSES, features=WIDTH), 2, "random")


@pytest.fixture(scope="module")
def found(parts: str, library: str, tmp_path_factory: Any) -> dict[str, Any]:
    """What the harness prints, by model."""
    folder = tmp_path_factory.mktemp("spill")
    done = subprocess.run(
        [sys.executable, JOB, folder, parts, "sage", parts, "gat", library, OWN],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(folder.iterdir()), "something is left"
    lines = map(json.loads, filter(lambda one: one.startswith("{"), done.stdout.splitlines()))
    return {one["model"]: one for one in lines}


@pytest.mark.timeout(220)
@pytest.mark.parametrize("name", ["sage", "gat"])
def test_bytes_and_memory_are_those_of_a_run(name: str, found: dict[str, Any]):
    plan, less, run = (found[name][one] for one in ("plan", "less", "run"))
    assert run["read"] > 10 << 20, run
    least, most = (one["read_bytes"] + one["written_bytes"] for one in (plan, less))
    assert 0.7 * least < run["read"] + run["written"] < 1.3 * most, found[name]
    assert plan["peak_bytes"] == pytest.approx(run["peak"], rel=0.1), found[name]
    assert not plan["sends"]


def test_models_of_ones_own_take_what_is_planned(found: dict[str, Any]):
    """On several types, with rows that each rank learns, and rows that travel."""
    plan, run = found[OWN]["plan"], found[OWN]["run"]
    assert plan["sends"]
    assert plan["peak_bytes"] == pytest.approx(run["peak"], rel=0.1), found[OWN]


def test_the_least_is_enough_and_half_of_it_is_not(found: dict[str, Any]):
    one = found["sage"]
    assert "error" not in one["least"], one
    assert "memory: got" in one["half"]["error"], one


def test_the_command_prints_what_is_predicted(parts: str, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr("sar.cli.plan_turns.measure_costs", lambda *_: COSTS)
    monkeypatch.setattr("sar.cli.plan_turns.predict_turns", lambda *_, **__: [LEAST, MOST, MOST])
    words = ["plan", parts, "--layers", "2", "--hidden", "64", "--out-of-core", "--memory", "1TiB"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "parts in turns" in out and "all in memory" in out and "1GB/s" in out
    assert "64 in 3 (2 sums)" in out and "random cut" not in out
    assert main([*words, "--json", "--disk", "500MB/s"]) == 0
    content = json.loads(capsys.readouterr().out)
    least = content["settings"]["least"]
    assert least["disk_seconds"] == pytest.approx(1.2e9 / 500e6) == least["seconds"]
    compute = PARTS * 0.1 + NODES * 1e-6 + DEGREE * NODES * 1e-8
    assert content["settings"]["--memory"]["seconds"] == pytest.approx(compute, rel=0.01)
    assert content["is_enough"] is True


def test_the_command_says_that_memory_is_too_little(parts: str, monkeypatch: Any, capsys: Any):
    monkeypatch.setattr("sar.cli.plan_turns.measure_costs", lambda *_: COSTS)
    monkeypatch.setattr("sar.cli.plan_turns.predict_turns", lambda *_, **__: [LEAST, MOST])
    assert main(["plan", parts, "--out-of-core", "--memory", "100MiB"]) == 0
    assert "100MiB is too little, expected at least 419,430,400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--out-of-core", "--disk", "fast"], "--disk: got 'fast', expected a rate like '1GB/s'"),
        (["--disk", "2GB/s"], "--disk: got a rate, expected --out-of-core as well"),
        (["--out-of-core", "--plot", "x.svg"], "--plot: got one and --out-of-core"),
        (["--out-of-core", "--hosts", "4"], "--hosts: got 4 and --out-of-core"),
    ],
)
def test_the_command_names_a_wrong_option(words: list[str], error: str, parts: str, capsys: Any):
    assert main(["plan", parts, *words]) != 0
    assert error in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_training_tells_too_little_before_it_starts(
    small: str, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.setattr("sar.cli.plan_turns._SMALL", 0)
    words = ["train", small, "--out-of-core", str(tmp_path / "spill"), "--memory", "100MiB"]
    assert main([*words, "--epochs", "1", "--layers", "2"]) != 0
    error = capsys.readouterr().err
    assert "--memory: got 104,857,600 bytes, the plan says" in error
    assert "bytes free in" in error
    assert not [*(tmp_path / "spill").glob("*")]


@pytest.mark.parametrize(("share", "told"), [(1.1, "are enough"), (0.8, "that may be too little")])
def test_training_tells_what_is_planned(
    share: float, told: str, small: str, tmp_path: Path, monkeypatch: Any, capsys: Any
):
    monkeypatch.setattr("sar.cli.plan_turns._SMALL", 0)
    monkeypatch.setattr("sar.cli.plan_turns.predict_turns", lambda *_, **__: [LEAST])
    monkeypatch.setattr("sar.cli.train.launch", lambda *_: None)
    memory = str(int(share * LEAST.memory))
    words = ["train", small, "--out-of-core", str(tmp_path), "--memory", memory]
    with pytest.warns(UserWarning, match=told) if share < 1 else nullcontext():
        assert main(words) == 0
    assert (told in capsys.readouterr().out) == (share > 1)
