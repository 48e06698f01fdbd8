"""Sums handed out while rows for them travel: computed meanwhile, DGL's numbers, whole for whoever
looks, and no rank left behind by an error."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import dgl.nn
import pytest
import torch
from harness.graphs import mixed, to_dgl
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, results, whole
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sar
from sar.comm import Group
from sar.ops.late_rows import late_rows

aggregate_module = sys.modules["sar.ops.aggregate"]
WIDTH = 4
SIZE = 3


class Own(nn.Module):
    """A linear layer that hands what it gets to a function that no mode sees."""

    class _Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            with torch._C.DisableTorchFunction():
                return x @ weight

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
            x, weight = ctx.saved_tensors
            return dy @ weight.t(), x.t() @ dy

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self._Product.apply(x, self.weight)


def sage(width: int = WIDTH, kind: str = "mean", **parts: nn.Module) -> nn.Module:
    conv = dgl.nn.SAGEConv(WIDTH, width, kind)
    for name, part in parts.items():
        setattr(conv, name, part)
    return conv


class Twice(nn.Module):
    """The second layer reads the first one's rows, and both travel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = sage(), sage()

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "products": sage,
    "narrow": lambda: sage(width=2),  # multiplied before it is summed
    "two": Twice,
    "own product of rows": lambda: sage(fc_neigh=Own()),
    "own product of the own rows": lambda: sage(fc_self=Own()),
    "activation": lambda: dgl.nn.SAGEConv(WIDTH, WIDTH, "mean", activation=torch.tanh),
    "gcn": lambda: sage(kind="gcn"),
    "pool": lambda: sage(kind="pool"),
}


@pytest.mark.parametrize("rounds", [1, SIZE - 1])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_dgl(name: str, rounds: int, partitioned: Cutter) -> None:
    arrays, layer = mixed(), LAYERS[name]().double()
    rows = whole(arrays.total_nodes, (WIDTH,), seed=1)
    factor = whole(arrays.total_nodes, (1,), seed=2)
    want = results(to_dgl(arrays), copy.deepcopy(layer), rows, factor)
    path = partitioned(arrays, SIZE, "random")

    def case(group: Group) -> None:
        part, mine = Part(group, path, sar.Policy(rounds=rounds)), copy.deepcopy(layer)
        for _ in range(2):
            mine.zero_grad()
            got = results(part.graph, mine, rows[part.nodes], factor[part.nodes])
            for key, value in got.items():
                expected = want[key][part.nodes] if key in ("out", "x") else want[key]
                if key not in ("out", "x"):
                    value = group.all_reduce(value.clone())
                torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)

    run_late(SIZE, case)


def test_own_rows_are_multiplied_while_others_travel(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = partitioned(mixed(), 2, "random"), threading.local()
    add = aggregate_module.spmm_add

    def noting(*args: Any) -> Any:
        seen.order.append("rows of others")
        return add(*args)

    monkeypatch.setattr(aggregate_module, "spmm_add", noting)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
                seen.order.append("own product")
            return func(*args, **(kwargs or {}))

    def case(group: Group) -> list[str]:
        part, conv = Part(group, path), sage().double()
        x = whole(57, (WIDTH,), seed=1)[part.nodes].requires_grad_()
        for _ in range(2):  # what is measured once has run
            seen.order = []
            with Products():
                conv(part.graph, x)
        return seen.order

    for order in run_late(2, case):
        assert order[0] == "own product" and "rows of others" in order


@pytest.mark.parametrize("failing", [1, SIZE])
def test_an_error_between_leaves_nobody_behind(failing: int, partitioned: Cutter) -> None:
    """The first ranks' layers fail; the others get their rows, and everybody can go on."""
    path = partitioned(mixed(), SIZE, "random")
    rows = whole(mixed().total_nodes, (WIDTH,), seed=1)
    good = sage().double()
    want = good(to_dgl(mixed()), rows).detach()

    def case(group: Group) -> None:
        part, mine = Part(group, path), copy.deepcopy(good)
        own = rows[part.nodes].requires_grad_()
        if group.rank < failing:
            wrong = sage(fc_self=nn.Linear(WIDTH + 1, WIDTH)).double()
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                wrong(part.graph, own)
        else:
            torch.testing.assert_close(mine(part.graph, own), want[part.nodes])
        assert late_rows() is None
        torch.testing.assert_close(mine(part.graph, own), want[part.nodes])

    run_late(SIZE, case)
