"""Mistakes that torch alone accepts: gradients lost in collectives, norms and losses of one rank.

Each is an error on every rank or a warning that names what to use; right uses are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import WorkerPool, run_threads
from torch import Tensor

import sar
from sar.comm import Group, legacy

# ---------------------------------------------------------------- collectives


def exchanged(group: Group, x: Tensor) -> None:
    counts = [1] * group.size
    group.exchange(torch.empty(group.size, 1), x, counts, counts).wait()


def single(group: Group, x: Tensor) -> None:
    other = (group.rank + 1) % group.size
    legacy.exchange_single_tensor(other, other, torch.empty(1), x[:1])


COLLECTIVES: dict[str, Callable[[Group, Tensor], Any]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "broadcast": lambda group, x: group.broadcast(x),
    "exchange": exchanged,
    "all_to_all": lambda group, x: group.all_to_all(x, [1] * group.size, [1] * group.size),
    "sum_if_all": lambda group, x: group.sum_if_all(x, True),
    "begin_sum": lambda group, x: group.begin_sum(x).wait(),
    "sar.comm.all_reduce": lambda group, x: legacy.all_reduce(x),
    "sar.comm.all_to_all": lambda group, x: legacy.all_to_all(
        list(torch.empty(group.size, 1).split(1)), list(x.split(1))
    ),
    "sar.comm.exchange_tensors": lambda group, x: legacy.exchange_tensors(list(x.split(1))),
    "sar.comm.exchange_single_tensor": single,
}


def each_collective(group: Group, which: str) -> str:
    call = COLLECTIVES[which]
    rows = torch.ones(group.size, 1, requires_grad=True)
    before = group.counters.collectives
    with pytest.raises(ValueError) as caught:
        call(group, rows * 2)
    assert group.counters.collectives == before  # nothing was sent, so the ranks go on together
    call(group, (rows * 2).detach().clone())
    with torch.no_grad():
        call(group, rows * 2)
        call(group, rows)
    return str(caught.value)


@pytest.mark.parametrize("which", COLLECTIVES)
def test_gradients_do_not_pass_through_collectives(which: str, processes: WorkerPool) -> None:
    """Nor where there is one rank, whose script shall run on several."""
    found = [run_threads(size, each_collective, which) for size in (1, 2)]
    found.append(processes.run(2, each_collective, which))
    (words,) = {words for ranks in found for words in ranks}
    assert words.startswith(f"{which.removeprefix('sar.comm.')}: got a tensor that asks for a gradient")
    assert "sar.global_mean or sar.global_sum" in words and ".detach().clone()" in words


def test_a_gradient_on_one_rank_alone_ends_all() -> None:
    def case(group: Group) -> None:
        group.all_reduce(torch.ones(1, requires_grad=group.rank == 1) * 2)

    with pytest.raises(ValueError, match="all_reduce: got a tensor that asks for a gradient"):
        run_threads(3, case)


def test_gradients_that_have_a_graph_are_summed(processes: WorkerPool) -> None:
    """As ``backward(create_graph=True)`` of a model without a graph leaves them."""
    assert processes.run(2, sums_with_graph) == [[3.0, 3.0, 3.0]] * 2


def sums_with_graph(group: Group) -> list[float]:
    model, found = torch.nn.Linear(1, 1, bias=False), []
    for _ in range(3):
        model.weight.grad = torch.full((1, 1), group.rank + 1.0, requires_grad=True) * 1
        sar.gather_grads(model)
        found.append(float(model.weight.grad))
    return found
