"""What a run shows and writes while it trains, when it ends early, and which epoch was the best."""

from __future__ import annotations

import copy
import csv
import importlib.util
import json
import os
import resource
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_threads
from harness.commands import on_threads
from harness.graphs import community
from harness.parts import Cutter
from test_train import without_seconds
from torch import Tensor, nn

from sar.__main__ import main
from sar.comm import Group, LocalGroup
from sar.errors import SarError
from sar.train import Callback, Csv, JsonLines, NodeData, Trainer, TrainOptions, Wandb

FILE_NAME, LOCK_NAME = "checkpoint.pt", "run.lock"


class Scripted(Trainer):
    """Validation metrics are those of a list; the model learns a constant all the same."""

    script: Sequence[float | None] = ()

    def evaluate(self, logits: Tensor | None = None) -> dict[str, float | None]:
        return {"train": 0.5, "val": self.script[self.epoch - 1], "test": self.epoch / 100}


def trainer(
    group: Group, script: Sequence[float | None] | None = None, folder: Path | None = None,
    callbacks: Sequence[Callback] = (), **options: Any,
) -> Trainer:  # fmt: skip
    draw = torch.Generator().manual_seed(group.rank)
    idx = torch.arange(20)
    rows = {"train": idx[:10], "val": idx[10:15], "test": idx[15:]}
    labels = torch.randint(0, 2, (20,), generator=draw)
    data = NodeData(torch.randn(20, 3, generator=draw), labels, rows, 2, False)
    model = Linear()
    kind = Trainer if script is None else Scripted
    made = kind(model, None, data, TrainOptions(**options), checkpoint=folder, callbacks=callbacks)
    if isinstance(made, Scripted):
        made.script = script or ()
    return made


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        with torch.no_grad():  # threads share torch's generator
            for param in self.parameters():
                param.fill_(0.1)

    def forward(self, graph: None, x: Tensor) -> Tensor:
        return self.linear(x)


# ---------------------------------------------------------------- the best epoch, and the last


def test_the_best_epoch_is_the_first_with_the_largest_metric(tmp_path: Path) -> None:
    """The checkpoint holds its model and the last one's."""
    states: list[dict[str, Tensor]] = []

    class Watch(Callback):
        def on_epoch(self, record: dict) -> None:
            states.append(copy.deepcopy(model.state_dict()))

    script = [0.2, 0.7, None, 0.7, 0.6]
    one = trainer(LocalGroup(), script, tmp_path, [Watch()], epochs=5, checkpoint_every=2)
    model = one.model
    one.fit()
    assert one.best is not None and one.best["epoch"] == 2 and one.best["val_accuracy"] == 0.7
    content = torch.load(tmp_path / FILE_NAME, weights_only=True)
    for epoch, saved in ((2, content["best"]["model"]), (5, content["model"])):
        assert all(torch.equal(states[epoch - 1][name], saved[name]) for name in saved)


@pytest.mark.parametrize(
    ("script", "every", "ends"),
    [
        ([0.1, 0.5, 0.4, 0.3, 0.5, 0.6], 1, 5),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 1, 6),
        ([None, 0.5, None, 0.4, None, 0.3], 2, 6),  # not in an epoch that was not evaluated
    ],
)
def test_early_stop(tmp_path: Path, script: list[float | None], every: int, ends: int) -> None:
    """On all ranks in the same epoch, which is saved; a resumed run has nothing to do."""

    def case(group: Group) -> tuple:
        options = {"epochs": 6, "early_stop": 3, "eval_every": every, "checkpoint_every": 100}
        one = trainer(group, script, tmp_path, **options)
        one.fit()
        again = trainer(group, script, tmp_path, **options)
        again.resume()
        again.fit()
        assert without_seconds(again.history) == without_seconds(one.history)
        return one.epoch, one.stopped_early, again.stopped_early

    early = ends < 6 or every == 2
    assert run_threads(2, case) == [(ends, early, early)] * 2


