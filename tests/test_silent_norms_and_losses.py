"""Mistakes that torch alone accepts: gradients lost in collectives, norms and losses of one rank.

Each is an error on every rank or a warning that names what to use; right uses are left alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import WorkerPool, run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar.comm import Group

# ---------------------------------------------------------------- collectives


def exchanged(group: Group, x: Tensor) -> None:
    counts = [1] * group.size
    group.exchange(torch.empty(group.size, 1), x, counts, counts).wait()


def single(group: Group, x: Tensor) -> None:
    other = (group.rank + 1) % group.size
    sar.comm.exchange_single_tensor(other, other, torch.empty(1), x[:1])


COLLECTIVES: dict[str, Callable[[Group, Tensor], Any]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "broadcast": lambda group, x: group.broadcast(x),
    "exchange": exchanged,
    "all_to_all": lambda group, x: group.all_to_all(x, [1] * group.size, [1] * group.size),
    "sum_if_all": lambda group, x: group.sum_if_all(x, True),
    "begin_sum": lambda group, x: group.begin_sum(x).wait(),
    "sar.comm.all_reduce": lambda group, x: sar.comm.all_reduce(x),
    "sar.comm.all_to_all": lambda group, x: sar.comm.all_to_all(
        list(torch.empty(group.size, 1).split(1)), list(x.split(1))
    ),
    "sar.comm.exchange_tensors": lambda group, x: sar.comm.exchange_tensors(list(x.split(1))),
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
    found = [run_threads(1, each_collective, which), processes.run(2, each_collective, which)]
    (words,) = {words for ranks in found for words in ranks}
    name = which.removeprefix("sar.comm.")
    assert words.startswith(f"{name}: got a tensor that asks for a gradient")
    assert "sar.global_mean or sar.global_sum" in words and ".detach().clone()" in words


def test_gradients_that_have_a_graph_are_summed(processes: WorkerPool) -> None:
    """As ``backward(create_graph=True)`` of a model without a graph leaves them."""
    assert processes.run(2, sums_with_graph) == [[3.0, 3.0, 3.0]] * 2


def sums_with_graph(group: Group) -> list[float]:
    torch.manual_seed(0)  # processes have run other tests, not all the same
    model, found = nn.Linear(1, 1, bias=False), []
    for _ in range(3):
        model.weight.grad = torch.full((1, 1), group.rank + 1.0, requires_grad=True) * 1
        sar.gather_grads(model)
        found.append(float(model.weight.grad))
    return found


# ---------------------------------------------------------------- norms

WIDTH = 5  # no rank has as many nodes or edges


class Squeezed(nn.BatchNorm1d):
    """Has a ``forward`` of its own, which no conversion may drop."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :, 0])[:, :, None]


