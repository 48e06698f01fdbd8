"""`sar train` and `sar evaluate` as processes, and how failures of ranks are told."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import WorkerPool, run_threads
from harness.commands import launch_on
from harness.nursery import Nursery
from harness.parts import Cutter
from test_examples import start_ranks

import sar
from benchmarks.processes import children, rank_of, variable
from sar.__main__ import main
from sar.cli import evaluate, inputs, train
from sar.cli.rank_environment import worker_environment
from sar.comm import Group
from sar.partition.sources.generate import community_graph

ROOT = Path(__file__).resolve().parent.parent
NODES, DEADLINE = 300, 100
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def parts(partitioned: Cutter) -> str:
    """Two random parts of a graph whose orig_id is not the row number."""
    arrays = community_graph(NODES, 2400, 3, classes=3, features=8)
    arrays.node_data["_N"]["orig_id"] = (
        arrays.node_data["_N"]["label"].new_tensor(range(NODES)).flip(0) + 1000
    )
    home = np.random.default_rng(0).integers(0, 2, NODES)
    return partitioned(arrays, 2, home)


def environment(**more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "THP", "OMP"))}
    return {**keep, "PYTHONPATH": str(ROOT), **more}


def run(*words: object, **more: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env=environment(**more), capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip


def words_of(parts: str, out: Path, epochs: int, *words: object) -> list[str]:
    """A run with dropout and batch norm."""
    given = ["train", parts, "--layers", 2, "--hidden", 8, "--dropout", 0.3, "--batch-norm"]
    return list(map(str, [*given, "--epochs", epochs, "--json", out, *words]))


def losses(result: dict) -> list[tuple]:
    return [(epoch["epoch"], epoch["loss"], epoch["test_acc"]) for epoch in result["epochs"]]


# ---------------------------------------------------------------- whole commands


@pytest.fixture(scope="module")
def whole(parts: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The report of an uninterrupted run of 5 epochs, and its checkpoint's folder."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "out.json"
    pictures = ["--plot", folder / "run.svg", "--report", folder / "run.html"]
    words = words_of(parts, out, 5, "--checkpoint", folder, *pictures)
    done = run("sar", *words, PYTHONWARNINGS="always::ResourceWarning")
    assert done.returncode == 0 and "ResourceWarning" not in done.stderr, done.stderr
    return json.loads(out.read_text()), folder


@pytest.mark.system
@pytest.mark.timeout(300)
def test_the_report_of_a_run(whole: tuple[dict, Path]) -> None:
    result = whole[0]
    assert set(result) == {
        "epochs", "ranks", "layers", "config", "versions", "metric", "best", "stopped_early",
        "began", "command", "seconds", "timed_epochs",
    }  # fmt: skip
    names = {"epoch", "loss", "lr", "seconds"}
    splits = ("train", "val", "test")
    names |= {f"{split}_{name}" for split in splits for name in ("acc", "accuracy")}
    assert [set(epoch) for epoch in result["epochs"]] == [names] * 5
    names = {"rank", "peak_rss_mb", "baseline_rss_mb"}
    names |= {f"{word}_bytes" for word in ("sent", "received", "avoided")}
    assert [set(rank) for rank in result["ranks"]] == [names] * 2
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert all(rank["peak_rss_mb"] >= rank["baseline_rss_mb"] > 50 for rank in result["ranks"])
    sent = [rank["sent_bytes"] for rank in result["ranks"]]
    assert sent == [rank["received_bytes"] for rank in reversed(result["ranks"])] and min(sent) > 0


@pytest.mark.system
@pytest.mark.timeout(300)
def test_pictures_of_a_run(whole: tuple[dict, Path], tmp_path: Path) -> None:
    """Those that training draws are those that its JSON gives afterwards."""
    folder = whole[1]
    for name in ("run.svg", "run.html"):
        assert main(["report", str(folder / "out.json"), "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text() == (folder / name).read_text()


@pytest.mark.system
@pytest.mark.timeout(300)
def test_a_resumed_run_is_the_uninterrupted_one(
    parts: str, tmp_path: Path, processes: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 epochs and 2 more, bit for bit the same as 5: dropout on two ranks included."""
    monkeypatch.setattr("sar.cli.train.launch", launch_on(processes))
    kept = ["--checkpoint", tmp_path]
    runs = {"whole": (5,), "half": (3, *kept), "resumed": (5, *kept, "--resume")}
    for name, words in runs.items():
        assert main(words_of(parts, tmp_path / f"{name}.json", *words)) == 0
    whole, resumed = (
        losses(json.loads((tmp_path / f"{name}.json").read_text())) for name in ("whole", "resumed")
    )
    assert resumed == whole and len(resumed) == 5


