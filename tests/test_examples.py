"""Every example runs on two ranks and learns; the demo runs on a small graph."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.failures import assert_no_mistakes
from harness.nursery import Child, Nursery
from harness.parts import Cutter

from sar.__main__ import main
from sar.partition.sources.generate import bibliography_graph, community_graph

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    "train_sage.py", "custom_udf_layer.py", "batch_norm.py", "mfg_training.py", "gat.py",
    "appnp.py", "sign.py", "correct_and_smooth.py", "link_prediction.py", "sampled_sage.py",
    "sampled_pyg.py", "sampled_links.py --epochs=12", "sampled_temporal.py",
    "pyg_gcn.py", "pyg_gat.py --norm=graph", "pyg_own_layer.py",
    "pyg_links.py", "own_layers.py",
]  # fmt: skip
HETERO, SAMPLED_HETERO, SERVED = "rgcn_hetero.py", "sampled_hetero.py", "server_client.py"
PYG_HETERO, LARGER = "pyg_hetero.py", "larger_than_memory.py"
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


def start_ranks(
    nursery: Nursery, size: int, words: list[str], environment: dict[str, str], cwd: Path = ROOT
) -> list[Child]:
    """Ranks that have ended well, in the environment that torchrun gives to each."""
    given = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    given["MASTER_PORT"] = str(*free_ports(1))
    ranks: list[Child] = []
    try:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(nursery.start(words, environment | given | own, cwd))
        wait_for_all(ranks, seconds=200)
        texts = [rank.text("out") + rank.text("err") for rank in ranks]
        codes = [rank.returncode for rank in ranks]
        assert codes == [0] * size, "\n".join(text[-3000:] for text in texts)
        assert_no_mistakes("".join(texts))
        return ranks
    finally:
        for rank in ranks:
            rank.kill()


def run_two_ranks(nursery: Nursery, scripts: list[str], parts: str | Path, cwd: Path) -> str:
    """What rank 0 prints for all scripts; two processes for all of them."""
    names = [f"{ROOT / 'examples' / script}" for script in scripts]
    jobs = [f"{name}:{port}" for name, port in zip(names, free_ports(len(names)))]
    driver = cwd / "driver.py"
    driver.write_text(DRIVER)
    words = [str(driver), str(parts), *jobs]
    return start_ranks(nursery, 2, words, ENVIRONMENT, cwd)[0].text("out")


def assert_learned(output: str) -> None:
    losses = [float(value) for value in re.findall(r"loss (\S+)", output)]
    assert len(losses) >= 10 and losses[-1] < losses[0], output


@pytest.fixture(scope="module")
def parts(partitioned: Cutter) -> str:
    """A JSON of 400 nodes in two parts; one of them has no training node."""
    graph = community_graph(400, 4000, seed=0, features=20)
    halves = torch.arange(400) % 2
    data = graph.node_data["_N"]
    data["train_mask"] = data["train_mask"] & (halves == 0)
    return partitioned(graph, 2, halves)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_examples_on_two_ranks(parts: str, tmp_path: Path, nursery: Nursery) -> None:
    """One of the ranks has no training node: the mini-batches of the other train the model."""
    sections = run_two_ranks(nursery, SCRIPTS, parts, tmp_path).split("== ")[1:]
    assert len(sections) == len(SCRIPTS)
    for section in sections:
        assert_learned(section)


@pytest.mark.system
def test_several_types(partitioned: Cutter, tmp_path: Path, nursery: Nursery) -> None:
    """On the graph and on blocks the losses are the same, to the printed digits; and sampled."""
    graph = bibliography_graph(200)
    halves = torch.arange(graph.total_nodes) % 2
    parts = partitioned(graph, 2, halves)
    scripts = [HETERO, f"{HETERO} --mfgs", SAMPLED_HETERO, PYG_HETERO, f"{PYG_HETERO} --model=rgcn"]
    sections = run_two_ranks(nursery, scripts, parts, tmp_path).split("== ")[1:]
    whole, blocks, *others = sections
    assert_learned(whole)
    losses = [[float(x) for x in re.findall(r"loss (\S+)", text)] for text in (whole, blocks)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    for section in others:
        assert_learned(section)


@pytest.mark.system
def test_servers_and_trainers(
    partitioned: Cutter, tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubles as features, labels in a column, some of which are missing. Through sockets, as
    between hosts; tests/test_jobs.py goes through memory."""
    monkeypatch.setitem(ENVIRONMENT, "SAR_HOST_MEMORY", "0")
    graph = community_graph(200, 1600, seed=1, classes=5, features=9)
    data = graph.node_data["_N"]
    labels = data["label"].int().view(-1, 1)
    labels[::7] = -1
    data |= {"feat": data["feat"].double(), "label": labels}
    place = partitioned(graph, 2, torch.arange(200) % 2)
    server = nursery.start(["-m", "sar", "sample-server", place, "--trainers", "2"], ENVIRONMENT)
    try:
        address = Path(server.line(60).strip().rpartition(" at ")[2])
        assert_learned(run_two_ranks(nursery, [f"{SERVED} --servers=2"], address, tmp_path))
        assert server.wait(60) == 0
    finally:
        server.kill()


@pytest.mark.system
def test_larger_than_memory_goes_on(
    parts: str, tmp_path: Path, monkeypatch: Any, capfd: Any, caplog: Any
) -> None:
    """A run that was stopped after its checkpoint ends with the bits of one that was not."""
    caplog.set_level("INFO", "sar")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    example = importlib.import_module(LARGER.removesuffix(".py"))

    def run(name: str, epochs: int, *more: str) -> str:
        words = [parts, "--out", str(tmp_path / name), "--epochs", str(epochs), *more]
        monkeypatch.setattr(sys, "argv", [LARGER, *words])
        example.main()
        return capfd.readouterr().out

    disk = ["--directory", str(tmp_path / "disk")]
    first, second = run("twice", 6, *disk), run("twice", 12, *disk)
    assert "MB read" in caplog.text and "epoch 5" not in second and "400 nodes in 2 files" in second
    assert_learned(first + second)
    run("once", 12)
    for rank in range(2):
        one, other = (
            torch.load(tmp_path / name / f"predictions-{rank}.pt") for name in ("twice", "once")
        )
        assert torch.equal(one["ids"], other["ids"])
        assert torch.equal(one["classes"], other["classes"])


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    tested = {one.partition(" ")[0] for one in SCRIPTS}
    assert scripts == {*tested, HETERO, PYG_HETERO, SAMPLED_HETERO, SERVED, LARGER, "demo.py"}
    readme = (ROOT / "examples/README.md").read_text()
    assert all(f"({script})" in readme for script in scripts)


@pytest.mark.system
@pytest.mark.usefixtures("bare")
def test_demo_on_a_small_graph(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """All of its steps, on two ranks; the pictures where matplotlib is installed."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    demo = importlib.import_module("demo")
    words = ["--nodes", "4000", "--edges", "60000", "--epochs", "30", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    monkeypatch.setattr(demo, "PARTS", 2)
    monkeypatch.setattr(demo, "sar", lambda *words: main([*map(str, words)]))
    assert demo.main() == 0 and "beats the perceptron" in capsys.readouterr().out
    for picture in ("learning.png", "memory.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
