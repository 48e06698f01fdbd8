"""Every example runs on two ranks and learns; the demo runs on a small graph."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from harness.failures import assert_no_mistakes
from harness.nursery import Child, Nursery

from sar.partition.sources.generate import bibliography_graph, community_graph
from sar.partition.write import write_partitions

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "train_sage.py",
    "custom_udf_layer.py",
    "batch_norm.py",
    "mfg_training.py",
    "gat.py",
    "appnp.py",
    "sign.py",
    "correct_and_smooth.py",
    "link_prediction.py",
]
SAMPLED = [
    "sampled_sage.py",
    "sampled_pyg.py",
    "sampled_links.py --epochs=12",
    "sampled_temporal.py",
]
SAMPLED_HETERO, SERVED = "sampled_hetero.py", "server_client.py"  # fmt: skip
HETERO = "rgcn_hetero.py"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "MPLCONFIGDIR": "/nonexistent",  # matplotlib then caches in a temporary folder
}


# Runs one example after another in this process, each with a rendezvous port of its own.
DRIVER = """
import os, runpy, sys
parts, *jobs = sys.argv[1:]
for job in jobs:
    command, os.environ["MASTER_PORT"] = job.rsplit(":", 1)
    script, *words = command.split(" --")
    print("==", os.path.basename(script), flush=True)
    sys.argv = [script, parts, *("--" + word for word in words)]
    runpy.run_path(script, run_name="__main__")
"""


def run(*words: str | Path, cwd: Path) -> str:
    """What `python words...` prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert_no_mistakes(done.stderr)
    return done.stdout


def free_ports(count: int) -> list[int]:
    """Ports that stay free until a script listens: none that the system lends to connections."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            ports += [port] if port not in ports else []
    return ports


def wait_for_all(children: list[Child], seconds: float) -> None:
    """After `seconds`, or 5 s after one has failed, those that still run are killed."""
    end = time.monotonic() + seconds
    while any(child.returncode is None for child in children):
        if any(child.returncode for child in children):
            end = min(end, time.monotonic() + 5)
        time.sleep(0.05)
        if time.monotonic() > end:
            for child in children:
                child.kill()


def run_two_ranks(nursery: Nursery, scripts: list[str], parts: Path, cwd: Path) -> str:
    """What rank 0 prints for all scripts; two processes for all of them."""
    names = [f"{ROOT / 'examples' / script}" for script in scripts]
    jobs = [f"{name}:{port}" for name, port in zip(names, free_ports(len(names)))]
    driver = cwd / "driver.py"
    driver.write_text(DRIVER)
    ranks: list[Child] = []
    try:
        for rank in range(2):
            env = {**ENVIRONMENT, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
            ranks.append(nursery.start([str(driver), str(parts), *jobs], env, cwd))
        wait_for_all(ranks, seconds=100)
        texts = [rank.text("out") + rank.text("err") for rank in ranks]
        codes = [rank.returncode for rank in ranks]
        assert codes == [0, 0], "\n".join(text[-3000:] for text in texts)
        assert_no_mistakes("".join(texts))
        return ranks[0].text("out")
    finally:
        for rank in ranks:
            rank.kill()


def assert_learned(output: str) -> None:
    losses = [float(value) for value in re.findall(r"loss (\S+)", output)]
    assert len(losses) >= 10 and losses[-1] < losses[0], output


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON of 400 nodes in two parts; one of them has no training node."""
    graph = community_graph(400, 4000, seed=0, features=20)
    halves = torch.arange(400) % 2
    data = graph.node_data["_N"]
    data["train_mask"] = data["train_mask"] & (halves == 0)
    return write_partitions(graph, halves, tmp_path_factory.mktemp("parts"), "small")


@pytest.mark.system
def test_example_under_torchrun(parts: Path, tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert_learned(run(*launch, ROOT / "examples" / SCRIPTS[0], parts, cwd=tmp_path))


@pytest.mark.system
def test_other_examples_on_two_ranks(parts: Path, tmp_path: Path, nursery: Nursery) -> None:
    output = run_two_ranks(nursery, SCRIPTS[1:], parts, tmp_path)
    sections = output.split("== ")[1:]
    assert len(sections) == len(SCRIPTS) - 1
    for section in sections:
        assert_learned(section)


@pytest.mark.system
def test_rgcn_on_the_graph_and_on_blocks(tmp_path: Path, nursery: Nursery) -> None:
    """Both compute the same losses, to the printed digits."""
    graph = bibliography_graph(200)
    halves = torch.arange(graph.total_nodes) % 2
    parts = write_partitions(graph, halves, tmp_path / "parts")
    output = run_two_ranks(nursery, [HETERO, f"{HETERO} --mfgs"], Path(parts), tmp_path)
    whole, blocks = output.split("== ")[1:]
    assert_learned(whole)
    losses = [[float(x) for x in re.findall(r"loss (\S+)", text)] for text in (whole, blocks)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)


@pytest.mark.system
def test_sampled_examples(parts: Path, tmp_path: Path, nursery: Nursery) -> None:
    """One of the ranks has no seed; the mini-batches of the other train the model."""
    output = run_two_ranks(nursery, SAMPLED, parts, tmp_path)
    sections = output.split("== ")[1:]
    assert len(sections) == len(SAMPLED)
    for section in sections:
        assert_learned(section)


@pytest.mark.system
def test_several_types_sampled(tmp_path: Path, nursery: Nursery) -> None:
    graph = bibliography_graph(200)
    parts = write_partitions(graph, torch.arange(graph.total_nodes) % 2, tmp_path / "parts")
    assert_learned(run_two_ranks(nursery, [SAMPLED_HETERO], Path(parts), tmp_path))


@pytest.mark.system
@pytest.mark.parametrize("own", [False, True])
def test_servers_and_trainers(own: bool, parts: Path, tmp_path: Path, nursery: Nursery) -> None:
    """Also on a graph of other widths and dtypes, some labels of which are missing."""
    place = str(parts)
    if own:
        graph = community_graph(200, 1600, seed=1, classes=5, features=9)
        data = graph.node_data["_N"]
        labels = data["label"].int().view(-1, 1)
        labels[::7] = -1
        data |= {"feat": data["feat"].double(), "label": labels}
        place = write_partitions(graph, torch.arange(200) % 2, tmp_path / "own")
    server = nursery.start(["-m", "sar", "sample-server", place, "--trainers", "2"], ENVIRONMENT)
    try:
        address = Path(server.line(60).strip().rpartition(" at ")[2])
        assert_learned(run_two_ranks(nursery, [f"{SERVED} --servers=2"], address, tmp_path))
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    sampled = {one.partition(" ")[0] for one in SAMPLED}
    assert scripts == {*SCRIPTS, *sampled, HETERO, SAMPLED_HETERO, SERVED, "demo.py"}
    readme = (ROOT / "examples/README.md").read_text()
    assert all(f"({script})" in readme for script in scripts)


@pytest.mark.system
def test_demo_on_a_small_graph(tmp_path: Path) -> None:
    """All of its steps; the pictures where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    words = ["--nodes", "4000", "--edges", "60000", "--epochs", "30", "--out", "out"]
    out = run(ROOT / "examples/demo.py", *words, cwd=tmp_path)
    assert "beats the perceptron" in out
    for picture in ("learning.png", "memory.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