@pytest.mark.system
@pytest.mark.usefixtures("bare")
def test_predictions_are_by_original_id(
    parts: str, whole: tuple[dict, Path], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    last = whole[0]["epochs"][-1]["test_acc"]
    words = ["--checkpoint", str(whole[1]), "--out", str(tmp_path), "--gather", "--logits"]
    assert main(["evaluate", parts, *words]) == 0
    assert f"test {last:.4f}" in capfd.readouterr().out
    with np.load(tmp_path / "predictions.npz", allow_pickle=False) as found:
        assert found["node_id"].tolist() == list(range(1000, 1000 + NODES))
        assert np.array_equal(found["prediction"], found["logits"].argmax(1))
        labels = community_graph(NODES, 2400, 3, classes=3, features=8).node_data["_N"]
        right = found["prediction"][::-1] == labels["label"].numpy()
        measured = right[labels["test_mask"].numpy()].mean()
    assert measured == pytest.approx(last, abs=1e-9)


def test_evaluate_writes_all_files_or_none(tmp_path: Path) -> None:
    """One rank cannot write: the others do not, and keep what is there from before."""
    names = [f"predictions-{rank:05d}-of-00003.npz" for rank in range(3)]
    (tmp_path / names[0]).write_text("from before")
    (tmp_path / names[1]).mkdir()
    results = {"node_id": torch.arange(3), "prediction": torch.arange(3)}
    args = argparse.Namespace(out=str(tmp_path), gather=False)

    def case(group: Group) -> None:
        with pytest.raises((OSError, sar.SarError), match=f"{names[1]}: could not be written"):
            evaluate._write(results, args, group)

    run_threads(3, case)
    assert (tmp_path / names[0]).read_text() == "from before"
    assert sorted(one.name for one in tmp_path.iterdir()) == names[:2]
    (tmp_path / names[1]).rmdir()
    run_threads(3, lambda group: evaluate._write(results, args, group))
    assert sorted(one.name for one in tmp_path.iterdir()) == names
    for name in names:
        with np.load(tmp_path / name) as content:
            assert content["prediction"].tolist() == [0, 1, 2]


def check_lines(folder: Path) -> None:
    """Every epoch that was done is a whole line: there are as many as the checkpoint holds, or the
    next one, which it was going to hold."""
    found = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    epochs = [line["epoch"] for line in found[1:]]
    assert epochs == list(range(1, len(epochs) + 1))
    assert saved["epoch"] <= len(epochs) <= saved["epoch"] + 1
    losses = [record["loss"] for record in saved["history"]]
    assert [line["loss"] for line in found[1:]][: saved["epoch"]] == losses


@pytest.mark.system
@pytest.mark.parametrize("way", ["a rank is killed", "an interrupt"])
def test_an_end_is_named_and_loses_no_epoch(way: str, parts: str, tmp_path: Path) -> None:
    """Also where the tests run in a shell's background, whose processes ignore interrupts."""
    words = ["train", parts, "--hidden", "8", "--epochs", "1000000", "--checkpoint", str(tmp_path)]
    words += ["--checkpoint-every", "1", "--no-progress", "--json", str(tmp_path / "out.json")]
    process = subprocess.Popen(
        [sys.executable, "-m", "sar", *words],
        env=environment(), stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_for((tmp_path / "checkpoint.pt").exists)
        workers = ranks_below(process.pid)
        victim = workers[1]
        assert len(workers) == 2 and variable(victim, "MALLOC_MMAP_THRESHOLD_") == "1048576"
        assert variable(victim, "THP_MEM_ALLOC_ENABLE") == "1"
        assert int(variable(victim, "OMP_NUM_THREADS")) >= 1
        if way == "an interrupt":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    last = errors.strip().splitlines()[-1]
    if way == "an interrupt":
        assert process.returncode == 130 and last == "sar train: interrupted"
        epoch = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"]
        told = f"sar train: epoch {epoch} is saved in '{tmp_path}'; the same command with --resume"
        assert told in errors
    else:
        assert process.returncode != 0
        assert last.startswith("sar train: error: rank 1: killed by SIGKILL")
    check_lines(tmp_path)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_an_interrupt_says_what_is_saved(
    whole: tuple[dict, Path],
    parts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "launch", interrupt)
    for words, told in [
        ([], "nothing was saved, as there was no --checkpoint"),
        (["--checkpoint", tmp_path], f"nothing is saved in '{tmp_path}' yet"),
        (
            ["--checkpoint", whole[1], "--resume"],
            f"epoch 5 is saved in '{whole[1]}'; the same command with --resume goes on there",
        ),
    ]:
        assert main(["train", parts, *map(str, words)]) == 130
        assert capsys.readouterr().err.endswith(f"sar train: {told}\nsar train: interrupted\n")


@pytest.mark.system
@pytest.mark.usefixtures("bare")
def test_an_error_of_a_rank_is_one_line(parts: str, capfd: pytest.CaptureFixture) -> None:
    assert main(["train", parts, "--labels", "feat"]) != 0
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("sar train: error: rank 0: labels: 'feat' has shape")


@pytest.mark.system
def test_joins_ranks_of_a_launcher_and_cuts_its_input(nursery: Nursery, tmp_path: Path) -> None:
    """In the environment that torchrun gives to each; itself it is below."""
    out = tmp_path / "out.json"
    words = "-m sar train synthetic:nodes=200,edges=1000 --method random --epochs 2 --hidden 8"
    words += f" --json {out} --model gcn --metric f1-macro"
    start_ranks(nursery, 2, words.split(), environment(XDG_CACHE_HOME=str(tmp_path / "cache")))
    result = json.loads(out.read_text())
    assert len(result["ranks"]) == 2 and result["config"]["metric"] == "f1-macro"
    assert len(list((tmp_path / "cache" / "sar").glob("*/*.json"))) == 1


@pytest.mark.system
def test_joins_torchrun_whose_last_words_are_the_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sar, torch\ngroup = sar.initialize_comms()\n"
        "print(f'sum {group.all_reduce(torch.ones(1))}\\n', end='', flush=True)\n"
        "sar.load_partition_data('absent.json', group.rank)\n"
    )
    done = run(*TORCHRUN, script)
    assert done.returncode != 0 and done.stdout.count("sum tensor([2.])") == 2
    last = [line for line in done.stderr.splitlines() if line.strip("= ")][-1]
    assert "PartitionError" in last and "absent.json: no such file" in last


def wait_for(condition) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


def ranks_below(pid: int) -> list[int]:
    """The processes of a launcher's ranks, in their order."""
    found = {rank_of(one): one for one in children(pid)}
    return [one for rank, one in sorted((r, p) for r, p in found.items() if r is not None)]


# ---------------------------------------------------------------- before anything starts


def test_a_folder_that_holds_a_run_is_not_overwritten(
    parts: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "checkpoint.pt").write_bytes(b"old")
    assert main(["train", parts, "--checkpoint", str(tmp_path)]) == 2
    assert "give --resume" in capsys.readouterr().err
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"old"


# ---------------------------------------------------------------- naming the cause


def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    assert worker_environment(10_000, None)["OMP_NUM_THREADS"] == "1"
    found = worker_environment(1, None)
    assert int(found["OMP_NUM_THREADS"]) == len(os.sched_getaffinity(0))
    assert found["THP_MEM_ALLOC_ENABLE"] == "0"
    assert found["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(1, None)["OMP_NUM_THREADS"] == "7"
    assert worker_environment(1, 3)["OMP_NUM_THREADS"] == "3"


# ---------------------------------------------------------------- cache and outputs


def test_the_cache_depends_on_all_that_the_cut_does(tmp_path: Path) -> None:
    file = tmp_path / "graph.npz"
    file.write_bytes(b"1")
    first = inputs.cache_name(str(file), 2, "metis", 0)
    assert first == inputs.cache_name(str(file), 2, "metis", 0)
    others = {
        inputs.cache_name(str(file), 3, "metis", 0),
        inputs.cache_name(str(file), 2, "random", 0),
        inputs.cache_name(str(file), 2, "metis", 1),
        inputs.cache_name("synthetic", 2, "metis", 0),
    }
    file.write_bytes(b"12")
    others.add(inputs.cache_name(str(file), 2, "metis", 0))
    os.utime(file, (5, 5))
    others.add(inputs.cache_name(str(file), 2, "metis", 0))
    assert len(others) == 6 and first not in others


def test_a_failed_cut_leaves_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with pytest.raises(sar.SarError, match="nodes") as caught:
        inputs.cut_into_cache("synthetic:nodes=-5", 2, "random", 0)
    assert "sar partition" not in str(caught.value)
    assert list((tmp_path / "sar").iterdir()) == []
