"""Edges are kept once: how many bytes that takes, and that nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import ETYPE_HOMO, GraphArrays, homogeneous, mixed
from harness.parts import Cutter
from harness.resident import reachable_bytes
from harness.rows import Part, whole
from torch import Tensor

import sar
from sar.edges.push_pull import FewestRows, linear_relation
from sar.partition.sources.generate import rmat_graph

NODES, DEGREE = 400, 40


def dense() -> GraphArrays:
    """Many edges a node, so that what is kept per edge shows."""
    rng = torch.Generator().manual_seed(3)
    src, dst = torch.randint(NODES, (2, NODES * DEGREE), generator=rng)
    return homogeneous("dense", NODES, src, dst)


def train_step(graph: Any, x: Tensor, op: str = "mean") -> Tensor:
    """Two layers and a backward pass; the input's gradient."""
    x = x.detach().requires_grad_()
    hidden = torch.tanh(graph.aggregate(x, op))
    graph.aggregate(torch.cat([hidden, hidden], 1), op).square().sum().backward()
    return x.grad


def case_resident(group: Any, path: str, policy: sar.Policy) -> dict[str, int]:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data, policy)
    del data
    x = torch.rand(graph.num_nodes(), 4)
    made = reachable_bytes(graph)
    train_step(graph, x)
    relation = graph.scope().relation
    plan = relation.plan
    halo = sum(plan.recv_counts) + sum(plan.send_counts)
    rounds = len(plan.rounds(plan.num_rounds(policy, 32))) if group.size > 1 else 0
    return {
        "made": made,
        "trained": reachable_bytes(graph),
        "edges": relation.num_edges,
        # degrees and ids, bounds of the local segments; rows and bounds of each round's
        "nodes": relation.num_dst * (8 + 8 + 8 + 4 + 4 + 8 * rounds) + 8 * halo + 2048,
    }


@pytest.mark.parametrize(
    ("size", "policy", "per_edge"),
    [
        (1, sar.Policy(), 12),
        (4, sar.Policy(), 12),
        (4, sar.Policy(rounds=1), 12),
        (8, sar.Policy(rounds=3), 12),
        (1, sar.Policy(structure="one"), 8),
        (4, sar.Policy(structure="one"), 8),
    ],
    ids=str,
)
def test_bytes_per_edge_after_training(
    size: int, policy: sar.Policy, per_edge: int, partitioned: Cutter
) -> None:
    path = partitioned(dense(), size, "random")
    for found in run_threads(size, case_resident, path, policy):
        assert found["made"] <= 12 * found["edges"] + found["nodes"]
        least, most = per_edge * found["edges"], per_edge * found["edges"] + found["nodes"]
        assert least <= found["trained"] <= most


def test_bytes_per_edge_where_partial_sums_travel(partitioned: Cutter) -> None:
    """The relation's remote edges are given back by those that its sums keep, both ways exactly."""
    graph = rmat_graph(9, 12_000)

    def case(group: Any, path: str) -> list[int]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        sharded = sar.construct_full_graph(data)
        given = [column.clone() for column in arrays_of(sharded)]
        train_step(sharded, torch.rand(data.num_nodes("_N"), 4))
        relation = sharded.scope().relation
        plan = linear_relation(relation, torch.ones(1, 4), None, sharded.policy).plan
        assert sum(plan.send_counts) > sum(plan.num_pulled) > 0
        sent = plan.outgoing.edges
        for found, column in zip(arrays_of(sharded), given, strict=True):
            assert torch.equal(found, column)
        rows = 8 * relation.num_dst * (2 + group.size) + 16 * sent.num_segments
        rows += 8 * sent.num_edges + 8 * sum(relation.plan.recv_counts)
        del data, given
        kept = reachable_bytes(relation.store, relation.derived(FewestRows, pytest.fail))
        return [kept, 12 * relation.num_edges, rows + 4096]

    found = run_threads(4, case, partitioned(graph, 4, "random"))
    kept, edges, rows = (sum(column) for column in zip(*found, strict=True))
    assert edges <= kept <= edges + rows
    assert rows < edges, "or the bound says nothing"


