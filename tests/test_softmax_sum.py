"""Sums weighted by a softmax: one stream of rows where the message is linear in it, DGL's numbers
everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness.compare import assert_gradients_close
from harness.graphs import looped, mixed
from harness.parts import Cutter
from test_edge_inputs import assert_exact, on_ranks, reference
from torch import Tensor, nn
from torch.nn import functional as F

from sar.tracing import reducing

HEADS, WIDTH = 3, 2
Step = Callable[..., Tensor]  # of a graph, rows, edge weights (and edge types)
BLOCKS = {"block_bytes": 2048}


def made_of(step: Step) -> Callable[[], tuple[Step, None]]:
    return lambda: (step, None)


def prepare(graph: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(attention weights [E, 3, 1], what they weigh [E, 3, 2], scores [E, 3, 1])."""
    rows = x.reshape(len(x), HEADS, WIDTH)
    graph.srcdata.update({"v": rows, "k": rows.flip(-1)})
    graph.dstdata["q"] = rows * rows
    graph.edata["w"] = w
    graph.apply_edges(fn.u_dot_v("k", "q", "z"))
    graph.apply_edges(fn.copy_u("v", "c"))
    z = graph.edata["z"] * 2 + graph.edata["w"].view(-1, 1, 1)
    return edge_softmax(graph, z), graph.edata["c"], z


def summed(message: Callable, reduce: Callable = fn.sum) -> Step:
    """Messages made of the weights a, values v, scores z, edge weights w, and other weights b."""

    def step(graph: Any, x: Tensor, w: Tensor, _: Any = None) -> Tensor:
        a, v, z = prepare(graph, x, w)
        names = message.__code__.co_varnames[: message.__code__.co_argcount]
        given = {"a": a, "v": v, "z": z, "w": graph.edata["w"].view(-1, 1, 1)}
        if "b" in names:
            given["b"] = edge_softmax(graph, a if "nested" in names else -z)
        given["nested"] = None
        graph.edata["m"] = message(*[given[name] for name in names])
        graph.update_all(fn.copy_e("m", "m"), reduce("m", "out"))
        return graph.dstdata["out"]

    return step


def by_function(message: Callable) -> Step:
    """The same in a function of the user's own."""

    def step(graph: Any, x: Tensor, w: Tensor, _: Any = None) -> Tensor:
        graph.edata["a"] = prepare(graph, x, w)[0]

        def of_edges(edges: Any) -> dict[str, Tensor]:
            return {"m": message(edges.data["a"], edges.src["v"])}

        graph.update_all(of_edges, fn.sum("m", "out"))
        return graph.dstdata["out"]

    return step


def of_ops(graph: Any, x: Tensor, w: Tensor, _: Any = None) -> Tensor:
    return dgl.ops.u_mul_e_sum(graph, x.reshape(len(x), HEADS, WIDTH), prepare(graph, x, w)[0])


MIX = torch.linspace(-1, 2, 8, dtype=torch.float64).view(4, 2)
STREAMED: dict[str, Step] = {
    "values": summed(lambda a, v: v * a),
    "mean": summed(lambda a, v: v * a, fn.mean),
    "weighted": summed(lambda a, v, w: (a * w) * v / (1 + w * w)),
    "scores, too": summed(lambda a, v, z: v * a * z.tanh()),
    "alone": summed(lambda a: a.squeeze(-1)),
    "views": summed(lambda a, v: (v.transpose(1, 2) * a.view(len(a), 1, HEADS)).flatten(1)),
    "one head": summed(lambda a, v: a[:, 1] * v[:, 2]),
    "inner product": summed(lambda a, v, w: ((v * a) * w).sum(-1)),
    "inner mean": summed(lambda a, v: -(a * v).mean(dim=2, keepdim=True)),
    "projected": summed(lambda a, v: F.linear(a * v, MIX.to(v.dtype)) @ MIX.to(v.dtype)),
    "einsum": summed(lambda a, v: torch.einsum("eh,ehd->edh", a.squeeze(-1), v)),
    "parts": summed(lambda a, v: torch.cat([h * v[:, 0] for h in a.unbind(1)], 1)),
    "added": summed(lambda a, v, w: a * v + w * a),
    "of two": summed(lambda a, v, b: a * v * b),
    "softmax of softmax": summed(lambda a, v, b, nested: a * b * v),
    "function": by_function(lambda a, v: {"m": a * v}["m"]),
    "function with views": by_function(lambda a, v: (a.squeeze(-1) * v.sum(-1)).unsqueeze(1) * 2),
    "dgl.ops": of_ops,
}
SLOW: dict[str, Step] = {
    "squared": summed(lambda a, v: a * a * v),
    "exponential": summed(lambda a, v: a.exp() * v),
    "shifted": summed(lambda a, v: a + v),
    "a number added": summed(lambda a, v: (a + 1) * v),
    "divisor": summed(lambda a, v: v / (1 + a) + 1 / a.clamp(min=0.1)),
    "sum of two": summed(lambda a, v, b: a * v + b),
    "maximum": summed(lambda a, v: a * v, fn.max),
    "over heads": summed(lambda a, v: (a * v).sum(1)),
    "clamped": summed(lambda a, v: (a * v).clamp(max=0.2)),
    "floor": summed(lambda a, v: torch.div(a, 0.3, rounding_mode="floor") * v),
    "constant": summed(lambda a, v, w: a.detach() * v * w),
    "of its softmax": summed(lambda a, v, b, nested: a * b.exp() * v),
    "function of a square": by_function(lambda a, v: a * v * a.detach()),
    "function with a test": by_function(lambda a, v: a * v if a.max() > 2 else a * v + a),
}


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each sum of an edge program, which no kernel took, was done in one stream."""
    seen: list[bool] = []
    original = reducing.weighted_by

    def spy(messages: Any) -> Any:
        found = original(messages)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(reducing, "weighted_by", spy)
    monkeypatch.setattr(reducing, "attend_if_matched", lambda *_: None)
    yield seen


@pytest.mark.parametrize("name", [*STREAMED, *SLOW])
def test_linear_messages_are_streamed_once_and_all_equal_dgl(
    name: str, partitioned: Cutter, streamed: list
) -> None:
    linear = name in STREAMED
    assert_exact(mixed(), made_of((STREAMED | SLOW)[name]), partitioned, (3,), **BLOCKS)
    assert streamed == ([] if name == "maximum" else [linear] * 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "policy", [{"rounds": 1}, {"rounds": 2}, {"rematerialize": False}, {}], ids=str
)
def test_any_ranks_rounds_and_cut(size: int, policy: dict, partitioned: Cutter) -> None:
    if policy.get("rounds", 1) >= max(2, size):
        pytest.skip("fewer ranks than rounds")
    make = made_of(STREAMED["weighted"])
    for cut in ("random", "coarsen"):
        got = on_ranks(partitioned(mixed(), size, cut), size, make, **BLOCKS, **policy)
        assert_gradients_close(got, reference(mixed(), *make()), torch.float64, cut)


class OfEdges(nn.Module):
    """A layer that takes edge features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, graph: Any, x: Tensor, w: Tensor) -> Tensor:
        if isinstance(self.conv, dgl.nn.AGNNConv):
            return self.conv(graph, x)
        if isinstance(self.conv, dgl.nn.GATConv):
            return self.conv(graph, x, edge_weight=w)
        rows = self.conv(graph, x, w.view(-1, 1))
        return rows[0] if isinstance(self.conv, dgl.nn.EGATConv) else rows


