"""Linear layers of what an activation made, which is made again in backward: torch's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from test_arriving import HEADS, WIDTH, check, make, on_ranks, whole
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

import sar
from sar.ops import linear_sum, remade
from sar.ops.remade import remade_linear

ROWS, WIDTH_IN, WIDTH_OUT = 7, 4, 3
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "elu with a constant": lambda x: F.elu(x, 0.5),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky relu": F.leaky_relu,
    "leaky relu with a slope": lambda x: F.leaky_relu(x, 0.3),
    "silu": F.silu,
    "softplus": F.softplus,
    "softplus with constants": lambda x: F.softplus(x, 2, 1),
}


def written_unseen(x: Tensor) -> Tensor:
    rows = F.elu(x)
    with torch.no_grad():
        rows.mul_(2)
    return rows


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu, which saves its result": F.relu,
    "tanh": torch.tanh,
    "a view": lambda x: F.elu(x).t().t(),
    "in place": lambda x: F.elu_(x * 1),
    "written into": lambda x: F.elu(x).mul_(2),
    "written into unseen": written_unseen,
    "dropped": lambda x: F.dropout(F.elu(x), 0.5),
    "no activation": lambda x: x * 2,
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaves() -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    x = drawn(ROWS, WIDTH_IN).mul_(2).requires_grad_()
    return x, nn.Parameter(drawn(WIDTH_OUT, WIDTH_IN, seed=1)), nn.Parameter(drawn(3, seed=2))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_numbers_are_those_of_torch(name: str, with_bias: bool) -> None:
    found = []
    for linear in (F.linear, remade_linear):
        x, weight, bias = leaves()
        rows = ACTIVATIONS[name](x * 1)
        out: Any = linear(rows, weight, bias if with_bias else None)
        assert (type(out.grad_fn).__name__ == "_RemadeLinearBackward") is (linear is remade_linear)
        memory = StorageWeakRef(rows.untyped_storage())
        del rows
        assert memory.expired() is (linear is remade_linear)
        out.sin().sum().backward()
        found.append([out, x.grad, weight.grad, bias.grad])
    for got, want in zip(found[1], found[0], strict=True):
        assert got is want or torch.equal(got, want)


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_left_to_torch(name: str) -> None:
    x, weight, bias = leaves()
    assert remade_linear(OTHERS[name](x), weight, bias) is None


def test_who_looks_at_saved_tensors_finds_those_of_torch() -> None:
    x, weight, bias = leaves()
    with save_on_cpu():
        assert remade_linear(F.elu(x), weight, bias) is None
    with torch.no_grad():
        assert remade_linear(F.elu(x), weight, bias) is None
    source = x * 1
    rows = F.elu(source)
    source.zero_()  # what elu saved is gone, as its backward pass says
    assert remade_linear(rows, weight, bias) is None
    rows = F.elu(source)
    out = remade_linear(rows, weight, bias)
    source.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["elu", "gelu", "softplus"])
def test_gradients_and_theirs(name: str) -> None:
    def both(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = ACTIVATIONS[name](x * 1)
        out = remade_linear(rows, weight, bias)
        assert out is not None
        return out + rows[:, :WIDTH_OUT]  # two readers

    assert gradcheck(both, leaves()) and gradgradcheck(both, leaves())


@pytest.mark.parametrize("frozen", [["weight"], ["x"], ["bias"], ["weight", "bias"]], ids=str)
def test_only_what_is_asked_for(frozen: list[str]) -> None:
    found = []
    for linear in (F.linear, remade_linear):
        named = dict(zip(("x", "weight", "bias"), leaves(), strict=True))
        for name in frozen:
            named[name].requires_grad_(False)
        rows = F.elu(named["x"])
        out = linear(rows, named["weight"], named["bias"])
        if out is None:  # x: nothing was saved for it
            assert frozen == ["x"]
            continue
        out.sum().backward()
        found.append([tensor.grad for tensor in named.values()])
    assert len(found) == 2 or frozen == ["x"]
    assert str(found[0]) == str(found[-1])


class Layers(nn.Module):
    """Three layers of attention with elu between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(9)
        self.first = make(kind)
        layer = type(self.first)
        self.rest = nn.ModuleList(
            layer(HEADS * WIDTH, WIDTH, HEADS, allow_zero_in_degree=True) for _ in range(2)
        ).double()
        for parameter in self.rest.parameters():
            parameter.data.normal_(generator=generator).mul_(0.5)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.first(graph, x)
        for layer in self.rest:
            x = layer(graph, F.elu(x.flatten(1)))
        return x


@pytest.mark.parametrize("policy", [{}, {"rounds": 1}, {"rematerialize": False}], ids=str)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_layers_equal_dgl(
    kind: str, policy: dict, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    apply = remade._RemadeLinear.apply
    monkeypatch.setattr(remade._RemadeLinear, "apply", lambda *a: made.append(a) or apply(*a))
    got, _ = on_ranks(partitioned(mixed(), 3, "random"), 3, lambda rank: Layers(kind), **policy)
    assert len(made) == 3 * (2 if kind == "gat" else 4)  # GATv2 projects either end
    check(got, whole(Layers(kind)))


def test_what_layers_keep(partitioned: Cutter) -> None:
    """Neither what elu made nor the values of a first layer whose input travels."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> dict[str, bool]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        layers = Layers("gat")
        made: dict[str, StorageWeakRef] = {}
        x = layers.first(graph, data.node_features["_N/feat"].double())
        made["first"] = StorageWeakRef(x.untyped_storage())
        x = F.elu(x.flatten(1))
        made["activated"] = StorageWeakRef(x.untyped_storage())
        x = layers.rest[0](graph, x)
        made["second"] = StorageWeakRef(x.untyped_storage())
        loss = x.sum()
        del x
        kept = {name: not memory.expired() for name, memory in made.items()}
        loss.backward()
        return kept | {f"{name} then": not memory.expired() for name, memory in made.items()}

    names = ("first", "activated", "second")
    want = {"first": True, "activated": False, "second": True}
    assert run_threads(2, case) == [want | {f"{name} then": False for name in names}] * 2


def test_values_of_rows_that_travel_are_not_kept(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = partitioned(mixed(), 2, "random")
    values: dict[int, StorageWeakRef] = {}
    note = linear_sum.note_linear

    def noted(out: Tensor, *made_of: Any) -> None:
        note(out, *made_of)
        values[sar.comm.current_group().rank] = StorageWeakRef(out.untyped_storage())

    monkeypatch.setattr(linear_sum, "note_linear", noted)

    def case(group: Any) -> bool:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        out = make("gat")(sar.construct_full_graph(data), data.node_features["_N/feat"].double())
        gone = values[group.rank].expired()
        out.sum().backward()
        return gone

    assert run_threads(2, case) == [True, True]
