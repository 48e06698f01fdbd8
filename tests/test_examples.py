"""Every example runs on two ranks and learns; the demo runs on a small graph."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sar.partition.generate import community_graph
from sar.partition.write import write_partitions

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["train_sage.py", "custom_udf_layer.py", "batch_norm.py", "mfg_training.py"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "MPLCONFIGDIR": "/nonexistent",  # matplotlib then caches in a temporary folder
}


def run(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON of 400 nodes in two parts; one of them has no training node."""
    graph = community_graph(400, 4000, seed=0, features=20)
    halves = torch.arange(400) % 2
    data = graph.node_data["_N"]
    data["train_mask"] = data["train_mask"] & (halves == 0)
    return write_partitions(graph, halves, tmp_path_factory.mktemp("parts"), "small")


@pytest.mark.system
@pytest.mark.parametrize("script", SCRIPTS)
def test_example_learns_on_two_ranks(script: str, parts: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = run(*launch, ROOT / "examples" / script, parts, cwd=tmp_path)
    losses = [float(value) for value in re.findall(r"loss (\S+)", out)]
    assert len(losses) >= 10 and losses[-1] < losses[0]


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == {*SCRIPTS, "demo.py"}
    readme = (ROOT / "examples/README.md").read_text()
    assert all(f"({script})" in readme for script in scripts)


@pytest.mark.system
def test_demo_on_a_small_graph(tmp_path: Path) -> None:
    """All of its steps; the pictures where matplotlib is installed. A small graph may lose."""
    pytest.importorskip("matplotlib")
    words = ["--nodes", "4000", "--edges", "60000", "--epochs", "30", "--out", "out"]
    out = run(ROOT / "examples/demo.py", *words, cwd=tmp_path)
    assert "beats the perceptron" in out
    for picture in ("learning.png", "memory.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