def test_too_many_edges_for_int32_are_an_error_on_every_rank(
    partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    star = homogeneous("star", 10, range(9), [0] * 9)
    path = partitioned(star, 2, [1] * 5 + [0] * 5)

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        with pytest.raises(ValueError, match="edges: rank 1 got 9 of one type, expected at most 8"):
            sar.construct_full_graph(data)

    monkeypatch.setattr("sar.edges.relation.INT32_EDGES", 8)
    run_threads(2, case)


def arrays_of(graph: Any) -> list[Tensor]:
    return list(graph.scope().relation.arrays()[:3])


def case_nothing_lost(group: Any, path: str, policy: sar.Policy) -> None:
    part, fresh = Part(group, path, policy), Part(group, path, policy)
    x = part.node_rows(whole(mixed().total_nodes, (4,), 0), False)
    edge = part.data.edges[ETYPE_HOMO]
    train_step(part.graph, x)
    for found, given in zip(arrays_of(part.graph), arrays_of(fresh.graph), strict=True):
        assert found.dtype == torch.int32
        assert torch.equal(found, given)
    assert torch.equal(arrays_of(part.graph)[1], edge.dst)
    assert torch.equal(arrays_of(part.graph)[2], edge.eid)
    keep = torch.arange(part.graph.num_edges()) % 3 > 0
    for change in (
        lambda graph: graph.add_self_loop(),
        lambda graph: graph.remove_self_loop(),
        lambda graph: graph.edge_subgraph(keep),
        lambda graph: graph.with_policy(sar.Policy(rounds=1)),
        lambda graph: graph.with_policy(sar.Policy(rounds=2)),
    ):
        changed, expected = change(part.graph), change(fresh.graph)
        assert torch.equal(changed.edata["_ID"], expected.edata["_ID"])
        for found, given in zip(arrays_of(changed), arrays_of(expected), strict=True):
            assert torch.equal(found, given)
        for op in ("mean", "max"):
            assert torch.equal(train_step(changed, x, op), train_step(expected, x, op))
    relations = [graph.scope().relation for graph in (part.graph, fresh.graph)]
    assert torch.equal(relations[0].keys, relations[1].keys)
    arrivals = [relation.mailbox_edges for relation in relations]
    for name in ("dst", "indptr", "src", "position"):
        assert torch.equal(getattr(arrivals[0], name), getattr(arrivals[1], name))


@by_pairs(
    method=["random", "adversarial"],
    policy=[sar.Policy(), sar.Policy(rounds=1), sar.Policy(rounds=2, structure="one")],
    size=[1, 4],
)
def test_all_that_was_given_can_be_had_again(
    size: int, policy: sar.Policy, method: str, partitioned: Cutter
) -> None:
    run_threads(size, case_nothing_lost, partitioned(mixed(), size, method), policy)


@pytest.mark.parametrize("wrong", ["forward", None, 1])
def test_structure_is_checked(wrong: Any) -> None:
    with pytest.raises(ValueError, match="structure: got"):
        sar.Policy(structure=wrong)


def case_history(group: Any, path: str) -> None:
    """The order of sums depends on the rounds alone, not on what was compressed before."""
    part = Part(group, path)
    x = part.node_rows(whole(mixed().total_nodes, (4,), 0), False)
    weight = part.edge_rows(whole(len(mixed().edges[ETYPE_HOMO][0]), (1,), 1), False)
    rounds = (1, 2, 3, 1, 3, 2)
    for structure in ("both", "one"):
        graph = sar.construct_full_graph(part.data)
        for number in rounds:
            policy = sar.Policy(rounds=number, structure=structure)
            alone = sar.construct_full_graph(part.data, policy)
            used = graph.with_policy(policy)
            assert torch.equal(train_step(used, x), train_step(alone, x))
            for one, other in zip(weighted(used, x, weight), weighted(alone, x, weight)):
                assert torch.equal(one, other)


def weighted(graph: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = graph.aggregate(x, "sum", edge_weight=weight)
    return [out, *torch.autograd.grad(out.square().sum(), x)]


def test_results_do_not_depend_on_what_was_compressed_before(partitioned: Cutter) -> None:
    run_threads(4, case_history, partitioned(mixed(), 4, "random"))
