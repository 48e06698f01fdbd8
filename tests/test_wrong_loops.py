"""Training loops that forget a call: each is told within fifty steps, and right ones are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import dgl.nn
import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import NUM_CLASSES, NUM_FEATURES, mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group

STEPS = 50


class OfDGL(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first = dgl.nn.SAGEConv(NUM_FEATURES, 8, "mean")
        self.norm = norm or nn.Identity()
        self.last = dgl.nn.SAGEConv(8, NUM_CLASSES, "mean")

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.last(graph, self.norm(self.first(graph, x)).relu())


def with_norm() -> nn.Module:
    return OfDGL(nn.BatchNorm1d(8))


class OfMyOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph.aggregate(x, "mean"))


def global_loss(losses: Tensor, mask: Tensor) -> Tensor:
    return sar.global_mean(losses, mask)


def own_count(losses: Tensor, mask: Tensor) -> Tensor:
    """As somebody writes it who counts the training nodes of all ranks."""
    count = sar.current_group().all_reduce(mask.sum())
    return sar.global_sum(losses, mask) / count


def local_loss(losses: Tensor, mask: Tensor) -> Tensor:
    return losses[mask].mean()


def loop(
    group: Group,
    path: str,
    make: Callable[[], nn.Module] = OfDGL,
    start: Callable[[nn.Module, Any], Any] = lambda model, graph: sar.sync_params(model),
    loss: Callable[[Tensor, Tensor], Tensor] = global_loss,
    gather: Callable[[nn.Module], Any] = sar.gather_grads,
    steps: int = STEPS,
) -> list[float]:
    data = sar.load_partition_data(path)
    graph = sar.construct_full_graph(data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(group.rank)
        model = make()
    start(model, graph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = data.node_features["_N/feat"], data.node_features["_N/label"]
    mask, values = data.node_features["_N/train_mask"], []
    for _ in range(steps):
        value = loss(F.cross_entropy(model(graph, x), y, reduction="none"), mask)
        optimizer.zero_grad()
        value.backward()
        gather(model)
        optimizer.step()
        values.append(value.item())
    return values


def nothing(*_: Any) -> None:
    return None


@pytest.fixture
def path(partitioned: Cutter) -> str:
    return partitioned(mixed(), 2, "random")


def words_of(case: Callable[..., Any], path: str, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_threads(2, partial(case, **options), path)
    return [str(one.message) for one in told]


@pytest.mark.parametrize("gather", [sar.gather_grads, nothing], ids=["gathered", "not"])
def test_parameters_that_were_not_synchronized(path: str, gather: Any) -> None:
    with pytest.raises(sar.DriftError, match=r"nobody called sar.sync_params\(model\)"):
        run_threads(2, partial(loop, start=nothing, gather=gather), path)


@pytest.mark.parametrize(
    "make, start",
    [(OfDGL, lambda model, graph: sar.sync_params(model)), (OfMyOwn, sar.prepare)],
    ids=["layers", "prepared"],
)
def test_gradients_that_were_not_summed(path: str, make: Any, start: Any) -> None:
    with pytest.raises(sar.DriftError, match=r"nobody called sar.gather_grads\(model\) after"):
        run_threads(2, partial(loop, make=make, start=start, gather=nothing), path)


def overlapped(model: nn.Module) -> None:
    """Gradients summed as ``sar.overlap_gradients`` does, whose backward has nothing to add."""
    with sar.overlap_gradients(model):
        pass


@pytest.mark.parametrize("gather", [sar.gather_grads, overlapped])
def test_a_loss_of_each_ranks_own(path: str, gather: Any) -> None:
    (words,) = words_of(loop, path, loss=local_loss, gather=gather)
    assert "sar.global_mean(values, mask)" in words and "2 ranks" in words


def test_a_batch_norm_that_sees_sharded_rows(path: str) -> None:
    """Also where nothing else of the library is called than the graph; once."""
    (words,) = words_of(loop, path, make=with_norm, start=nothing, gather=nothing, steps=1)
    assert words.startswith("BatchNorm1d(8,") and "sar.prepare(model, graph)" in words
    (words,) = words_of(loop, path, make=with_norm, steps=5)
    assert words.startswith("BatchNorm1d(8,")


def test_a_batch_norm_that_sees_chosen_rows(path: str) -> None:
    """Which are no graph's: told by the first sum of gradients, by name."""

    def case(group: Group, path: str) -> None:
        model = nn.ModuleDict({"norm": nn.BatchNorm1d(3)})
        model["norm"](torch.rand(5, 3)).sum().backward()
        sar.gather_grads(model)

    (words,) = words_of(case, path)
    assert words.startswith("norm normalizes with each rank's own rows")