@pytest.mark.parametrize("options", [{"early_stop": 2}, {"schedule": "plateau"}])
def test_what_needs_validation_nodes_says_so(options: dict[str, Any]) -> None:
    one = trainer(LocalGroup())
    one.data.rows["val"] = torch.empty(0, dtype=torch.int64)
    (name,) = options
    with pytest.raises(ValueError, match=f"{name}: got .* and no validation nodes, expected some"):
        Trainer(Linear(), None, one.data, TrainOptions(**options))


# ---------------------------------------------------------------- the learning rate


def rates(script: Sequence[float | None], **options: Any) -> list[float]:
    one = trainer(LocalGroup(), script, epochs=len(script), lr=0.8, **options)
    return [record["lr"] for record in one.fit()]


def test_warm_up_rises_in_equal_steps() -> None:
    flat = [0.5] * 6
    assert rates(flat, warmup=3) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    cosine = [0.8 * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]
    assert rates(flat, warmup=2, schedule="cosine") == pytest.approx([0.8 / 3, 1.6 / 3, *cosine])
    assert rates(flat, schedule="constant") == [0.8] * 6


def test_a_plateau_halves_the_rate() -> None:
    """After more than ten evaluations without a better metric; those of the warm-up do not count,
    and neither do epochs without an evaluation."""
    script = [0.9, 0.5, *[0.5] * 10, 0.5, 0.6, 0.6]
    found = rates(script, schedule="plateau", warmup=1)
    assert found == pytest.approx([0.4, *[0.8] * 12, 0.4, 0.4])
    every_other = [None if epoch % 2 == 0 else 0.5 for epoch in range(26)]
    assert rates(every_other, schedule="plateau", eval_every=2)[:24] == [0.8] * 24
    assert rates(every_other, schedule="plateau", eval_every=2)[24:] == [0.4] * 2


@pytest.mark.parametrize("schedule", ["constant", "cosine", "plateau"])
@pytest.mark.parametrize("stop", [2, 5])
def test_schedules_resume_bit_for_bit(tmp_path: Path, schedule: str, stop: int) -> None:
    """In the warm-up and behind it; the best epoch is the same, too."""
    script = [0.5] * 3 + [0.4] * 16
    options = {"schedule": schedule, "warmup": 3, "lr": 0.05}

    def case(group: Group) -> None:
        whole = trainer(group, script, tmp_path / "whole", epochs=19, **options)
        whole.fit()
        # epochs are the same: the cosine's length is theirs
        part = trainer(group, script, tmp_path / "part", epochs=19, **options)
        while part.epoch < stop:
            part._fit_epoch(SimpleNamespace(show=lambda record: None))  # type: ignore[arg-type]
        part.save()
        again = trainer(group, script, tmp_path / "part", epochs=19, **options)
        assert again.resume() == stop
        again.fit()
        assert without_seconds(again.history) == without_seconds(whole.history)
        for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
            assert torch.equal(a, b)

    run_threads(2, case)
    paths = [tmp_path / name / FILE_NAME for name in ("whole", "part")]
    best = [torch.load(path, weights_only=True)["best"] for path in paths]
    assert best[0]["epoch"] == best[1]["epoch"] == 1
    assert all(torch.equal(best[0]["model"][n], best[1]["model"][n]) for n in best[0]["model"])


# ---------------------------------------------------------------- callbacks


class Noting(Callback):
    """Notes what it is told, and raises in one of its methods."""

    def __init__(self, raises: str) -> None:
        self.told: list[str] = []
        self.raises = raises

    def note(self, what: str) -> None:
        self.told.append(what)
        if what == self.raises:
            raise ValueError(f"the {what} of a logger went wrong")

    def on_start(self, *_: Any) -> None:
        self.note("start")

    def on_epoch(self, *_: Any) -> None:
        self.note("epoch")

    def on_end(self, *_: Any) -> None:
        self.note("end")


@pytest.mark.parametrize("raises", ["start", "epoch", "end"])
def test_an_error_of_a_callback_ends_all_ranks_with_its_message(raises: str) -> None:
    def case(group: Group) -> list[str]:
        noting = Noting(raises)
        with pytest.raises(ValueError, match=f"rank 0: the {raises} of a logger went wrong"):
            trainer(group, [0.1, 0.3], callbacks=[noting], epochs=2).fit()
        return noting.told

    told = run_threads(3, case)
    assert told[0][-1] == "end" and told[1:] == [[], []]  # files are closed


