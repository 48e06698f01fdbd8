"""Gradients summed while backward runs are those summed after it, whatever happens on the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from harness import WorkerPool, relative_error, run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group
from sar.nn import overlap, wire_first

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
    sar.sync_params(plain, group=group)
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
        sums.backward(forward())
        results.append([param.grad.clone() for param in layers.parameters()])
    for one, other, want in zip(*results, wanted, strict=True):
        assert torch.equal(one, other)  # in one order, whoever comes first
        assert relative_error(one, want) < 1e-5


def test_sums_go_on_beside_the_stream(either: WorkerPool, partitioned: Cutter) -> None:
    either.run(RANKS, beside_the_stream, partitioned(mixed(), RANKS))


def test_parameters_that_differ_are_an_error_on_all() -> None:
    def differ(group: Group) -> None:
        with pytest.raises(ValueError, match="model: rank 1 has .* elements"):
            sar.overlap_gradients(nn.Linear(2, 2 + group.rank), group=group)
        model, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
        sar.sync_params(model)
        sums = sar.overlap_gradients(model, group=group)
        model[0].requires_grad_(group.rank != 1)
        with pytest.raises(ValueError, match="model: rank 1 has 2 tensors"):
            sums.backward(model(x).sum())
        model[0].requires_grad_(False)
        for _ in range(2):
            model.zero_grad()
            sums.backward(model(x).sum())
            assert model[0].bias.grad is None and model[1].bias.grad.tolist() == [2.0, 2.0]
        table = nn.Embedding(4, 2, sparse=group.rank == 1)
        sums = sar.overlap_gradients(table, group=group)
        with pytest.raises(TypeError, match="sparse gradient, expected dense"):
            with sums:
                table(torch.tensor([1])).sum().backward()
        fresh = nn.Linear(2, 2)
        sar.sync_params(fresh)
        sums = sar.overlap_gradients(fresh, group=group)
        with sums, pytest.raises(RuntimeError, match="entered inside itself"):
            sums.__enter__()

    run_threads(2, differ)


class SelfLast(nn.Module):
    """Aggregates first and multiplies its own rows last, as DGL's SAGEConv."""

    def __init__(self, width: int, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.neigh, self.own = nn.Linear(width, width).double(), nn.Linear(width, width).double()

    def forward(self, graph: sar.ShardedGraph, x: Tensor) -> Tensor:
        sums = self.neigh(graph.aggregate(x, "mean"))
        own = self.own(x)
        own.register_hook(lambda _: self.log.append("own"))
        return sums + own


def ordered(group: Group, parts: str) -> tuple[list[str], list[str], float]:
    """What backward did in its own order and with the wire first, and how far results differ."""
    data = sar.load_dgl_partition_data(parts, group.rank)
    graph = sar.construct_full_graph(data)
    x = data.node_features["_N/feat"].double().requires_grad_()
    log: list[str] = []
    layers = [SelfLast(x.shape[1], log) for _ in range(2)]
    for layer in layers:
        for number, param in enumerate(layer.parameters()):
            nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    exchange = group.exchange

    def noted(*args: object) -> object:
        log.append("send")
        return exchange(*args)

    logs, grads = [], []
    for first in (False, True):
        x.grad = None
        h = layers[1](graph, layers[0](graph, x).tanh())
        loss = sar.global_mean(h.square().sum(1), group=group)
        group.exchange = noted
        log.clear()
        if first:
            wire_first(loss)
            wire_first(loss)  # once more changes nothing
        loss.backward()
        del group.exchange
        logs.append(list(log))
        grads.append(x.grad)
    return logs[0], logs[1], relative_error(*grads)


def test_backward_sends_before_it_multiplies(partitioned: Cutter) -> None:
    parts = partitioned(mixed(), RANKS)
    rounds = ["send"] * (RANKS - 1)
    for plain, first, apart in run_threads(RANKS, ordered, parts):
        assert plain == ["own", *rounds, "own", *rounds]
        assert first == [*rounds, "own", *rounds, "own"]
        assert apart < 1e-12
