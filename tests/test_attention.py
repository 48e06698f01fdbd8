"""Attention kernels: which programs they take, and that they equal the generic path and DGL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, compare, whole
from torch import Tensor
from torch.nn import functional as F

import sar
from sar.comm import ThreadGroup
from sar.tracing import reducing

HEADS = 3
Step = Callable[[Any, Tensor], Tensor]


def gat(graph: Any, x: Tensor) -> Tensor:
    rows = x[:, : HEADS * 2].reshape(len(x), HEADS, 2)
    graph.srcdata.update({"ft": rows, "el": rows.sum(-1, keepdim=True)})
    graph.dstdata["er"] = (rows * rows).sum(-1, keepdim=True)
    graph.apply_edges(fn.u_add_v("el", "er", "e"))
    graph.edata["a"] = edge_softmax(graph, F.leaky_relu(graph.edata.pop("e"), 0.2))
    graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


def gat_linear(graph: Any, x: Tensor) -> Tensor:
    """No activation, one head without an axis of its own, the weight first."""
    graph.srcdata.update({"ft": x, "el": x[:, :1]})
    graph.dstdata["er"] = x[:, 1:2]
    graph.apply_edges(fn.v_add_u("er", "el", "e"))
    graph.edata["a"] = edge_softmax(graph, graph.edata["e"])
    graph.update_all(fn.e_mul_u("a", "ft", "m"), fn.mean("m", "out"))
    return graph.dstdata["out"]


def gatv2(graph: Any, x: Tensor) -> Tensor:
    rows = x[:, : HEADS * 2].reshape(len(x), HEADS, 2)
    attn = torch.linspace(-1, 1, HEADS * 2, dtype=x.dtype).view(1, HEADS, 2)
    graph.srcdata["el"], graph.dstdata["er"] = rows, rows.flip(-1)
    graph.apply_edges(fn.u_add_v("el", "er", "e"))
    e = F.leaky_relu(graph.edata.pop("e"), 0.1)
    e = (e * attn).sum(dim=-1, keepdim=True)
    graph.edata["a"] = edge_softmax(graph, e)
    graph.update_all(fn.u_mul_e("el", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


def dot(graph: Any, x: Tensor) -> Tensor:
    """Keys that are not the values."""
    rows = x[:, : HEADS * 2].reshape(len(x), HEADS, 2)
    graph.srcdata.update({"k": rows.flip(-1), "v": rows * 2})
    graph.dstdata["q"] = rows
    graph.apply_edges(fn.u_dot_v("k", "q", "e"))
    graph.edata["a"] = edge_softmax(graph, graph.edata["e"] / 2**0.5)
    graph.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


STEPS: dict[str, Step] = {"gat": gat, "linear": gat_linear, "gatv2": gatv2, "dot": dot}


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each sum of an edge program went to a kernel; ``off`` among it turns that off."""
    seen: list[bool] = []
    original = reducing.attend_if_matched

    def spy(messages: Any) -> Tensor | None:
        out = None if "off" in seen else original(messages)
        seen.append(out is not None)
        return out

    monkeypatch.setattr(reducing, "attend_if_matched", spy)
    yield seen


def scored(score: Callable, op: Any = fn.u_add_v, **columns: Callable) -> Step:
    """Attention over 3 heads of width 2 with scores made of the edges' column."""

    def step(graph: Any, x: Tensor) -> Tensor:
        rows = x[:, :6].reshape(len(x), 3, 2)
        made = {"ft": rows, "el": rows.flip(-1), "er": rows}
        made.update({name: make(rows) for name, make in columns.items()})
        graph.srcdata.update({"ft": made["ft"], "el": made["el"]})
        graph.dstdata["er"] = made["er"]
        graph.apply_edges(op("el", "er", "e"))
        graph.edata["a"] = edge_softmax(graph, score(graph.edata["e"]))
        graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
        return graph.dstdata["out"]

    return step


ATTN = torch.linspace(-1, 1, 6, dtype=torch.float64).view(1, 3, 2)


def dot_scores(score: Callable) -> Step:
    return scored(score, fn.u_dot_v)


