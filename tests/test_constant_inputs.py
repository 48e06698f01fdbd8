"""Sums of rows that stay the same are kept, on all ranks or on none, and never a stale one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, mixed
from harness.parts import Cutter
from harness.rows import Part, whole
from torch import Tensor

import sar

WIDTH = 5
SIZE = 3


def dense(graph: GraphArrays, x: Tensor, op: str, weight: Tensor | None = None) -> Tensor:
    """The reference: [N, ...] sums or means over the edges, in one place."""
    src, dst = graph.edges[ETYPE_HOMO]
    rows = x[src] if weight is None else x[src] * weight.view(-1, 1)
    total = torch.zeros_like(x).index_add_(0, dst, rows)
    if op == "sum":
        return total
    count = torch.bincount(dst, minlength=len(x)).clamp(min=1)
    return total / count.view(-1, 1).to(x.dtype)


def sent(group: Any, body: Callable[[], Any]) -> tuple[Any, int]:
    """What ``body`` returns, and whether rows were sent for it (0 or 1, any rank)."""
    before = group.counters.sent_bytes
    result = body()
    moved = torch.tensor([int(group.counters.sent_bytes > before)])
    return result, int(group.all_reduce(moved, "max"))


class Checked:
    """A rank's part that compares each aggregate with the reference and notes who sent."""

    def __init__(self, group: Any, path: str, policy: sar.Policy | None = None) -> None:
        self.group, self.part = group, Part(group, path, policy)
        self.nodes, self.graph = self.part.nodes, self.part.graph
        self.sends: list[int] = []

    def rows(self, seed: int) -> Tensor:
        return whole(mixed().total_nodes, (WIDTH,), seed)[self.nodes]

    def everywhere(self, x: Tensor) -> Tensor:
        """The rows of all ranks by original id."""
        table = torch.zeros(mixed().total_nodes, WIDTH, dtype=x.dtype)
        table[self.nodes] = x.detach()
        return self.group.all_reduce(table)

    def __call__(self, x: Tensor, op: str = "sum", graph: Any = None, **options: Any) -> Tensor:
        graph = graph or self.graph
        out, moved = sent(self.group, lambda: graph.aggregate(x, op, **options))
        weight = options.get("edge_weight")
        if weight is not None:
            table = torch.zeros(len(mixed().edges[ETYPE_HOMO][0]), dtype=x.dtype)
            table[self.part.edges] = weight.detach().view(-1)
            weight = self.group.all_reduce(table)
        found = dense(mixed(), self.everywhere(x), op, weight)[self.nodes]
        torch.testing.assert_close(out.detach(), found, rtol=1e-12, atol=1e-12)
        self.sends.append(moved)
        return out


def case_kept(group: Any, path: str, mode: str, op: str, weighted: bool) -> list[int]:
    check = Checked(group, path, sar.Policy(constant_inputs=mode))
    x = check.rows(0)
    e = check.part.edge_rows(whole(len(mixed().edges[ETYPE_HOMO][0]), (), 1), False)
    options = {"edge_weight": e} if weighted else {}
    outs = [check(x, op, **options) for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs), "bit-identical"
    assert bool(group.counters.avoided_bytes) is (mode != "off")
    return check.sends


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("mode", ["memory", "mapped", "off"])
def test_from_the_third_use_on_nothing_is_sent(
    mode: str, op: str, weighted: bool, partitioned: Cutter
) -> None:
    path = partitioned(mixed(), SIZE, "random")
    expected = [1, 1, 1, 1] if mode == "off" else [1, 1, 0, 0]
    for sends in run_threads(SIZE, case_kept, path, mode, op, weighted):
        assert sends == expected


# Each change is made after the result was kept, on rank 1 alone; everybody has to send again, and
# every result is compared with the reference.


def in_place(x: Tensor) -> Tensor:
    return x.add_(1)


def one_row(x: Tensor) -> Tensor:
    x[0] = 7
    return x


def swapped_memory(x: Tensor) -> Tensor:
    x.data = x.detach() * 2
    return x


def swapped_twice(x: Tensor) -> Tensor:
    x.data = x.detach() * 2
    x.data = x.detach() * 2
    return x


def through_a_view(x: Tensor) -> Tensor:
    x.view(-1)[3:5].zero_()
    return x


CHANGES = [in_place, one_row, swapped_memory, swapped_twice, through_a_view]