ZERO = {"allow_zero_in_degree": True}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "AGNNConv": lambda: OfEdges(dgl.nn.AGNNConv(1.5, **ZERO)),
    "GATConv": lambda: OfEdges(dgl.nn.GATConv(6, WIDTH, HEADS, residual=True, **ZERO)),
    "EGATConv": lambda: OfEdges(dgl.nn.EGATConv(6, 1, WIDTH, 4, HEADS)),
}


def counted(step: Step, sent: list[list[int]]) -> Step:
    """Notes in ``sent[rank]`` how many numbers each exchange of rows sends."""

    def counting(graph: Any, *given: Any) -> Tensor:
        if not isinstance(graph, dgl.DGLGraph):
            exchange, mine = graph.group.exchange, sent[graph.group.rank]

            def noted(recv: Tensor, send: Tensor, *counts: Any) -> Any:
                mine.append(send.numel())
                return exchange(recv, send, *counts)

            graph.group.exchange = noted
        return step(graph, *given)

    return counting


@pytest.mark.parametrize("name", LAYERS)
def test_layers_stream_their_rows_three_times(name: str, partitioned: Cutter) -> None:
    """Once in forward; in backward rows again and gradients home. Equal to DGL, too."""
    sent: list[list[int]] = [[], []]

    def make() -> tuple[Step, nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = LAYERS[name]().double()
        return counted(lambda graph, x, w, _: module(graph, x, w), sent), module

    arrays = looped() if name == "EGATConv" else mixed()
    assert_exact(arrays, make, partitioned, (2,), rounds=1, **BLOCKS)
    rows, again, home = torch.tensor(sent).sum(0).tolist()  # three of each rank
    assert rows == again == home


def test_a_result_that_is_written_into(partitioned: Cutter, streamed: list) -> None:
    """Among its scores are some of -inf."""

    def step(graph: Any, x: Tensor, w: Tensor, _: Any = None) -> Tensor:
        _, v, z = prepare(graph, x, w)
        low = graph.edata["w"].view(-1, 1, 1) < 0.6  # weights are 0.5 to 1.5
        graph.edata["m"] = v * edge_softmax(graph, z.masked_fill(low, -torch.inf))
        graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
        return F.relu_(graph.dstdata["out"])

    assert_exact(mixed(), made_of(step), partitioned, (3,), **BLOCKS)
    assert all(streamed)


@pytest.mark.parametrize(
    ("scores", "streams"), [("given", 2), ("learned", 3), ("added", 3), ("function", 3)]
)
def test_what_backward_fetches(
    scores: str, streams: int, partitioned: Cutter, streamed: list
) -> None:
    """Rows again only where the gradient of a weight asks for them; never for a normalizer."""

    def step(graph: Any, x: Tensor, w: Tensor, _: Any = None) -> Tensor:
        graph.srcdata["v"], graph.edata["w"] = x, w.view(-1, 1) * 3
        z = {"given": lambda: graph.edata["w"].detach(), "learned": lambda: graph.edata["w"]}
        one = (w * 0).sum() + 1  # captured, with a gradient
        if scores == "added":
            graph.apply_edges(fn.e_add_u("w", "v", "z"))
        elif scores == "function":
            graph.edata["given"] = graph.edata["w"].detach()
            graph.apply_edges(lambda edges: {"z": edges.data["given"] * one})
        graph.edata["a"] = edge_softmax(graph, z.get(scores, lambda: graph.edata["z"])())
        graph.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
        return graph.dstdata["out"] + (w * 0).sum()

    sent: list[list[int]] = [[], []]
    make = made_of(counted(step, sent))
    assert_exact(mixed(), make, partitioned, (2,), rounds=1, **BLOCKS)
    assert streamed == [True] * 2
    assert [len(one) for one in sent] == [streams] * 2