def turned(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """Over the nodes for each column, as people write it."""
    return lambda x: norm(x.t()[None])[0].t()


def spatial(norm: nn.Module, dims: int) -> Callable[[Tensor], Tensor]:
    return lambda x: norm(x.view(*x.shape, *[1] * dims))


Make = Callable[[], Callable[[Tensor], Any]]
TO_CONVERT = "sar.prepare(model, graph) or sar.convert_batch_norm"
OVER_ROWS = "use nn.BatchNorm1d on [rows, columns], which sar.prepare(model, graph) converts"
LOCAL: dict[str, tuple[Make, str, str]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(WIDTH), "BatchNorm1d(5,", TO_CONVERT),
    "BatchNorm1d without statistics": (
        lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False).eval(), "BatchNorm1d(", TO_CONVERT
    ),
    "LazyBatchNorm1d": (nn.LazyBatchNorm1d, "BatchNorm1d(5,", TO_CONVERT),
    "BatchNorm1d turned": (lambda: turned(nn.BatchNorm1d(WIDTH)), "BatchNorm1d(5,", TO_CONVERT),
    "BatchNorm2d": (lambda: spatial(nn.BatchNorm2d(WIDTH), 2), "BatchNorm2d(5,", TO_CONVERT),
    "BatchNorm3d": (lambda: spatial(nn.BatchNorm3d(WIDTH), 3), "BatchNorm3d(5,", TO_CONVERT),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(WIDTH), "SyncBatchNorm(5,", TO_CONVERT),
    "a forward of its own": (
        lambda: spatial(Squeezed(WIDTH), 1), "Squeezed(5,",
        "a forward of its own, which is not converted; hold an nn.BatchNorm1d as a part of it",
    ),
    "F.batch_norm": (
        lambda: lambda x: F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
        "F.batch_norm of a tensor of shape (", OVER_ROWS,
    ),
    "InstanceNorm1d": (lambda: turned(nn.InstanceNorm1d(WIDTH)), "InstanceNorm1d(5,", OVER_ROWS),
    "GroupNorm": (lambda: turned(nn.GroupNorm(1, WIDTH)), "GroupNorm(1, 5,", OVER_ROWS),
    "F.layer_norm": (lambda: lambda x: F.layer_norm(x, x.shape), "F.layer_norm of a", OVER_ROWS),
}  # fmt: skip
RIGHT: dict[str, Make] = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(1, WIDTH),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(WIDTH),
    "GroupNorm of three dimensions": lambda: (
        lambda x: nn.GroupNorm(1, WIDTH)(x[:, :, None].expand(-1, -1, len(x)))
    ),
    "LocalResponseNorm": lambda: lambda x: nn.LocalResponseNorm(2)(x[:, :, None]),
    "in evaluation": lambda: nn.SyncBatchNorm(WIDTH).eval(),
    "InstanceNorm1d in evaluation": lambda: turned(
        nn.InstanceNorm1d(WIDTH, track_running_stats=True).eval()
    ),
    "F.batch_norm of known statistics": lambda: (
        lambda x: F.batch_norm(x, x.detach().mean(0), x.detach().var(0))
    ),
    "F.layer_norm": lambda: lambda x: F.layer_norm(x, (WIDTH,)),
    "rows of no graph": lambda: lambda x: F.batch_norm(x[:7], None, None, training=True),
    "converted": lambda: sar.convert_batch_norm(nn.SyncBatchNorm(WIDTH)),
}


def words_of_norm(make: Make, path: str) -> list[str]:
    """What is said of three calls on the rows of a graph of two ranks."""

    def case(group: Group, path: str) -> None:
        data = sar.load_partition_data(path)
        graph = sar.construct_full_graph(data)
        apply = make()
        for _ in range(3):
            apply(torch.rand(graph.num_nodes(), WIDTH, requires_grad=True))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_threads(2, case, path)
    return [str(one.message) for one in told if one.category is sar.MistakeWarning]


@pytest.fixture
def path(partitioned: Cutter) -> str:
    return partitioned(mixed(), 2, "random")


@pytest.mark.parametrize("which", LOCAL)
def test_norms_over_the_rows_of_one_rank_say_so_once(which: str, path: str) -> None:
    make, name, remedy = LOCAL[which]
    words = words_of_norm(make, path)
    assert len(words) == 1 and words[0].startswith(name) and remedy in words[0], words


@pytest.mark.parametrize("which", RIGHT)
def test_norms_that_no_cut_changes_are_left_alone(which: str, path: str) -> None:
    assert words_of_norm(RIGHT[which], path) == []


def test_a_forward_of_ones_own_is_not_dropped() -> None:
    model = sar.convert_batch_norm(nn.Sequential(Squeezed(WIDTH), nn.BatchNorm1d(WIDTH)))
    assert type(model[0]) is Squeezed and type(model[1]) is sar.DistributedBN1D


def test_torchscript_reads_torchs_own_code(path: str) -> None:
    words_of_norm(nn.Identity, path)
    x = torch.rand(4, WIDTH)
    for norm in (nn.BatchNorm1d(WIDTH), nn.GroupNorm(1, WIDTH), nn.LayerNorm(WIDTH)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert torch.equal(torch.jit.script(norm)(x), norm(x))
