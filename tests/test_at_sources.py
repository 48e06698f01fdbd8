"""Backward of attention where edges start: the same gradients, and half of the bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.graphs import (
    GraphArrays,
    crossing,
    homogeneous,
    mixed,
    mostly_isolated,
    no_edges,
    repeated,
    ring,
    star,
    to_dgl,
)
from harness.late import run_late
from harness.parts import Cutter
from harness.rows import Part, check_all, join_nodes, results
from harness.rows import whole as whole_rows
from torch import Tensor, nn

import sar
from sar.ops import attention as attention_module
from sar.ops.at_sources import OutEdges

FEATURES, WIDTH, HEADS = 6, 5, 3
Run = Callable[..., list]


def layer(width: int = WIDTH, heads: int = HEADS, **options: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(7)  # ranks are threads
    made = dgl.nn.GATConv(FEATURES, width, heads, allow_zero_in_degree=True, **options).double()
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each backward pass on a rank, whether it went over the edges out of owned rows."""
    noted, choose = [], attention_module.backward_of

    def chosen(sources: Any) -> Any:
        kind = choose(sources)
        noted.append(kind is not attention_module.Backward)
        return kind

    monkeypatch.setattr(attention_module, "backward_of", chosen)
    return noted


def on_ranks(
    graph: GraphArrays, path: str, size: int, make: Callable[[], nn.Module],
    run: Run = run_threads, **policy: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Result and gradients of rows in the graph's order; gradients of parameters summed."""
    module = make()
    x = whole_rows(graph.total_nodes, (FEATURES,), seed=1)
    factor = whole_rows(graph.total_nodes, module(to_dgl(graph), x).shape[1:], seed=2)

    def case(group: Any) -> dict[str, Tensor]:
        part = Part(group, path, sar.Policy(**policy))
        found = results(part.graph, make(), x[part.nodes], factor[part.nodes])
        return {"nodes": part.nodes, **found}

    ranks = run(size, case)
    joined = {name: join_nodes(ranks, name, graph.total_nodes) for name in ("out", "x")}
    shares = [name for name in ranks[0] if name not in ("nodes", "out", "x")]
    return joined | {name: sum(rank[name] for rank in ranks) for name in shares}


def whole(graph: GraphArrays, module: nn.Module) -> dict[str, Tensor]:
    x = whole_rows(graph.total_nodes, (FEATURES,), seed=1)
    twin = to_dgl(graph)
    return results(twin, module, x, whole_rows(len(x), module(twin, x).shape[1:], seed=2))


POLICIES: list[dict] = [{}, {"rounds": 1}, {"rounds": 2}, {"memory_budget": "64KiB"}]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("size", "cut"), [(2, "coarsen"), (3, "random"), (4, "adversarial"), (5, "contiguous")]
)
def test_gradients_equal_dgl(
    size: int, cut: str, policy: dict, partitioned: Cutter, passes: list[bool]
) -> None:
    path = partitioned(mixed(), size, cut)
    check_all(on_ranks(mixed(), path, size, layer, **policy), whole(mixed(), layer()))
    assert passes == [True] * size


@pytest.mark.parametrize(
    "graph", [star, crossing, repeated, ring, mostly_isolated, no_edges], ids=lambda g: g.__name__
)
def test_odd_graphs(graph: Callable[[], GraphArrays], partitioned: Cutter) -> None:
    for cut in ("random", "contiguous"):
        path = partitioned(graph(), 3, cut)
        check_all(on_ranks(graph(), path, 3, layer), whole(graph(), layer()))


def test_rows_that_come_late(partitioned: Cutter, passes: list[bool]) -> None:
    """No buffer is read before it is filled, or filled before it is free."""
    path = partitioned(mixed(), 4, "random")
    check_all(on_ranks(mixed(), path, 4, layer, run_late), whole(mixed(), layer()))
    assert passes == [True] * 4


@pytest.mark.parametrize("policy", [{}, {"rounds": 1}], ids=str)
def test_dropout_of_weights_has_the_same_masks(
    policy: dict, partitioned: Cutter, passes: list[bool]
) -> None:
    """As where edges end, and as on one rank; the edges' names are told once."""

    def run(size: int, **more: Any) -> dict[str, Tensor]:
        def make() -> nn.Module:
            sar.manual_seed(3)
            return layer(attn_drop=0.4)

        return on_ranks(mixed(), partitioned(mixed(), size, "random"), size, make, **more)

    there, here, alone = run(3, **policy), run(3, exchange="pull", **policy), run(1)
    assert passes == [True] * 3 + [False] * 4
    check_all(there, alone)
    check_all(here, alone)