def case_changed(group: Any, path: str, change: Callable, ranks: list[int]) -> list[int]:
    check = Checked(group, path)
    x = check.rows(0)
    for _ in range(3):
        check(x)
    if group.rank in ranks:
        x = change(x)
    for _ in range(4):
        check(x)
    return check.sends


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ranks", [[1], [0, 1, 2]])
def test_a_change_on_any_rank_makes_all_send_again(
    change: Callable, ranks: list[int], partitioned: Cutter
) -> None:
    path = partitioned(mixed(), SIZE, "random")
    for sends in run_threads(SIZE, case_changed, path, change, ranks):
        assert sends == [1, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("equal", [True, False])
def test_rows_that_are_made_anew(equal: bool, partitioned: Cutter) -> None:
    """Known where they are equal; others, in memory and with ids that dead ones had, are not."""

    def case(group: Any, path: str) -> list[int]:
        check = Checked(group, path)
        for seed in range(6):
            check(check.rows(0 if equal else seed) * 2)
        return check.sends

    for sends in run_threads(SIZE, case, partitioned(mixed(), SIZE, "random")):
        assert sends == ([1, 1, 0, 0, 0, 0] if equal else [1] * 6)


def case_astray(group: Any, path: str) -> list[int]:
    """Rank 1 passes another tensor for a while, in which rank 2 changes its own."""
    check = Checked(group, path)
    x, y = check.rows(0), check.rows(1)
    for _ in range(3):
        check(x)
    if group.rank == 2:
        x.add_(1)
    for _ in range(3):
        check(y if group.rank == 1 else x)
    for _ in range(3):
        check(x)
    return check.sends


def test_results_of_different_calls_are_never_mixed(partitioned: Cutter) -> None:
    path = partitioned(mixed(), SIZE, "random")
    for sends in run_threads(SIZE, case_astray, path):
        assert sends == [1, 1, 0, 1, 1, 0, 1, 0, 0]


def case_receivers(group: Any, path: str) -> list[int]:
    """Results are the caller's own: writes into one never show in another."""
    check = Checked(group, path)
    x = check.rows(0)
    first, second, third = check(x), check(x), check(x)
    before = first.clone()
    third.add_(1)
    assert torch.equal(first, before)
    assert torch.equal(second, before)
    check(x)
    second.mul_(2)
    check(x)
    check(x).zero_()
    check(x)
    return check.sends


def test_writing_into_a_result_changes_no_other(partitioned: Cutter) -> None:
    for sends in run_threads(SIZE, case_receivers, partitioned(mixed(), SIZE, "random")):
        assert sends == [1, 1, 0, 0, 0, 0, 0]


def case_modes(group: Any, path: str) -> list[int]:
    """With and without grad, in inference mode, learnable, another graph, weight and policy.

    Nothing is learned without gradients, and what is known is used in every mode.
    """
    check = Checked(group, path)
    x = check.rows(0)
    check(x)
    with torch.no_grad():
        check(x)
    with torch.inference_mode():
        check(x)
        y = x.clone()
        for _ in range(3):
            check(y)
    learnable = x.clone().requires_grad_()
    for _ in range(3):
        out = check(learnable)
    out.sum().backward()
    again = sar.construct_full_graph(check.part.data)
    check(x, graph=again)
    check(x, graph=check.graph.with_policy(sar.Policy(rounds=1)))
    check(x, "mean")
    e = check.part.edge_rows(whole(len(mixed().edges[ETYPE_HOMO][0]), (), 1), False)
    for _ in range(3):
        check(x, edge_weight=e)
    e.mul_(2)
    check(x, edge_weight=e)
    check(x)
    with torch.inference_mode():
        check(x)
    return check.sends


def test_each_use_is_told_apart(partitioned: Cutter) -> None:
    for sends in run_threads(SIZE, case_modes, partitioned(mixed(), SIZE, "random")):
        assert sends == [1, 1, 1] + [1] * 3 + [1] * 3 + [1, 1, 1] + [1, 1, 0] + [1, 1, 0]


def case_other_views(group: Any, path: str) -> None:
    part = Part(group, path)
    graph = part.graph.with_policy(sar.Policy(constant_inputs="off" if group.rank else "memory"))
    with pytest.raises(ValueError, match=r"constant_inputs.* are \[\(0, .*\), \(2, .*\), \(2, "):
        graph.aggregate(torch.ones(graph.num_nodes(), 2), "sum")


def test_views_with_different_policies_are_refused(partitioned: Cutter) -> None:
    run_threads(SIZE, case_other_views, partitioned(mixed(), SIZE, "random"))
