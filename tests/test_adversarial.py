"""Graphs and cuts that leave a rank without nodes, edges, seeds or neighbors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl import function as fn
from harness import WorkerPool, assert_close, run_threads
from harness.covering import by_pairs
from harness.graphs import mixed, sample, to_dgl
from harness.parts import Cutter
from harness.rows import Part, join_nodes, whole
from harness.training import Setting, case_train, check, start_state

import sar

MODELS = [
    "GraphConv-both", "SAGEConv-mean", "SAGEConv-pool", "GINConv-max", "EdgeConv",
    "RelGraphConv-basis", "GraphConv-none-weighted",
]  # fmt: skip
# Part of every node. A cut may leave parts without nodes, without edges, or without seeds.
CUTS: list[tuple[str, int, Any]] = [
    ("no_edges", 3, [0, 1, 2] * 3),
    ("mostly_isolated", 3, [0] * 4 + [1] * 5 + [2] * 5),  # parts 1 and 2 have no edge at all
    ("mostly_isolated", 4, [3, 1, 3, 1] + [0] * 10),  # part 2 has no node
    ("star", 4, [0] + [1, 2, 3] * 5),  # the hub alone
    ("star", 2, [1] + [0] * 15),
    ("repeated", 3, [0, 1, 2, 0, 1, 2]),
    ("loops", 4, [0, 0, 1, 1, 2, 2, 3, 3]),  # nothing is cut
    ("crossing", 2, [0] * 6 + [1] * 6),  # everything is cut; no local shard has an edge
    ("crossing", 4, [0, 1] * 3 + [2, 3] * 3),
    ("ring", 4, [2, 0, 3, 1]),  # one node a rank
    ("all_alike", 3, "random"),
    ("few_seeds", 4, "contiguous"),
    ("few_seeds", 3, [2] * 25),  # everything on the last rank
]


@by_pairs(cut=CUTS, model=MODELS, mfgs=[False, True])
def test_training_equals_dgl(
    cut: tuple[str, int, Any], model: str, mfgs: bool, partitioned: Cutter
) -> None:
    graph, size, parts = cut
    if graph == "no_edges" and model in ("SAGEConv-pool", "GINConv-max", "EdgeConv"):
        pytest.skip("without any edge, DGL gives the gradient of max to node 0")
    path = partitioned(sample(graph), size, parts)
    setting = Setting(model, 1 if mfgs else None, mfgs, graph=graph)
    check(setting, run_threads(size, case_train, path, setting, start_state(setting)))


@pytest.mark.parametrize("mfgs", [False, True])
@pytest.mark.parametrize("method", ["random", "contiguous", "adversarial"])
def test_bipartite_relations_with_few_or_no_edges(
    mfgs: bool, method: str, partitioned: Cutter
) -> None:
    setting = Setting("HeteroGraphConv-sum", mfgs=mfgs, graph="sparse_hetero")
    path = partitioned(sample("sparse_hetero"), 3, method)
    check(setting, run_threads(3, case_train, path, setting, start_state(setting)))


def test_empty_parts_over_processes(partitioned: Cutter, processes: WorkerPool) -> None:
    """gloo's exchanges with nothing to send, nothing to receive, and neither."""
    for graph, size, parts in (CUTS[1], CUTS[2], CUTS[-1]):
        setting = Setting("SAGEConv-pool", graph=graph)
        path = partitioned(sample(graph), size, parts)
        check(setting, processes.run(size, case_train, path, setting, start_state(setting)))


def case_widths(group: Any, path: str, shape: tuple[int, ...], policy: sar.Policy) -> dict:
    part = Part(group, path, policy)
    x = part.node_rows(whole(mixed().total_nodes, shape, 1))
    found: dict[str, Any] = {"nodes": part.nodes}
    for op in ("sum", "mean", "max", "min"):
        out = part.graph.aggregate(x, op)
        (found[f"{op} grad"],) = torch.autograd.grad(out.sum(), x)
        found[op] = out.detach()
    return found


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2, 3, 4), (33,), (0,)])
def test_any_width(shape: tuple[int, ...], partitioned: Cutter) -> None:
    one = to_dgl(mixed())
    x = whole(one.num_nodes(), shape, 1).requires_grad_()
    for policy in (sar.Policy(), sar.Policy(rounds=1, block_bytes=1)):
        path = partitioned(mixed(), 4, "adversarial")
        parts = run_threads(4, case_widths, path, shape, policy)
        for op in ("sum", "mean", "max", "min"):
            got = join_nodes(parts, op, one.num_nodes())
            grad = join_nodes(parts, f"{op} grad", one.num_nodes())
            assert got.shape == grad.shape == (one.num_nodes(), *shape)
            if 0 in shape:
                continue
            one.ndata["x"] = x
            one.update_all(fn.copy_u("x", "m"), getattr(fn, op)("m", "o"))
            want = one.ndata["o"].view(x.shape)
            assert_close(got, want, op, torch.float64)
            (expected,) = torch.autograd.grad(want.sum(), x)
            assert_close(grad, expected, f"{op} grad", torch.float64)
