"""Gradients summed while backward runs are those summed after it, whatever happens on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from harness import WorkerPool, relative_error, run_threads
from torch import Tensor, nn

import sar
from sar.comm import Group
from sar.nn import overlap
from sar.partition.generate import community_graph
from sar.partition.write import write_partitions

RANKS = 3


class Model(nn.Module):
    """Layers of several buckets and dtypes, one that only rank 0 uses and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8).double()
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(8, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.first(x).tanh().bfloat16()
        x = self.narrow(x).float()
        if rank == 0:
            x = x + self.sometimes(x)
        return self.last(x)


def loss_of(model: Model, rank: int, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(10 * rank + step)
    return model(torch.rand(5, 6, dtype=torch.float64, generator=seeded), rank).square().sum()


def once(group: Group, model: Model, around: Callable) -> None:
    loss = loss_of(model, group.rank, 0)
    with around():
        loss.backward()


def twice_inside(group: Group, model: Model, around: Callable) -> None:
    loss = loss_of(model, group.rank, 0)
    with around():
        loss.backward(retain_graph=True)
        if group.rank != 1:
            loss.backward()


def once_before(group: Group, model: Model, around: Callable) -> None:
    loss_of(model, group.rank, 0).backward()
    loss = loss_of(model, group.rank, 1)
    with around():
        loss.backward()


def changed_inside(group: Group, model: Model, around: Callable) -> None:
    loss = loss_of(model, group.rank, 0)
    with around():
        loss.backward()
        if group.rank == 2:
            model.last.weight.grad.mul_(0.5)
            model.first.bias.grad = None


def nothing_on_one(group: Group, model: Model, around: Callable) -> None:
    loss = loss_of(model, group.rank, 0)
    with around():
        if group.rank != 1:
            loss.backward()


def frozen_between(group: Group, model: Model, around: Callable) -> None:
    once(group, model, around)
    model.narrow.requires_grad_(False)
    model.zero_grad()
    once(group, model, around)


STEPS = (once, twice_inside, once_before, changed_inside, nothing_on_one, frozen_between)


def compare(group: Group) -> None:
    torch.manual_seed(0)
    plain, overlapped = Model(), Model()
    overlapped.load_state_dict(plain.state_dict())
    sums = sar.overlap_gradients(overlapped, group=group)
    for step in STEPS:
        for model in (plain, overlapped):
            model.zero_grad()
            model.requires_grad_()
        step(group, plain, nullcontext)
        sar.gather_grads(plain, group=group)
        step(group, overlapped, lambda: sums)
        for (name, a), b in zip(plain.named_parameters(), overlapped.parameters(), strict=True):
            if step is frozen_between and "narrow" in name:
                assert b.grad is None
            elif a.grad is None:
                assert b.grad is None and "unused" in name, (step.__name__, name)
            else:
                tolerance = 1e-2 if a.dtype == torch.bfloat16 else 1e-6
                assert relative_error(b.grad, a.grad) < tolerance, (step.__name__, name)


def test_sums_are_those_of_gather_grads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "BUCKET_BYTES", 300)
    run_threads(RANKS, compare)


def beside_the_stream(group: Group, parts: str) -> None:
    """Ranks are out of step, and rows travel while sums do."""
    overlap.BUCKET_BYTES = 300
    compare(group)
    data = sar.load_dgl_partition_data(parts, group.rank)
    graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(x.shape[1], 9), nn.Linear(9, 9), nn.Linear(9, 4)])

    def forward() -> Tensor:
        h = x
        for number, layer in enumerate(layers):
            h = graph.aggregate(layer(h).tanh(), "mean")
            pause = 0.02 * ((group.rank + number) % 2)
            h.register_hook(lambda _, pause=pause: time.sleep(pause))
        return h.square().sum()

    forward().backward()
    sar.gather_grads(layers, group=group)
    wanted = [param.grad.clone() for param in layers.parameters()]
    sums = sar.overlap_gradients(layers, group=group)
    results = []
    for _ in range(2):
        layers.zero_grad()
        with sums:
            forward().backward()
        results.append([param.grad.clone() for param in layers.parameters()])
    for one, other, want in zip(*results, wanted, strict=True):
        assert torch.equal(one, other)  # in one order, whoever comes first
        assert relative_error(one, want) < 1e-5


def test_sums_go_on_beside_the_stream(
    processes: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("overlap")
    graph = community_graph(200, 1200)
    parts = write_partitions(graph, torch.arange(200) % RANKS, folder / "parts")
    processes.run(RANKS, beside_the_stream, parts)


def test_other_parameters_on_a_rank_are_named() -> None:
    def differ(group: Group) -> None:
        with pytest.raises(ValueError, match="model: rank 1 has .* elements"):
            sar.overlap_gradients(nn.Linear(2, 2 + group.rank), group=group)

    run_threads(2, differ)


def test_sparse_gradients_are_refused_on_every_rank() -> None:
    def sparse(group: Group) -> None:
        table = nn.Embedding(4, 2, sparse=group.rank == 1)
        sums = sar.overlap_gradients(table, group=group)
        with pytest.raises(TypeError, match="sparse gradient, expected dense"):
            with sums:
                table(torch.tensor([1])).sum().backward()

    run_threads(2, sparse)


def test_entering_twice_is_refused() -> None:
    sums = sar.overlap_gradients(nn.Linear(2, 2))
    with sums, pytest.raises(RuntimeError, match="entered inside itself"):
        with sums:
            pass