def total(rows: Tensor) -> Tensor:
    return rows.sum(-1, keepdim=True)


def minus_infinity(rows: Tensor) -> Tensor:
    return rows.sum(-1, keepdim=True).masked_fill(rows[..., :1] > 0, -torch.inf)


LIKE_DGL: dict[str, tuple[Step, bool]] = {
    "floor": (dot_scores(lambda e: torch.div(e, 2, rounding_mode="floor")), False),
    "times a tensor of one number": (dot_scores(lambda e: torch.tensor([3.0]).double() * e), True),
    "by a tensor of one number": (dot_scores(lambda e: e * torch.tensor(-2.0)), True),
    "times a number a head": (dot_scores(lambda e: e * ATTN[..., :1]), False),
    "by zero": (dot_scores(lambda e: e / 0), False),
    "an axis more": (scored(lambda e: total(e * ATTN).unsqueeze(-1)), False),
    "by name": (scored(lambda e: torch.sum(input=e * ATTN, dim=-1, keepdim=True)), True),
    "axis by name": (
        scored(lambda e: torch.unsqueeze(input=(e * ATTN).sum(-1), dim=-1)),
        True,
    ),
    "flat values": (
        scored(lambda e: e, ft=lambda r: r.sum((1, 2)), el=lambda r: r[:, 0, :1],
               er=lambda r: r[:, 1, :1]),
        False,
    ),
    "all but a few scores -inf": (scored(lambda e: e, el=minus_infinity, er=total), True),
    "written into": (lambda graph, x: F.relu_(gat(graph, x)), True),
    **{name: (step, True) for name, step in STEPS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", LIKE_DGL)
def test_what_looks_like_attention_equals_dgl(
    name: str, partitioned: Cutter, matches: list
) -> None:
    """By a kernel or not: other arguments than one knows, scores of -inf, a written result."""
    step, matched = LIKE_DGL[name]
    for policy in ({}, {"rounds": 1}, {"rematerialize": False}) if name in STEPS else ({},):
        compare(step, partitioned, 6, **policy)
    assert set(matches) == {matched}


def test_scores_that_are_not_numbers_stay_visible(partitioned: Cutter) -> None:
    path, x = partitioned(mixed(), 2, "random"), whole(mixed().total_nodes, (6,), seed=1)
    x[3], x[5] = torch.nan, torch.inf
    want = gat(to_dgl(mixed()), x)
    assert want.isnan().any() and want.isfinite().any()

    def case(group: Any) -> None:
        part = Part(group, path)
        out = gat(part.graph, x[part.nodes])
        torch.testing.assert_close(out, want[part.nodes], rtol=1e-11, atol=1e-11, equal_nan=True)

    run_threads(2, case)


@pytest.mark.parametrize("reduce", [fn.sum, fn.max], ids=["sum", "max"])
def test_a_softmax_read_without_gradients_keeps_its_gradient(
    reduce: Callable, partitioned: Cutter, matches: list
) -> None:
    matches.append("off")

    def step(graph: Any, x: Tensor, look: bool = False) -> Tensor:
        graph.srcdata.update({"ft": x, "el": x[:, :1]})
        graph.apply_edges(fn.u_add_v("el", "el", "e"))
        graph.edata["a"] = edge_softmax(graph, graph.edata["e"])
        if look:
            with torch.no_grad():
                graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.max("m", "seen"))
        graph.update_all(fn.u_mul_e("ft", "a", "m"), reduce("m", "out"))
        return graph.dstdata["out"]

    compare(lambda graph, x: step(graph, x, look=True), partitioned, 6, step)


# Sources that ask for no gradient: backward reads their rows again and sends nothing home.


def queried(kind: str, graph: Any, x: Tensor, q: Tensor) -> Tensor:
    """Attention with constant keys and values, and queries that are learned."""
    rows = x.view(len(x), 1, -1)
    if kind == "additive":
        graph.srcdata.update({"k": rows.sum(-1, keepdim=True), "v": rows})
        graph.dstdata["q"] = q.view(len(q), 1, -1).sum(-1, keepdim=True)
        graph.apply_edges(fn.u_add_v("k", "q", "e"))
    else:
        graph.srcdata.update({"k": rows, "v": rows * 2})
        graph.dstdata["q"] = q.view(len(q), 1, -1)
        graph.apply_edges((fn.u_dot_v if kind == "dot" else fn.u_add_v)("k", "q", "e"))
    e = graph.edata.pop("e")
    if kind == "mixed":
        e = (F.leaky_relu(e, 0.1) * q[:0].new_ones(1, 1, x.shape[1])).sum(-1, keepdim=True)
    graph.edata["a"] = edge_softmax(graph, e)
    graph.update_all(fn.u_mul_e("v", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


def case_constant_sources(group: Any, path: str, kind: str, grad: bool) -> tuple:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data, sar.Policy(rounds=2))
    x = data.node_features["_N/feat"].double().requires_grad_(grad)
    q = data.node_features["_N/feat"].double().flip(1).requires_grad_()
    before = group.counters.sent_bytes, group.counters.collectives
    out = queried(kind, graph, x, q)
    between = group.counters.sent_bytes, group.counters.collectives
    (out * torch.arange(1, len(out) + 1).view(-1, 1, 1)).sum().backward()
    fetched, rounds = between[0] - before[0], between[1]
    returned = group.counters.sent_bytes - between[0] - fetched
    return q.grad, returned, group.counters.collectives - rounds, x.grad


@pytest.mark.parametrize("kind", ["additive", "mixed", "dot"])
def test_constant_sources_get_nothing_home(kind: str, partitioned: Cutter, matches: list) -> None:
    path = partitioned(mixed(), 3, "random")
    expected = run_threads(3, case_constant_sources, path, kind, True)
    found = run_threads(3, case_constant_sources, path, kind, False)
    assert all(matches)
    for (grad, returned, collectives, x_grad), other in zip(expected, found, strict=True):
        torch.testing.assert_close(other[0], grad, rtol=1e-12, atol=1e-12)
        asked = 1  # whether anybody wrote into the result
        told = 8 if kind == "additive" else 0  # once: the edges out of owned rows
        assert returned > 0 and collectives == 4 + asked + told
        assert other[1] == 0 and other[2] == 2 + asked, "rows are fetched again, and that is all"
        assert x_grad is not None and other[3] is None


@pytest.mark.parametrize("exchange", ["auto", "pull"])
@pytest.mark.parametrize(
    ("activations", "has_wire", "most"),
    [("keep", True, [4, 4]), ("keep", False, [4, 2]), ("recompute", True, [2, 2])],
)
def test_buffers_of_rounds(
    activations: str,
    has_wire: bool,
    most: list[int],
    exchange: str,
    partitioned: Cutter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward has no more wide ones than forward: rows in use, the next, and gradients on their
    way; those that come home lie where rows were. Rows that do not travel meanwhile are not sent
    for."""
    monkeypatch.setattr(ThreadGroup, "has_wire", has_wire)
    path, policy = partitioned(mixed(), 4, "random"), sar.Policy(exchange=exchange)

    def case(group: Any) -> list[int]:
        held, heads = [0], 3
        take, give = group.pool.take, group.pool.give

        def taken(*arguments: Any) -> Tensor:
            buffer = take(*arguments)
            held.append(held[-1] + int(buffer.shape[1] > heads))
            return buffer

        def given(buffer: Tensor) -> None:
            held.append(held[-1] - int(buffer.shape[1] > heads))
            give(buffer)

        group.pool.take, group.pool.give = taken, given
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        layer = dgl.nn.GATConv(6, 5, heads, allow_zero_in_degree=True)
        sar.set_activations(layer, activations)
        x = data.node_features["_N/feat"].float().requires_grad_()
        loss = layer(sar.construct_full_graph(data, policy), x).sum()
        forward, held[:] = max(held), held[-1:]
        loss.backward()
        assert held[-1] == 0
        return [forward, max(held)]

    assert run_threads(4, case) == [most] * 4
