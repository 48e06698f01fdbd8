"""float64 gradcheck through the distributed operations, collectives included.

Every rank holds the whole input, cuts its rows out of it, and gathers the whole output; gradcheck
then runs on every rank with the same numbers, so that all perturb the same element in lockstep.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl import function as fn
from harness import run_threads
from harness.graphs import GraphArrays, homogeneous
from harness.parts import Cutter
from harness.rows import Part, eager, whole
from torch import Tensor

import sar

NUM_NODES, WIDTH = 7, 2


def small() -> GraphArrays:
    """Uneven parts, a self loop, a double edge, and a node without edges into it."""
    src = [0, 1, 2, 3, 3, 4, 5, 5, 6, 6, 1, 1]
    dst = [1, 2, 0, 3, 1, 5, 4, 0, 5, 2, 4, 4]
    return homogeneous("small", NUM_NODES, src, dst)


class Cut(torch.autograd.Function):
    """Rows of a replicated tensor; the gradient is put together again on every rank."""

    @staticmethod
    def forward(ctx: Any, replica: Tensor, ids: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.group, ctx.shape = group, replica.shape
        return replica[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        every = grad.new_zeros(ctx.shape).index_copy(0, ids, grad)
        return ctx.group.all_reduce(every), None, None


class Gather(torch.autograd.Function):
    """The whole tensor on every rank from its rows; each rank keeps its rows' gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, group: Any, total: int) -> Tensor:
        ctx.save_for_backward(ids)
        every = rows.new_zeros((total, *rows.shape[1:])).index_copy(0, ids, rows)
        return group.all_reduce(every)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        return grad[ids], None, None, None


class Replicated(torch.autograd.Function):
    """A parameter: every rank uses it, and the gradients are summed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone()), None


def _message(name: str) -> Any:
    return getattr(fn, name)(name[0], name[-1], "m")


def run_op(graph: Any, op: str, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
    """One distributed operation on owned rows."""
    name, _, reduce = op.partition(" ")  # "copy_u max"
    with graph.local_scope():
        graph.ndata["u"] = graph.ndata["v"] = x
        graph.edata["e"] = e
        if name == "copy_u":
            return graph.aggregate(x, reduce)
        if name == "weighted":
            return graph.aggregate(x, reduce, edge_weight=e[:, :1])
        if op == "two layers":
            return graph.aggregate(torch.tanh(graph.aggregate(x, "sum") @ weight), "mean")
        if name == "udf":
            message: Any = lambda edges: {  # noqa: E731
                "m": torch.tanh(edges.src["u"] @ weight) * edges.data["e"] + edges.dst["v"] ** 2
            }
        else:
            message = _message(name)
        if reduce == "edges":
            graph.apply_edges(message)
            return eager(graph.edata["m"])
        graph.update_all(message, getattr(fn, reduce)("m", "out"))
        return graph.dstdata["out"]


def case_gradcheck(group: Any, path: str, op: str, policy: sar.Policy) -> bool:
    part = Part(group, path, policy)
    num_edges = len(small().edges["_N", "_E", "_N"][0])
    ids = part.edges if op.endswith("edges") else part.nodes
    total = num_edges if op.endswith("edges") else NUM_NODES

    def function(x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        rows, edge_rows = Cut.apply(x, part.nodes, group), Cut.apply(e, part.edges, group)
        out = run_op(part.graph, op, rows, edge_rows, Replicated.apply(weight, group))
        return Gather.apply(out, ids, group, total)

    x = whole(NUM_NODES, (WIDTH,), 1).requires_grad_()
    e = whole(num_edges, (WIDTH,), 2).requires_grad_()
    weight = whole(WIDTH, (WIDTH,), 3).requires_grad_()
    return torch.autograd.gradcheck(function, (x, e, weight), fast_mode=False)


OPS = [
    *(f"copy_u {reduce}" for reduce in ("sum", "mean", "max", "min")),
    "weighted sum", "weighted mean", "u_mul_e sum", "u_mul_e max", "u_sub_v min", "e_div_u mean",
    "v_dot_u sum", "u_add_v edges", "u_div_v edges", "udf sum", "udf mean", "udf max", "udf edges",
    "two layers",
]  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_gradcheck_in_threads(op: str, partitioned: Cutter) -> None:
    number = OPS.index(op)
    size, parts = [(2, [0] * 5 + [1] * 2), (3, [0, 2, 2, 1, 2, 2, 0])][number % 2]
    policy = [sar.Policy(), sar.Policy(rounds=1, rematerialize=False)][number // 2 % 2]
    path = partitioned(small(), size, parts)
    assert run_threads(size, case_gradcheck, path, op, policy) == [True] * size


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_not_differentiated_again(op: str, partitioned: Cutter) -> None:
    """``torch.autograd.grad`` would leave their part of the second derivative out, silently."""
    path = partitioned(small(), 2, [0] * 5 + [1] * 2)
    num_edges = len(small().edges["_N", "_E", "_N"][0])

    def case(group: Any) -> None:
        part = Part(group, path)
        x = part.node_rows(whole(NUM_NODES, (WIDTH,), 1))
        e = part.edge_rows(whole(num_edges, (WIDTH,), 2))
        out = run_op(part.graph, op, x, e, whole(WIDTH, (WIDTH,), 3))
        with pytest.raises(sar.NotSupportedError, match="create_graph: got True"):
            torch.autograd.grad(out.square().sum(), [x], create_graph=True)

    run_threads(2, case)
