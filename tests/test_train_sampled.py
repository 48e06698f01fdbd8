"""Training on mini-batches: what it computes, where it stops and goes on, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.commands import on_threads
from test_train import PartitionData, cut, graph, on_ranks, without_seconds
from torch import Tensor

import sar
from sar.__main__ import main
from sar.comm import Group
from sar.models import prepare_graph
from sar.train import DataOptions, ModelOptions, Trainer, TrainOptions, build_model, load_node_data
from sar.train.blocks import Batches
from sar.train.options import SampledOptions


def trainer_of(
    group: Group,
    partition: PartitionData,
    model: ModelOptions,
    options: TrainOptions,
    sampled: SampledOptions | None,
    checkpoint: Path | None = None,
) -> Trainer:
    data = load_node_data(partition, DataOptions(), group=group)
    batches = None
    if sampled is not None:
        batches = Batches(partition, data, model, sampled, options.seed, group)
    view = prepare_graph(sar.construct_full_graph(partition), model)
    net = build_model(model, data.features.shape[1], data.num_classes)
    rng = torch.Generator().manual_seed(1)  # threads share torch's own
    for one in net.parameters():
        with torch.no_grad():
            one.copy_(torch.randn(one.shape, generator=rng) * 0.3)
    return Trainer(net, view, data, options, checkpoint=checkpoint, group=group, batches=batches)


def parameters(trainer: Trainer) -> list[Tensor]:
    return [one.detach().clone() for one in trainer.model.parameters()]


@pytest.mark.parametrize("name", ["sage", "gin", "gat"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_neighbors_give_the_full_batch_step(name: str, size: int, tmp_path: Path) -> None:
    """With -1 and one batch of all seeds; one rank of three has no training node."""
    path = cut(graph(), size, tmp_path, empty=2)
    model = ModelOptions(name, layers=2, hidden=8, heads=2)
    options = TrainOptions(epochs=1, lr=0.1, mfgs="off")

    def case(group: Group, partition: PartitionData) -> tuple[list, list, float, float]:
        full = trainer_of(group, partition, model, options, None)
        many = trainer_of(group, partition, model, options, SampledOptions((-1, -1), 500))
        losses = full.train_epoch(), many.train_epoch()
        return parameters(full), parameters(many), *losses

    for want, got, loss, sampled_loss in on_ranks(path, size, case):
        assert abs(loss - sampled_loss) < 1e-5
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "dropout"), [(2, 0.0), (1, 0.3)])
@pytest.mark.parametrize("stop", [(0, 2), (1, 1)])
def test_an_epoch_goes_on_where_it_was_saved(
    stop: tuple[int, int], size: int, dropout: float, tmp_path: Path
) -> None:
    """Bit for bit; then epochs on the whole graph. Threads share what torch's dropout draws."""
    path = cut(graph(), size, tmp_path)
    model = ModelOptions("sage", layers=2, hidden=8, dropout=dropout)
    options = TrainOptions(epochs=4, checkpoint_steps=1, seed=3)
    sampled = SampledOptions((3, 3), 7, epochs=3)

    def whole(group: Group, partition: PartitionData) -> tuple[list, list]:
        trainer = trainer_of(group, partition, model, options, sampled, tmp_path / "whole")
        return without_seconds(trainer.fit()), parameters(trainer)

    def part(group: Group, partition: PartitionData) -> tuple[list, list]:
        first = trainer_of(group, partition, model, options, sampled, tmp_path / "part")
        save, saved = first.save, []

        def save_and_stop() -> None:
            save()
            saved.append((first.epoch, first.step))
            if saved[-1] == stop:
                raise KeyError("stopped here")

        first.save = save_and_stop  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            first.fit()
        again = trainer_of(group, partition, model, options, sampled, tmp_path / "part")
        assert again.resume() == stop[0] and again.step == stop[1]
        return without_seconds(again.fit()), parameters(again)

    want, got = on_ranks(path, size, whole), on_ranks(path, size, part)
    for (history, params), (other, others) in zip(want, got, strict=True):
        assert history == other
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_the_command(tmp_path: Path) -> None:
    """Samples, evaluates on the whole graph, and goes on full-batch."""
    path = cut(graph(), 2, tmp_path)
    told = tmp_path / "out.json"
    words = [path, "--layers", "2", "--hidden", "8", "--epochs", "3", "--json", str(told)]
    words += ["--sampled", "--fanouts", "4,3", "--batch-size", "9", "--sampled-epochs", "2"]
    words += ["--checkpoint", str(tmp_path / "run"), "--no-progress"]
    on_threads(2, "train", *words)
    told = json.loads(told.read_text())
    assert [record["epoch"] for record in told["epochs"]] == [1, 2, 3]
    assert all(record["test_acc"] is not None for record in told["epochs"])
    assert told["config"]["sampled_fanouts"] == [4, 3]
    on_threads(2, "evaluate", path, "--checkpoint", tmp_path / "run", "--out", tmp_path / "p")


WRONG = [
    (["--sampled", "--fanouts", "4,3,-2"], "--fanouts: got '4,3,-2', expected numbers such as"),
    (["--sampled", "--sampled-epochs", "0"], "--sampled-epochs: got '0', expected an integer of 1"),
    (["--sampled", "--model", "gcn"], "got 'gcn', which normalizes by degrees of the whole graph"),
    (["--samples"], "did you mean --sampled?"),
]


@pytest.mark.parametrize(("words", "text"), WRONG, ids=lambda one: "".join(one))
def test_wrong_words(
    words: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Before a rank starts."""
    assert main(["train", "nothing.json", *words]) == 2
    assert text in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_told_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One that takes no blocks, or other ones, or one width where there are several types."""
    started: list[str] = []
    monkeypatch.setattr("sar.cli.train.launch", lambda *_: started.append("ranks"))
    (tmp_path / "nets.py").write_text(NETS)
    source, parts = "bibliography:papers=100", str(tmp_path / "typed")
    assert main(["partition", source, "--parts", "2", "--out", parts]) == 0
    paths = {"one": cut(graph(), 2, tmp_path), "typed": f"{parts}/bibliography.json"}
    capsys.readouterr()

    def train(name: str, fanouts: str | None = "4,3", on: str = "one") -> str:
        before, more = len(started), ["--sampled", "--fanouts", fanouts] if fanouts else []
        status = main(["train", paths[on], "--model", f"{tmp_path / 'nets.py'}:{name}", *more])
        assert status == (0 if len(started) > before else 2)
        return capsys.readouterr().err

    told = "layer of Plain, whose num_blocks is None; a model that also takes a list of blocks in"
    assert told in train("Plain")
    assert "got 3, expected one for each graph layer of TwoBlocks" in train("TwoBlocks", "4,3,2")
    for fanouts in (None, "4,3"):
        told = train("OneWidth", fanouts, "typed")
        assert "OneWidth takes one width of features, and the graph has several types" in told
        assert told.endswith("by node type, here of paper\n") and told.count("error:") == 1
    assert not started
    train("TwoBlocks")
    assert started == ["ranks"]


NETS = """
import torch

class Plain(torch.nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()

class TwoBlocks(Plain):
    num_blocks = 2

class OneWidth(torch.nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.layer = torch.nn.Linear(in_feats, out_feats)
"""