# ---------------------------------------------------------------- files that grow by lines


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_doubles_no_epoch(tmp_path: Path) -> None:
    """It was killed three epochs behind its checkpoint, in the middle of a line."""
    script = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    paths = tmp_path / "out.jsonl", tmp_path / "out.csv"

    def run(script: list[float], resume: bool) -> None:
        loggers = [JsonLines(paths[0]), Csv(paths[1])]
        options = {"epochs": 6, "checkpoint_every": 2}
        one = trainer(LocalGroup(), script, tmp_path / "run", loggers, **options)
        if resume:
            assert one.resume() == 2
        one.fit()

    with pytest.raises(IndexError):
        run(script[:3], resume=False)
    for path in paths:
        assert path.read_text().count("\n") == 4  # of three epochs
        with open(path, "a") as file:
            file.write('{"epoch": 4, "lo')
    run(script, resume=True)
    header, *epochs = lines(paths[0])
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3, 4, 5, 6]
    assert header["resumed_after"] == 2
    assert len({tuple(epoch) for epoch in epochs}) == 1
    with open(paths[1], newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5", "6"]


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """As a full disk does: a write is cut short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", [JsonLines, Csv])
@pytest.mark.parametrize("room", [0, 1, 90, 111])
def test_a_full_disk_ends_the_run_and_keeps_whole_lines(
    tmp_path: Path, kind: type[JsonLines] | type[Csv], room: int
) -> None:
    """All ranks get an error that names the file, which ends with the last epoch told of."""
    path = tmp_path / "out"
    told = []

    class Later(Callback):
        def on_epoch(self, record: dict) -> None:
            told.append(record["epoch"])

    class Full(Callback):
        def on_start(self, run: dict, done: Sequence[dict]) -> None:
            stack.enter_context(files_end_at(path.stat().st_size + 150 + room))

    def case(group: Group) -> str:
        callbacks = [kind(path), Full(), Later()]
        with pytest.raises(OSError, match=f"rank 0: .*{path}: could not be written: ") as caught:
            trainer(group, [0.5] * 9, callbacks=callbacks, epochs=9).fit()
        return str(caught.value)

    with ExitStack() as stack:
        assert len(set(run_threads(2, case))) == 1
    text = path.read_text()
    assert text.endswith("\n") and text.count("\n") == 1 + len(told)
    assert told == list(range(1, len(told) + 1)) and len(told) < 9


# ---------------------------------------------------------------- other loggers


@pytest.mark.parametrize("text", ["csv", "csv:", "xml:out", ":out"])
def test_unknown_loggers(text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "parts.json", "--logger", text]) == 2
    assert f"logger: got {text!r}, expected jsonl:FILE, csv:FILE" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["tensorboard:runs", "wandb:project"])
def test_absent_packages_are_said_before_ranks_start(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["train", "parts.json", "--logger", text]) == 2
    package = text.partition(":")[0]
    assert f"needs {package}: pip install {package}" in capsys.readouterr().err


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    logged, ends, summary = [], [], {}
    run = SimpleNamespace(
        log=lambda values, step: logged.append((step, values["val_accuracy"])),
        finish=lambda exit_code: ends.append(exit_code),
        summary=summary,
    )
    fake = ModuleType("wandb")
    fake.init = lambda project, config: run if project == "p" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    trainer(LocalGroup(), [0.3, 0.1], callbacks=[Wandb("p")], epochs=2).fit()
    with pytest.raises(IndexError):
        trainer(LocalGroup(), [0.3], callbacks=[Wandb("p")], epochs=2).fit()
    assert logged == [(1, 0.3), (2, 0.1), (1, 0.3)] and ends == [0, 1]
    assert summary["best_val_accuracy"] == 0.3 and "best_epoch" not in summary


# ---------------------------------------------------------------- one run a folder


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """On all ranks, before files are touched, and by the command before ranks start."""
    path, words = tmp_path / "out.jsonl", f"process {os.getpid()} on {socket.gethostname()} since"

    class Inside(Callback):
        def on_epoch(self, record: dict) -> None:
            def second(group: Group) -> None:
                one = trainer(group, [0.1], tmp_path, [JsonLines(path)], epochs=1)
                with pytest.raises(SarError, match=f"in use by {words}.*expected another folder"):
                    one.fit()

            run_threads(2, second)
            assert main(["train", "parts.json", "--checkpoint", str(tmp_path)]) == 2

    trainer(LocalGroup(), [0.1], tmp_path, [Inside()], epochs=1).fit()
    assert words in capsys.readouterr().err and not path.exists()
    assert os.listdir(tmp_path) == [FILE_NAME]
    trainer(LocalGroup(), [0.1], tmp_path, epochs=1).fit()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    gone = {"pid": 99999999, "host": "here", "since": "yesterday"}
    (tmp_path / LOCK_NAME).write_text(json.dumps(gone))
    with pytest.warns(UserWarning, match="of process 99999999 on here since yesterday, which has"):
        trainer(LocalGroup(), [0.1], tmp_path, epochs=1).fit()
    assert not (tmp_path / LOCK_NAME).exists()


# ---------------------------------------------------------------- the command


def test_a_run_from_its_header_to_its_best_epoch(
    partitioned: Cutter, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    arrays = community(120, 900, 3, classes=4, features=6)
    arrays.name = "ogbn-arxiv"
    parts = partitioned(arrays, 2, np.random.default_rng(0).integers(0, 2, 120))
    out, run = tmp_path / "out.json", tmp_path / "run"
    on_threads(
        2, "train", parts, "--epochs", 30, "--hidden", 8, "--layers", 2, "--early-stop", 4,
        "--lr", 0.3, "--warmup", 2, "--schedule", "plateau", "--log-every", 5, "--checkpoint", run,
        "--json", out, "--logger", f"csv:{tmp_path / 'out.csv'}",
    )  # fmt: skip
    shown, result = capsys.readouterr().out.splitlines(), json.loads(out.read_text())
    assert shown[0] == "graph    ogbn-arxiv: 120 nodes, 900 edges, 2 parts"
    assert shown[1].startswith("ranks    2 on cpu, gloo, ")
    assert shown[2].startswith("data     6 features, 4 classes; nodes: ")
    assert shown[3].startswith("model    sage, ") and shown[3].endswith(" parameters; 30 epochs")
    assert shown[4].startswith("metric   ogb-acc; ") and shown[5] == "layers   SAGEConv x 2: fused"
    done = len(result["epochs"])
    epochs = [
        int(line.split("/")[0][6:]) for line in shown if line.startswith("epoch") and "/" in line
    ]
    assert epochs == [*range(5, done + 1, 5), *([done] if done % 5 else [])]
    best = result["best"]
    assert done < 30 and result["stopped_early"] and best["epoch"] == done - 4
    values = [epoch["val_ogb-acc"] for epoch in result["epochs"]]
    assert best["val_ogb-acc"] == max(values) and values.index(max(values)) == done - 5
    assert result["metric"] == result["config"]["metric"] == "ogb-acc"
    assert [epoch["val_acc"] for epoch in result["epochs"]] == values
    assert any(line.startswith(f"best by validation: epoch {done - 4}: ") for line in shown)
    written = [epoch["val_ogb-acc"] for epoch in lines(tmp_path / "out.jsonl")[1:]]
    assert written == values and len((tmp_path / "out.csv").read_text().splitlines()) == done + 1
    for which, epoch in (("best", best), ("last", result["epochs"][-1])):
        out = tmp_path / which
        on_threads(2, "evaluate", parts, "--checkpoint", run, "--out", out, "--which", which)
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith(f"model    of epoch {epoch['epoch']}, the {which}")
        hint = f"; the best by validation is of epoch {best['epoch']}: --which best"
        assert shown[0].endswith(hint) == (which == "last")
        assert f"val {epoch['val_ogb-acc']:.4f}, test {epoch['test_ogb-acc']:.4f}" in shown[1]
