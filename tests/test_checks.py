"""Sums over all ranks, and models and optimizers that ``sar.check`` compares."""

from __future__ import annotations

import pytest
import torch
from harness import run_threads
from torch import Tensor, nn

import sar
from sar.comm import Group


def test_sums_over_all_ranks() -> None:
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


def test_an_optimizer_that_differs_is_told() -> None:
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
