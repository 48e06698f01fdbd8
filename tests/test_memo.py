"""What is remembered of edge programs: found again where nothing differs, never where it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, whole
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

import sar

Step = Callable[[Any, Tensor], Tensor]


def steps_agree(steps: list[tuple[Step, Tensor]], partitioned: Cutter, ranks: int = 2) -> None:
    """Steps on one graph, one after the other, equal those of DGL; gradients included."""
    graph = to_dgl(mixed())

    def train(graph: Any, step: Step, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x.detach().clone().requires_grad_(x.requires_grad)
        out = step(graph, x)
        if out.requires_grad:
            (out * out).sum().backward()
        return out.detach(), x.grad

    want = [train(graph, step, x) for step, x in steps]
    path = partitioned(mixed(), ranks, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        for (step, x), (out, grad) in zip(steps, want, strict=True):
            rows = x.detach()[part.nodes].requires_grad_(x.requires_grad)
            got, got_grad = train(part.graph, step, rows)
            close = {"rtol": 1e-5, "atol": 1e-5} if x.dtype == torch.float32 else {}
            torch.testing.assert_close(got, out[part.nodes], **close)
            if grad is not None:
                torch.testing.assert_close(got_grad, grad[part.nodes], **close)

    run_threads(ranks, case)


def rows(width: int = 4, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    made = whole(mixed().total_nodes, (width,), seed=seed).to(dtype)
    return made.requires_grad_()


def attended(factor: Any, change: Callable[[Tensor], Tensor] = lambda e: e) -> Step:
    """AGNN by hand, but for ``change`` of the scores."""

    def step(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"] = x
        graph.apply_edges(fn.u_dot_v("h", "h", "e"))
        scores = graph.edata.pop("e")
        scores = change(scores if factor is None else scores * factor)
        graph.edata["p"] = edge_softmax(graph, scores)
        graph.update_all(fn.u_mul_e("h", "p", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]

    return step


def added(change: Callable[[Tensor], Tensor]) -> Step:
    """Attention with a score from either end, which ``change`` makes anything of."""

    def step(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"], graph.ndata["k"] = x, x.sum(1, keepdim=True)
        graph.apply_edges(fn.u_add_v("k", "k", "e"))
        graph.edata["p"] = edge_softmax(graph, change(graph.edata.pop("e")))
        graph.update_all(fn.u_mul_e("h", "p", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]

    return step


def repeated(times: int) -> Step:
    """Sums of rows that are given several times."""

    def step(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"] = x
        graph.apply_edges(fn.u_sub_v("h", "h", "e"))
        graph.edata["m"] = graph.edata["e"].repeat(1, times)
        graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]

    return step


CHANGES: dict[str, list[tuple[Step, Tensor]]] = {
    "another literal": [(attended(0.5), rows()), (attended(0.25), rows()), (attended(1), rows())],
    "another number of columns": [(repeated(2), rows()), (repeated(3), rows())],
    "another tensor": [
        (attended(torch.tensor([0.5])), rows()),
        (attended(torch.tensor([-2.0])), rows()),
        (attended(torch.tensor(3)), rows()),
    ],
    "another dtype": [(attended(0.5), rows()), (attended(0.5), rows(4, torch.float32))],
    "another width": [(attended(0.5), rows()), (attended(0.5), rows(6)), (attended(0.5), rows(1))],
    "gradients": [
        (attended(0.5), rows()), (attended(0.5), rows().detach()), (attended(0.5), rows()),
    ],
    "another function": [
        (attended(0.5, F.relu), rows()), (attended(0.5, torch.sigmoid), rows()),
        (attended(0.5, lambda e: e.clamp(-1, 1)), rows()),
        (attended(0.5, lambda e: e.clamp(-2, 1)), rows()),
        (added(lambda e: F.leaky_relu(e, 0.5)), rows()), (added(lambda e: F.elu(e, 0.5)), rows()),
        (attended(None, lambda e: e.mul(0.5)), rows()),
        (attended(None, lambda e: e.add(0.5)), rows()),
        (added(lambda e: torch.abs(e).mean(1)[:, None]), rows()),
        (added(lambda e: torch.t(e).mean(0)[:, None]), rows()),
    ],
    "an index": [
        (attended(0.5, lambda e: e[:, torch.tensor([0, 0])].sum(1, keepdim=True)), rows()),
        (attended(0.5, lambda e: e.repeat(1, 2)[:, torch.tensor([1, 0])].mean(1)[:, None]), rows()),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_changed_is_seen(name: str, partitioned: Cutter) -> None:
    steps_agree([*CHANGES[name], *CHANGES[name]], partitioned)


class Message(nn.Module):
    """A message function that reads its mode, a number and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.scale = 1.0

    def forward(self, edges: Any) -> dict[str, Tensor]:
        m = edges.src["h"] * self.weight * self.scale
        return {"m": m.relu() if self.training else m - edges.dst["h"]}


def test_user_functions_are_looked_at_again(partitioned: Cutter) -> None:
    """A mode, an attribute, a variable of the closure and a parameter's wish for a gradient."""
    module, power = Message(), [1]

    def closure(edges: Any) -> dict[str, Tensor]:
        return {"m": (edges.src["h"] - edges.dst["h"]) ** power[0]}

    def sent(function: Any, setting: Callable[[], Any]) -> Step:
        def step(graph: Any, x: Tensor) -> Tensor:
            setting()
            graph.ndata["h"] = x
            graph.update_all(function, fn.sum("m", "out"))
            return graph.ndata["out"]

        return step

    settings: list[tuple[Any, Callable[[], Any]]] = [
        (module, lambda: setattr(module, "scale", 1.0)),
        (module, module.train), (module, module.eval), (module, module.train),
        (module, lambda: module.weight.requires_grad_(False)),
        (module, lambda: setattr(module, "scale", 3.0)),
        (module, lambda: module.weight.requires_grad_(True)),
        (closure, lambda: power.__setitem__(0, 2)), (closure, lambda: power.__setitem__(0, 3)),
    ]  # fmt: skip
    steps = [(sent(*setting), rows()) for setting in settings]
    steps_agree(steps, partitioned, ranks=1)  # ranks that are threads share the module


def test_a_weight_that_is_still_zero_hides_nothing(partitioned: Cutter) -> None:
    """A norm over the edges is one whatever its weight is; a message is not."""
    weight = torch.zeros(1, dtype=torch.float64)

    def step(graph: Any, x: Tensor) -> Tensor:
        graph.ndata["h"] = x
        graph.apply_edges(fn.u_sub_v("h", "h", "e"))
        e = graph.edata["e"]
        with pytest.warns(UserWarning, match="it mixes edges"):
            F.batch_norm(e, None, None, weight.expand(4).clone(), training=True)
        return x

    path = partitioned(mixed(), 1, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        step(part.graph, rows()[part.nodes])

    run_threads(1, case)  # warnings are caught for all threads at once


def test_a_full_table_is_emptied(partitioned: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sar.tracing.memo.MOST", 3)
    steps_agree([(attended(0.5 + number), rows()) for number in range(4)], partitioned)


class Total(Function):
    """Reduces what it gets, which may be an edge tensor, to an eager result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.size = len(x)
        return x.sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.size, -1)


def test_a_function_of_autograd_cannot_lose_a_gradient_in_backward(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        graph = part.graph
        graph.ndata["h"] = rows()[part.nodes]
        graph.apply_edges(fn.u_sub_v("h", "h", "e"))
        total = Total.apply(graph.edata["e"])
        with pytest.raises(sar.NotSupportedError, match="gives .* as its gradient"):
            total.sum().backward()

    run_threads(2, case)
