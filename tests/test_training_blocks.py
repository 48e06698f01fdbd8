"""Training on the rows alone that reach the loss gives what the whole graph gives."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.compare import relative_error
from harness.covering import by_pairs
from harness.graphs import GraphArrays, homogeneous
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import current_group
from sar.models import Call
from sar.train import (
    DataOptions,
    ModelOptions,
    NodeData,
    Trainer,
    TrainOptions,
    build_model,
    load_node_data,
)
from sar.train.blocks import training_blocks

NODES, WIDTH, CLASSES, EPOCHS = 240, 6, 4, 4


@cache
def sparse(train: float) -> GraphArrays:
    """Long paths with a few chords, self loops and doubled edges; few nodes near to any other."""
    rng = torch.Generator().manual_seed(3)
    path = torch.arange(NODES - 4)
    src, dst = torch.randint(NODES, (2, 60), generator=rng)
    loops = torch.randint(NODES, (9,), generator=rng)
    ends = torch.cat([path, src, loops, src[:7]]), torch.cat([path + 1, dst, loops, dst[:7]])
    graph = homogeneous(f"sparse{train}", NODES, *ends)
    chosen = torch.rand(NODES, generator=rng) < train
    graph.node_data["_N"]["train_mask"] = chosen
    graph.node_data["_N"]["val_mask"] = ~chosen
    return graph


def ready(path: str, group: Any, policy: sar.Policy | None = None) -> tuple[Any, NodeData]:
    """The graph and the data, in float64."""
    part = sar.load_dgl_partition_data(path, group.rank, "cpu")
    data = load_node_data(part, DataOptions(), group=group)
    data.features = data.features.double()
    return sar.construct_full_graph(part, policy), data


class Watched(Trainer):
    """Notes the parameters and the bytes sent by each epoch."""

    def train_epoch(self) -> float:
        before = self.group.counters.sent_bytes
        loss = super().train_epoch()
        params = [p.detach().clone() for p in self.model.parameters()]
        sent = self.group.counters.sent_bytes - before
        self.epochs = [*getattr(self, "epochs", []), (params, sent)]
        return loss


def case_train(
    group: Any, path: str, model: nn.Module, loops: bool, options: TrainOptions
) -> tuple[list[dict], list[tuple[list[Tensor], int]], str]:
    graph, data = ready(path, group)
    if loops:
        graph = graph.remove_self_loop().add_self_loop()
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = Watched(model, graph, data, options, optimizer=optimizer, group=group)
    return trainer.fit(), trainer.epochs, trainer.mfgs


@by_pairs(size=[1, 2, 3, 4], name=["sage", "gcn", "gin", "gat"], dropout=[0.0, 0.4])
def test_losses_and_parameters_are_those_of_the_whole_graph(
    size: int, name: str, dropout: float, partitioned: Cutter
) -> None:
    path = partitioned(sparse(0.03), size, "coarsen" if size == 4 else "random")
    torch.manual_seed(0)
    model = build_model(ModelOptions(name, 3, 8, dropout), WIDTH, CLASSES).double()
    runs = []
    for mfgs in ("off", "auto"):
        options = TrainOptions(epochs=EPOCHS, mfgs=mfgs)
        runs.append(run_threads(size, case_train, path, model, name == "gcn", options))
    for (records, epochs, told), (same, few_epochs, why) in zip(*runs, strict=True):
        assert told == "off"
        assert why.startswith("used: they save "), why
        for record, other in zip(records, same, strict=True):
            assert other["loss"] == pytest.approx(record["loss"], rel=1e-12)
            assert other["val_acc"] == record["val_acc"]
        for (params, sent), (others, fewer) in zip(epochs, few_epochs, strict=True):
            assert all(relative_error(a, b) < 1e-12 for a, b in zip(others, params, strict=True))
            assert fewer <= sent
    if size > 1:
        sums = [sum(sent for _, epochs, _ in ranks for _, sent in epochs) for ranks in runs]
        assert sums[1] < 0.7 * sums[0]


def case_choice(group: Any, path: str, model: nn.Module, mode: str) -> tuple[float | None, str]:
    graph, data = ready(path, group)
    try:
        blocks, told = training_blocks(model, graph, data, mode, group, Call())
    except ValueError as error:
        return None, str(error)
    return None if blocks is None else blocks.saved, told


class Plain(nn.Module):
    """Says nothing of blocks."""


CHOICES = [
    (0.03, ModelOptions("sage", 2, 8), "auto", "used"),
    (0.7, ModelOptions("sage", 2, 8), "auto", "not used: they would save"),
    (1.0, ModelOptions("sage", 2, 8), "auto", "not used: 100 % of the nodes are training"),
    (0.03, ModelOptions("sage", 2, 8, batch_norm=True), "auto", "not used: batch norm"),
    (0.03, ModelOptions("sage", 2, 8, batch_norm=True), "on", "used"),
    (1.0, ModelOptions("sage", 2, 8), "on", "used: they save 0 %"),
    (0.03, ModelOptions("sage", 2, 8), "off", "off"),
    (0.03, None, "auto", "not used: the model does not say by num_blocks"),
    (0.03, None, "on", "mfgs: got 'on', but the model does not say by num_blocks"),
]


@pytest.mark.parametrize(("train", "options", "mode", "words"), CHOICES)
def test_when_blocks_are_chosen(
    train: float, options: ModelOptions | None, mode: str, words: str, partitioned: Cutter
) -> None:
    path = partitioned(sparse(train), 3, "random")
    model = Plain() if options is None else build_model(options, WIDTH, CLASSES)
    told = run_threads(3, case_choice, path, model, mode)
    assert len(set(told)) == 1
    assert told[0][1].startswith(words), told[0][1]
    assert (told[0][0] is not None) == words.startswith("used")


def test_the_choice_ends_where_blocks_cannot_save_enough(partitioned: Cutter) -> None:
    """Each layer that is planned costs a pass over all edges: minutes on a graph beyond memory."""

    def case(group: Any, path: str, layers: int) -> int:
        graph, data = ready(path, group)
        model = build_model(ModelOptions("sage", layers, 8), WIDTH, CLASSES)
        before = group.counters.sent_bytes
        training_blocks(model, graph, data, "auto", group, Call())
        return group.counters.sent_bytes - before

    path = partitioned(sparse(0.7), 3, "random")
    assert run_threads(3, case, path, 8) == run_threads(3, case, path, 4)


def test_no_blocks_where_a_node_counts_twice(partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> str:
        graph, data = ready(path, group)
        if group.rank == 1:
            data.rows["train"] = torch.cat([data.rows["train"]] * 2)
        model = build_model(ModelOptions("sage", 2, 8), WIDTH, CLASSES)
        with pytest.raises(ValueError, match="mfgs: got 'on', but a training node is listed twice"):
            training_blocks(model, graph, data, "on", group, Call())
        return training_blocks(model, graph, data, "auto", group, Call())[1]

    told = run_threads(3, case, partitioned(sparse(0.1), 3, "random"))
    assert set(told) == {"not used: a training node is listed twice"}


def case_multilabel(group: Any, path: str) -> list[dict]:
    """A rank without training nodes, labels of several classes, blocks kept in a mapped file."""
    histories = []
    for mfgs in ("off", "on"):
        graph, data = ready(path, group, sar.Policy(constant_inputs="mapped"))
        data.multilabel, data.labels = True, torch.eye(CLASSES)[data.labels]
        if group.rank == 1:
            data.rows["train"] = data.rows["train"][:0]
        model = build_model(ModelOptions("sage", 2, 8), WIDTH, CLASSES).double()
        rng = torch.Generator().manual_seed(0)
        for param in model.parameters():
            param.data = torch.randn(param.shape, generator=rng, dtype=param.dtype)
        options = TrainOptions(epochs=EPOCHS, mfgs=mfgs)
        histories.append(Trainer(model, graph, data, options, group=current_group()).fit())
    return histories


def test_a_rank_without_training_nodes(partitioned: Cutter) -> None:
    for whole, few in run_threads(3, case_multilabel, partitioned(sparse(0.1), 3, "random")):
        for record, other in zip(whole, few, strict=True):
            assert other["loss"] == pytest.approx(record["loss"], rel=1e-11)
