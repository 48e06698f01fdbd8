"""What holds for every graph and every cut, on drawn examples (the same ones each time).

Values are small integers in float64, so that sums are exact whatever their order and results can
be compared bit by bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, homogeneous
from harness.parts import Cutter, load_all
from harness.rows import Part, join_nodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import sar

drawn = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@st.composite
def cut_graphs(draw: Any) -> tuple[GraphArrays, int, list[int]]:
    """A graph of up to 12 nodes and 40 edges, and the part of every node."""
    nodes = draw(st.integers(1, 12))
    ends = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(ends, ends), max_size=40))
    size = draw(st.sampled_from([1, 2, 3, 4]))
    parts = draw(st.lists(st.integers(0, size - 1), min_size=nodes, max_size=nodes))
    src, dst = [a for a, _ in edges], [b for _, b in edges]
    return homogeneous("drawn", nodes, src, dst, seed=len(edges)), size, parts


@st.composite
def policies(draw: Any) -> sar.Policy:
    return sar.Policy(
        rounds=draw(st.sampled_from([None, 1, 2])),
        rematerialize=draw(st.booleans()),
        block_bytes=draw(st.sampled_from([1, 100, 8 << 20])),
    )


def written(example: tuple[GraphArrays, int, list[int]], folder: str) -> str:
    graph, size, parts = example
    return Cutter(Path(folder))(graph, size, parts)


def integers(count: int, width: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (count, width), generator=rng).double()


@drawn
@given(cut_graphs())
def test_locate_inverts_global_ids(example: tuple) -> None:
    graph, size, _ = example
    with tempfile.TemporaryDirectory() as folder:
        book = load_all(written(example, folder), size)[0].book
        types, parts, rows = book.locate(torch.arange(graph.total_nodes))
        starts = torch.as_tensor(book.node_ranges["_N"])[:, 0]
        assert torch.equal(starts[parts] + rows, torch.arange(graph.total_nodes))
        assert (types == 0).all()


def case_everything(group: Any, path: str, policy: sar.Policy, total: tuple[int, int]) -> dict:
    part = Part(group, path, policy)
    x = part.node_rows(integers(total[0], 3, 1))
    weight = part.edge_rows(integers(total[1], 1, 2), grad=False)
    found: dict[str, Any] = {"nodes": part.nodes, "edges": part.edges}
    for op in ("sum", "max", "min"):
        out = part.graph.aggregate(x, op)
        (grad,) = torch.autograd.grad((out * integers(total[0], 3, 3)[part.nodes]).sum(), x)
        found |= {op: out.detach(), f"{op} grad": grad}
    found["weighted"] = part.graph.aggregate(x, "sum", edge_weight=weight).detach()
    found["ones"] = part.graph.aggregate(torch.ones(len(x), 1), "sum").view(-1)
    found["in"], found["out"] = part.graph.in_degrees(), part.graph.out_degrees()
    relation = part.graph._store.relations[ETYPE_HOMO]
    plan = relation.plan
    found["sends"], found["receives"] = plan.send_counts, plan.recv_counts
    return found


def extreme(op: str, src: Tensor, dst: Tensor, x: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Max or min by a loop over edges in ascending id; the first of equal messages wins."""
    out, winner = torch.zeros_like(x), torch.full(x.shape, -1)
    grad = torch.zeros_like(x)
    for u, v in zip(src.tolist(), dst.tolist()):
        for k in range(x.shape[1]):
            value = x[u, k]
            better = value > out[v, k] if op == "max" else value < out[v, k]
            if winner[v, k] < 0 or better:
                out[v, k], winner[v, k] = value, u
    for v, k in (winner >= 0).nonzero().tolist():
        grad[winner[v, k], k] += up[v, k]
    return out, grad


@drawn
@given(cut_graphs(), policies())
def test_results_are_exact_for_every_cut_and_policy(example: tuple, policy: sar.Policy) -> None:
    graph, size, _ = example
    src, dst = graph.edges[ETYPE_HOMO]
    count = graph.total_nodes
    with tempfile.TemporaryDirectory() as folder:
        path = written(example, folder)
        parts = run_threads(size, case_everything, path, policy, (count, len(src)))
    x, weight, up = (integers(count, 3, 1), integers(len(src), 1, 2), integers(count, 3, 3))
    adjacency = torch.zeros(count, count, dtype=torch.float64)
    adjacency.index_put_((dst, src), torch.ones(len(src), dtype=torch.float64), accumulate=True)
    weighted = torch.zeros(count, count, dtype=torch.float64)
    weighted.index_put_((dst, src), weight.view(-1), accumulate=True)
    assert torch.equal(join_nodes(parts, "sum", count), adjacency @ x)
    assert torch.equal(join_nodes(parts, "sum grad", count), adjacency.T @ up)
    assert torch.equal(join_nodes(parts, "weighted", count), weighted @ x)
    assert torch.equal(join_nodes(parts, "ones", count).double(), adjacency.sum(1))
    assert torch.equal(join_nodes(parts, "in", count).double(), adjacency.sum(1))
    assert torch.equal(join_nodes(parts, "out", count).double(), adjacency.sum(0))
    for op in ("max", "min"):
        out, grad = extreme(op, src, dst, x, up)
        assert torch.equal(join_nodes(parts, op, count), out)
        assert torch.equal(join_nodes(parts, f"{op} grad", count), grad)
    for p in range(size):
        for q in range(size):
            assert parts[p]["sends"][q] == parts[q]["receives"][p]
