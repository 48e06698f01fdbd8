"""What set-up and passes cost one rank: not the size of the graph, and the ranks in proportion."""

from __future__ import annotations

import tracemalloc
from itertools import accumulate, pairwise

import pytest
import torch
from harness.alone import AloneGroup
from harness.resident import reachable_bytes

import sar
from sar.edges import Relation, build_relation
from sar.ops import aggregate

ROWS, EDGES = 2000, 1 << 14


def relation_of(size: int) -> Relation:
    """Edges from every part, as many and from the same rows of each; always ``EDGES`` of them."""
    rng = torch.Generator().manual_seed(0)
    each = EDGES // size
    src = torch.randint(ROWS, (each,), generator=rng).repeat(size)
    dst = torch.randint(ROWS, (EDGES,), generator=rng)
    eid = torch.randperm(EDGES, generator=rng).view(size, each).sort(1).values.view(-1)
    return build_relation(
        AloneGroup(size // 3, size),
        *(column.int() for column in (src, dst, eid)),
        [*accumulate([each] * size, initial=0)],
        ROWS,
        ROWS,
        lambda: torch.arange(EDGES),
    )


def python_bytes(size: int, policy: sar.Policy) -> tuple[int, int]:
    """Most bytes of Python objects, and bytes of tensors, of a relation with its shards."""
    aggregate(relation_of(4), torch.rand(ROWS, 4), "mean", policy)  # whatever is made but once
    tracemalloc.start()
    try:
        relation = relation_of(size)
        if policy.exchange == "pull":  # a pass takes seconds when each object is traced
            num_rounds = relation.plan.num_rounds(policy, 16)
            for reverse in (False, True):
                relation.store.shards(num_rounds, reverse=reverse)
        else:
            x = torch.rand(ROWS, 4, requires_grad=True)
            aggregate(relation, x, "mean", policy).sum().backward()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    relation.group.pool.clear()
    return most, reachable_bytes(relation)


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        (sar.Policy(exchange="pull"), (256, 1024)),
        (sar.Policy(exchange="pull", rounds=1), (256, 1024)),
        (sar.Policy(exchange="auto", rounds=1), (256, 1024)),
    ],
    ids=["strict", "one-shot", "fewest rows"],
)
def test_many_ranks_cost_each_in_proportion(policy: sar.Policy, sizes: tuple[int, int]) -> None:
    small, large = (python_bytes(size, policy) for size in sizes)
    assert large[0] < 6 * small[0], "four times the ranks, not sixteen times the bytes"
    assert large[0] < 4e6
    assert large[1] < 1.25 * small[1], "the same edges"


def test_a_pass_over_a_thousand_ranks_gives_the_sums() -> None:
    """Strict rounds, against the edges' own ends: every rank has the same rows."""
    relation = relation_of(1024)
    x = torch.rand(ROWS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    src, dst, _, offsets = relation.arrays()
    rows = torch.cat(
        [
            src[low:high] if idx is None or peer == relation.group.rank else idx[src[low:high]]
            for peer, idx, (low, high) in zip(
                range(1024), relation.plan.send_idx, pairwise(offsets)
            )
        ]
    )
    want = torch.zeros_like(x).index_add_(0, dst, x[rows])
    got = aggregate(relation, x, "sum", sar.Policy(exchange="pull"))
    assert torch.allclose(got, want, rtol=1e-12)


def test_a_budget_is_fitted_among_a_thousand_ranks() -> None:
    plan = relation_of(1024).plan
    table = plan.rows_in_flight
    assert len(table) == 1023 and (table[1:] <= table[0]).all()
    assert plan.num_rounds(sar.Policy(memory_budget=int(table[0]) * 8), 8) == 1
    assert plan.num_rounds(sar.Policy(memory_budget=int(table[-1]) * 8), 8) > 500
