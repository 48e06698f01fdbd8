"""`--model module:Class`: the same training as a loop of one's own, and what is wrong is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.commands import on_threads
from test_train import CLASSES, WIDTH, cut, graph

import sar
from sar.__main__ import main, read_words
from sar.cli.train import make_trainer
from sar.train import ModelOptions, build_model

pytest.importorskip("dgl.nn")

SOURCE = """
import torch
import dgl.nn

class Net(torch.nn.Module):
    def __init__(self, in_feats, out_feats, width, relu=True):
        super().__init__()
        self.first = dgl.nn.SAGEConv(in_feats, width, "mean")
        self.second = dgl.nn.SAGEConv(width, out_feats, "mean")
        self.relu, self.num_blocks = relu, 2

    def forward(self, graph, x):
        first, last = graph if isinstance(graph, list) else (graph, graph)
        h = self.first(first, x)
        return self.second(last, h.relu() if self.relu else h)

class Sum(torch.nn.Module):
    def __init__(self, in_feats):
        super().__init__()
        self.lin = torch.nn.Linear(in_feats, 2)

    def forward(self, graph, x):
        return self.lin(x).sum(0)

class Takes(torch.nn.Module):
    def __init__(self, out_feats, *, width=1, **more):
        super().__init__()
        self.got = out_feats, width, more

class Other:
    pass

def no_module(in_feats):
    return in_feats
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with ``mynet.py`` and a graph in two parts."""
    (tmp_path / "mynet.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    cut(graph(), 2, tmp_path)
    return tmp_path


def trained(place: Path, *words: str, size: int = 2) -> list[Any]:
    """What each rank's trainer started from, and its losses."""
    path = next((place / "parts2").glob("*.json"))
    args = read_words(["train", str(path), "--no-progress", *words])

    def rank(group: Any) -> Any:
        trainer = make_trainer(args, group, torch.device("cpu"))
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return start, [record["loss"] for record in trainer.fit()]

    return run_threads(size, rank, timeout=60)


def own_loop(place: Path, args: dict, start: dict, epochs: int) -> list[float]:
    """As a user writes it, on two ranks."""
    path = str(next((place / "parts2").glob("*.json")))

    def rank(group: Any) -> list[float]:
        data = sar.load_partition_data(path, group.rank)
        view, model, losses = sar.construct_full_graph(data), built("mynet:Net", args), []
        model.load_state_dict(start)
        x, y, mask = (data.node_features[f"_N/{n}"] for n in ("feat", "label", "train_mask"))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(epochs):
            values = F.cross_entropy(model(view, x), y, reduction="none")
            loss = sar.global_mean(values, mask.bool())
            optimizer.zero_grad()
            loss.backward()
            sar.gather_grads(model)
            optimizer.step()
            losses.append(loss.item())
        return losses

    return run_threads(2, rank, timeout=60)[0]


def built(name: str, args: dict) -> Any:
    return build_model(ModelOptions(name, args=args), WIDTH, CLASSES)


@pytest.mark.parametrize("name", ["mynet:Net", "mynet.py:Net"])
def test_the_losses_of_a_loop_of_ones_own(name: str, place: Path) -> None:
    words = ["--model", name, "--model-args", "width=8", "--model-args", "relu=false"]
    (start, losses), (other, others) = trained(place, *words, "--epochs", "4", "--mfgs", "off")
    assert losses == others and all(torch.equal(start[one], other[one]) for one in start)
    want = own_loop(place, {"width": 8, "relu": False}, start, 4)
    assert losses == pytest.approx(want, abs=1e-6) and losses[-1] < losses[0]


def test_on_mini_batches(place: Path) -> None:
    words = ["--model", "mynet:Net", "--model-args", "width=8", "--epochs", "2", "--lr", "0.1"]
    sampled = [*words, "--sampled", "--fanouts", "-1,-1", "--batch-size", "500"]
    start, losses = trained(place, *sampled)[0]
    want = own_loop(place, {"width": 8}, start, 1)
    assert losses[0] == pytest.approx(want[0], abs=1e-5)
    with pytest.raises(ValueError, match=r"fanouts: got 3.*whose num_blocks is 2"):
        trained(place, *words, "--sampled")


def test_what_the_constructor_gets(place: Path) -> None:
    assert built("mynet:Takes", {"width": 5}).got == (CLASSES, 5, {})
    got = built("mynet:Takes", {"out_feats": 7, "x": 1}).got  # what the user says counts
    assert got == (7, 1, {"x": 1})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere:Net"], "--model: got 'nowhere:Net', but there is no module 'nowhere' in"),
        (["nowhere.py:Net"], "but there is no file 'nowhere.py'"),
        (["mynet:Nett"], "has no class 'Nett'; did you mean Net?"),
        (["mynet.py:Nett"], "has no class 'Nett'; did you mean Net?"),
        (["mynet"], "got 'mynet', expected one of sage, gcn, gin, gat, rgcn, or your own"),
        (["mynet:Net", "--layers", "2"], "--layers: is for the built-in models; give arguments"),
        (["sage", "--model-args", "a=1"], "--model-args: got a, which is for a model of your own"),
        (["mynet:Net", "--model-args", "width"], "--model-args: got 'width', expected KEY=VALUE"),
    ],
)
def test_told_before_a_rank_starts(
    words: list[str], text: str, place: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", "parts.json", "--model", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("mynet:Net", {}, r"takes \(in_feats, out_feats, width, relu\), got in_feats=6, out_"),
        ("mynet:Net", {"widht": 3, "width": 1}, "unexpected keyword argument 'widht'; give its"),
        ("mynet:Other", {}, "is the class Other, expected a subclass of torch.nn.Module"),
        ("mynet:no_module", {}, "gave a int, expected a torch.nn.Module"),
        ("mynet:SOURCE", {}, "but mynet has no 'SOURCE'"),
        ("broken:Net", {}, r"importing it failed at .*broken.py:1: ZeroDivisionError"),
        ("nowhere:Net", {}, "there is no module 'nowhere' in"),
    ],
)
def test_told_by_the_ranks(name: str, args: dict, text: str, place: Path) -> None:
    (place / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match=text):
        built(name, args)


def test_a_result_of_the_wrong_shape(place: Path) -> None:
    with pytest.raises(ValueError, match=r"forward of mynet:Sum gave \[2\], expected \[\d+, 4\]"):
        trained(place, "--model", "mynet:Sum")


def test_explained_as_it_is_called(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "turned.py").write_text(
        SOURCE.replace("forward(self, graph, x)", "forward(self, x, graph)")
    )
    path = next((place / "parts2").glob("*.json"))
    words = ["--model", "turned:Net", "--call", "x,graph", "--model-args", "width=4"]
    on_threads(2, "train", path, "--epochs", "1", "--explain", *words)
    assert "first   SAGEConv" in capfd.readouterr().out