def synced_then_converted(model: nn.Module, graph: Any) -> None:
    sar.sync_params(model)
    sar.convert_batch_norm(model)


@pytest.mark.parametrize(
    "options",
    [
        {"start": sar.prepare},
        {"start": sar.prepare, "make": with_norm},
        {"start": sar.prepare, "make": OfMyOwn},
        {"start": synced_then_converted, "make": with_norm, "steps": 3},
        {"loss": own_count},
        {"gather": overlapped},
        {"make": lambda: OfDGL(nn.BatchNorm1d(8).eval()), "steps": 3},
    ],
)
def test_right_loops_are_left_alone(path: str, options: dict[str, Any]) -> None:
    assert words_of(loop, path, **{"steps": STEPS + 2, **options}) == []


def test_one_rank_has_nothing_to_forget(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_threads(1, partial(loop, make=with_norm, loss=local_loss, gather=nothing), path)


def test_sums_over_all_ranks(partitioned: Cutter) -> None:
    whole = torch.arange(12.0).view(6, 2)

    def case(group: Group) -> tuple[float, Tensor, float]:
        mine = whole.tensor_split(group.size)[group.rank].clone().requires_grad_()
        value = sar.global_sum(mine, mine.detach()[:, 0] > 3)
        (value / 4).backward()
        none = sar.global_sum(torch.zeros(0))
        return value.item(), mine.grad, none.item()

    for size in (1, 2, 3):
        found = run_threads(size, case)
        assert {(value, none) for value, _, none in found} == {(float(whole[2:].sum()), 0.0)}
        want = (whole[:, :1] > 3).expand(6, 2) / 4
        assert torch.equal(torch.cat([grad for _, grad, _ in found]), want)
    with pytest.raises(TypeError, match="values: got list"):
        sar.global_sum([1.0])


# ---------------------------------------------------------------- sar.check


def test_an_optimizer_that_differs_is_told(path: str) -> None:
    def case(group: Group) -> list[str]:
        model, words = nn.Linear(2, 2), []
        sar.sync_params(model)
        for change in ("lr", "state"):
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            sar.gather_grads(model)
            optimizer.step()
            sar.check(model, optimizer)
            if group.rank == 1 and change == "lr":
                optimizer.param_groups[0]["lr"] = 0.2
            elif group.rank == 1:
                optimizer.state[model.weight]["exp_avg"] += 1
            sar.check(model)
            with pytest.raises(sar.DriftError) as caught:
                sar.check(model, optimizer)
            words.append(str(caught.value))
        return words

    first, second = run_threads(2, case)
    assert first == second
    assert "the optimizer's lr of group 0 of rank 1" in first[0]
    assert "the optimizer's exp_avg of weight of rank 1" in first[1]
    assert "does every rank step with an optimizer of the same options" in first[1]


def test_check_looks_every_so_often() -> None:
    def case(group: Group) -> int:
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(group.rank)
        calls = 0
        with pytest.raises(sar.DriftError):
            for calls in range(1, 9):  # noqa: B007 - how far it came
                sar.check(model, every=4)
        return calls

    assert run_threads(2, case) == [4, 4]
    with pytest.raises(ValueError, match="every: got 0, expected an int of at least 1"):
        sar.check(nn.Linear(1, 1), every=0)
    with pytest.raises(TypeError, match="optimizer: got Linear, expected one of torch.optim"):
        sar.check(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]
