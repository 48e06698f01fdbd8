"""Inputs that ask for a gradient on some ranks only are named on every rank, at their first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dgl import function as fn
from dgl import nn as dglnn
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor

import sar

WIDTH = 4


def update_all(message: Any, reduce: str) -> Callable:
    def run(graph: Any, x: Tensor, w: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.ndata["q"], graph.edata["w"] = x, x.detach(), w
            graph.update_all(message, getattr(fn, reduce)("m", "out"))
            return graph.ndata["out"]

    return run


def lazily(graph: Any, x: Tensor, w: Tensor) -> Tensor:
    with graph.local_scope():
        graph.ndata["h"], graph.edata["w"] = x, w
        graph.apply_edges(fn.u_add_v("h", "h", "z"))
        return torch.tanh(graph.edata["z"]).mean()


def attention(graph: Any, x: Tensor, w: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        layer = dglnn.GATConv(WIDTH, 3, 2, allow_zero_in_degree=True).double()
    for parameter in layer.requires_grad_(False).parameters():
        parameter.fill_(0.1)
    return layer(graph, x)


def scaled(edges: Any) -> dict[str, Tensor]:
    return {"m": edges.src["h"] * edges.data["w"]}


REFUSED = {
    "copy": (update_all(fn.copy_u("h", "m"), "sum"), "x", "column 'h'"),
    "maximum": (update_all(fn.copy_u("h", "m"), "max"), "x", "column 'h'"),
    "weights": (update_all(fn.u_mul_e("h", "w", "m"), "mean"), "w", "column 'w'"),
    "difference": (update_all(fn.u_sub_v("h", "q", "m"), "sum"), "x", "column 'h'"),
    "function": (update_all(scaled, "sum"), "x", "column 'h'"),
    "edges": (lazily, "x", "column 'h'"),
    "attention": (attention, "x", "rows"),
}


def rank_of(group: Any, path: str, asking: dict[str, bool]) -> tuple[Any, Tensor, Tensor]:
    graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, group.rank, "cpu"))
    x = torch.ones(graph.num_nodes(), WIDTH, dtype=torch.float64)
    w = torch.ones(graph.num_edges(), 1, dtype=torch.float64)
    return graph, x.requires_grad_(asking["x"]), w.requires_grad_(asking["w"])


def case_refused(group: Any, path: str, name: str) -> None:
    run, which, column = REFUSED[name]
    mine = group.rank == 1
    graph, x, w = rank_of(group, path, {"x": which == "x" and mine, "w": which == "w" and mine})
    words = rf"{column} requires a gradient on ranks \[1\] of 3 only.*expected the same on all"
    with pytest.raises(ValueError, match=words):
        run(graph, x, w)


@pytest.mark.parametrize("name", REFUSED)
def test_some_ranks_only(name: str, partitioned: Cutter) -> None:
    run_threads(3, case_refused, partitioned(mixed(), 3, "random"), name)


def case_local(group: Any, path: str) -> Tensor | None:
    """Edge rows are local: where their gradient is computed anyway, only some may be wanted."""
    graph, x, w = rank_of(group, path, {"x": True, "w": group.rank == 1})
    run, counts = REFUSED["function"][0], []
    for _ in range(3):
        before = group.counters.collectives
        run(graph, x, w).sum().backward()
        counts.append(group.counters.collectives - before)
    assert counts[2] == counts[1] < counts[0], "agreed once"
    assert w.grad is None or torch.equal(w.grad, torch.full_like(w, 3 * WIDTH))
    return w.grad


def test_what_stays_on_a_rank_may_differ(partitioned: Cutter) -> None:
    found = run_threads(3, case_local, partitioned(mixed(), 3, "random"))
    assert [grad is not None for grad in found] == [False, True, False]


@pytest.mark.parametrize("name", ["attention", "function"])
def test_ranks_that_would_fetch_again_alone_are_told(name: str, partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> None:
        graph, x, w = rank_of(group, path, {"x": True, "w": True})
        graph = graph.with_policy(sar.Policy(rematerialize=group.rank == 1))
        with pytest.raises(ValueError, match=r"backward fetches again\) .*, 0\), .*, 1\), .*, 0\)"):
            REFUSED[name][0](graph, x, w)

    run_threads(3, case, partitioned(mixed(), 3, "random"))


@pytest.mark.parametrize("name", REFUSED)
def test_wishes_do_not_matter_without_gradients(name: str, partitioned: Cutter) -> None:
    """A view of rows that ask asks, too, where their copy would not: on some ranks only."""
    run = REFUSED[name][0]

    def case(group: Any, path: str) -> None:
        found = []
        for asks in (False, group.rank == 1, group.rank != 1):
            graph, x, w = rank_of(group, path, {"x": asks, "w": asks})
            with torch.no_grad():
                found += [run(graph, x, w) for _ in range(2)]
        for out in found[1:]:
            torch.testing.assert_close(out, found[0])

    run_threads(3, case, partitioned(mixed(), 3, "random"))