def test_layers_with_and_without_dropout(partitioned: Cutter, passes: list[bool]) -> None:
    """Positions of edges, and their names, are told when the first layer needs them, and once."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sar.manual_seed(3)
            self.dropped, self.whole = layer(attn_drop=0.4), layer()

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return self.whole(graph, self.dropped(graph, x).mean(1).tanh() @ mix)

    mix = whole_rows(WIDTH, (FEATURES,), seed=6)
    path = partitioned(mixed(), 3, "random")
    want = on_ranks(mixed(), partitioned(mixed(), 1), 1, Both)
    check_all(on_ranks(mixed(), path, 3, Both), want)
    assert passes == [False] * 2 + [True] * 6


# What travels


def logged(group: Any) -> list[tuple[int, int]]:
    """(rows sent, numbers of one) of every exchange from now on."""
    log, exchange = [], group.exchange

    def noted(recv: Tensor, send: Tensor, *counts: Any) -> Any:
        log.append((len(send), send[:1].numel() if len(send) else send.shape[1:].numel()))
        return exchange(recv, send, *counts)

    group.exchange = noted
    return log


def case_traffic(group: Any, path: str, widths: list[int]) -> list:
    """Of the second epoch: what was sent forward, and backward; rows of the plans."""
    part = Part(group, path, sar.Policy(rounds=1))
    x = part.node_rows(whole_rows(mixed().total_nodes, (FEATURES,), 1))
    modules, log = [layer(width) for width in widths], logged(group)

    def forward() -> Tensor:
        return sum(module(part.graph, x * 1).sum() for module in modules)  # type: ignore[return-value]

    forward().backward()
    log.clear()
    loss = forward()
    sent = log.copy()
    log.clear()
    loss.backward()
    relation = part.graph.scope().relation
    edges = relation.derived(OutEdges, lambda: None)
    return [sent, log, sum(relation.plan.send_counts), sum(edges.plan.send_counts)]


@pytest.mark.parametrize("size", [2, 4])
def test_destinations_travel_and_scores_come_home(size: int, partitioned: Cutter) -> None:
    """Of two layers over the same edges; whatever is told is told in the first epoch."""
    path = partitioned(mixed(), size, "random")
    for forward, backward, starts, ends in run_threads(size, case_traffic, path, [WIDTH, 4]):
        assert forward == [(starts, HEADS * (width + 1)) for width in (WIDTH, 4)]
        there = [(rows, numbers) for rows, numbers in backward if numbers > HEADS]
        assert sorted(there) == [(ends, HEADS * (width + 4)) for width in (4, WIDTH)]
        home = [numbers for _, numbers in backward if numbers <= HEADS]
        assert home == [HEADS, HEADS]


@pytest.mark.parametrize("fans_out", [True, False])
def test_whichever_rows_are_fewer(fans_out: bool, partitioned: Cutter, passes: list[bool]) -> None:
    """One source with many ends is sent as it is; of many sources with one end the end is."""
    hub, others = [0] * 30, [*range(1, 31)]
    graph = homogeneous("fan", 31, *((hub, others) if fans_out else (others, hub)))
    path = partitioned(graph, 2, [0] + [1] * 30)
    check_all(on_ranks(graph, path, 2, layer), whole(graph, layer()))
    assert passes == [not fans_out] * 2


def test_a_budget_that_holds_rows_of_starts_only(partitioned: Cutter, passes: list[bool]) -> None:
    """All pairs of ranks have many starts and an end; one pair has more ends than fit."""
    size, few, many = 5, 10, 60
    owner = torch.arange(size).repeat_interleave(few + 1).tolist() + [0] + [1] * many
    hub, first = size * (few + 1), [rank * (few + 1) for rank in range(size)]
    edges = [(hub, hub + 1 + leaf) for leaf in range(many)]
    for a in range(size):
        edges += [(first[a] + n, first[b] + few) for b in range(size) if b != a for n in range(few)]
    graph = homogeneous("one_pair", len(owner), *zip(*edges, strict=True))
    path = partitioned(graph, size, owner)
    starts = HEADS * (WIDTH + 1) * 16 * (4 * few + 3)  # bytes, both ways in two rounds
    for budget, there in ((starts, False), (4 * starts, True)):
        check_all(on_ranks(graph, path, size, layer, memory_budget=budget), whole(graph, layer()))
        assert passes == [there] * size
        passes.clear()
