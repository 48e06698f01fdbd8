"""Rows of edges and their reductions at destinations, which front ends are made of.

:func:`rows_of` gives columns of sources, destinations and edges as lazy edge tensors; torch
functions and :func:`softmax` make messages of them, which :func:`reduce_rows` reduces: by a kernel
where there is one for such messages, else block by block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges import AnyRelation, Relation, reverse_relation
from sar.graph.view import Scope
from sar.kernels import has
from sar.ops import aggregate, run_messages, swap_sides
from sar.ops.aggregate import check_reduction, extreme_of_rows
from sar.stream import agree_on_gradients
from sar.tracing.edge_rows import node_of
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import Call, Leaf, Node, Softmax, arguments_of, raise_if_written
from sar.tracing.patterns import attend_if_matched
from sar.tracing.program import Program
from sar.tracing.weights import weighted_by


def rows_of(scope: Scope, side: str, column: Tensor, name: str = "") -> EdgeTensor:
    """[num_edges, ...] lazy rows of a column of the edges' sources (``"u"``), destinations
    (``"v"``) or of the edges (``"e"``); collective for a lazy column of other edges alone."""
    if side != "e":
        return EdgeTensor(Leaf(side, column, name), column, scope)
    node = node_of(column, scope.relation, name)
    if isinstance(column, EdgeTensor) and node is column.node:
        return column
    return EdgeTensor(node, column, scope)


def softmax(scope: Scope, scores: Tensor, side: str = "v") -> EdgeTensor:
    """Softmax over the edges that end in the same node, or (``"u"``) start in it, lazily.

    The result is a node of the program (:class:`sar.tracing.nodes.Softmax`): a sum weighted by it
    computes its own normalizer on the way, other uses store one row per node.
    """
    node = node_of(scores, scope.relation)
    like = torch.empty((0, *tuple(scores.shape)[1:]), dtype=scores.dtype, device=scope.device)
    weights = Softmax(node, partial(_normalizer, scope, node, like, side), side, scores.dtype)
    return EdgeTensor(weights, like, scope)


def _normalizer(scope: Scope, scores: Node, like: Tensor, side: str) -> Leaf:
    """(m, l) of the edges of each destination, or of each source; collective."""
    program = Program([scores])
    relation, messages, inputs = scope.relation, program.messages(), program.inputs()
    if side == "u":
        relation = reverse_relation(relation)
        messages, inputs = swap_sides(messages, inputs)
    (norm,) = run_messages(relation, messages, "logsumexp", scope.policy, inputs, [like])
    return Leaf(side, norm)


def reduce_rows(messages: EdgeTensor, op: str, side: str = "v") -> Tensor:
    """[num_dst, ...] sum, mean, max or min of the rows of edges at their destinations, or with
    ``"u"`` [num_src, ...] at their sources; 0 where there is none. Collective."""
    scope = messages.scope
    if side == "u":
        return _reduce_at_sources(messages, op)
    relation, node, meter = scope.relation, messages.read(), scope.relation.group.meter
    raise_if_written([node])
    if isinstance(relation, Relation) and messages.axis == 0:
        if isinstance(node, Leaf) and node.side == "u":
            out = _reduce_sources(scope, node, op)
            if out is not None:
                return out
        factors = _weighted(node) if op in ("sum", "mean") else None
        if factors is not None:
            _agree(scope, *factors)
            u, e = factors
            asks = e.tensor.requires_grad and torch.is_grad_enabled()
            if not asks or has("edge_dots", u.tensor.device, u.tensor.dtype):
                meter.tell("sum")
                return aggregate(relation, u.tensor, op, scope.policy, e.tensor.reshape(-1))
    out = attend_if_matched(messages) if op in ("sum", "mean") else None
    if out is None:
        return _reduce_program(messages, op)
    if meter.notes is not None:
        meter.tell("attention kernel")
    return mean_of_sum(out, relation) if op == "mean" else out


def _reduce_sources(scope: Scope, source: Leaf, op: str) -> Tensor | None:
    """Reduce rows of sources as they are, where there is a loop for such numbers; or ``None``."""
    _agree(scope, source)
    relation, x = scope.relation, source.tensor
    if op in ("max", "min"):
        is_compiled = has("extremes", x.device, x.dtype)
        what = "(bytes of a number, whether there is a loop that compares such numbers)"
        relation.plan.agree_once(what, x.element_size(), int(is_compiled))
        if is_compiled:
            relation.group.meter.tell("extreme")
            return extreme_of_rows(relation, x, scope.policy, largest=op == "max")  # type: ignore
    elif x.is_floating_point():
        relation.group.meter.tell("sum")
        return aggregate(relation, x, op, scope.policy)  # type: ignore[arg-type]
    return None


def _weighted(node: Node) -> tuple[Leaf, Leaf] | None:
    """(rows of sources, a number of each edge, of one dtype) whose product a node is."""
    given = arguments_of(node, "mul", "input", "other")
    if given is None or node.like is None:
        return None
    u, e = given
    if isinstance(e, Leaf) and e.side == "u":
        u, e = e, u
    while isinstance(e, Call) and e.name == "unsqueeze":
        e = e.inputs[0]
    if not (isinstance(u, Leaf) and isinstance(e, Leaf) and (u.side, e.side) == ("u", "e")):
        return None
    row = u.tensor.shape[1:]
    fits = e.tensor.dtype == u.tensor.dtype and u.tensor.is_floating_point()
    scales = node.like.shape[1:] == row and all(size == 1 for size in e.tensor.shape[1:])
    return (u, e) if fits and scales else None


def _reduce_program(messages: EdgeTensor, op: str) -> Tensor:
    """Reduce messages by their program, block by block."""
    scope = messages.scope
    by_sum = op in ("sum", "mean") and isinstance(scope.relation, Relation)
    streamed, weighting = (weighted_by(messages) if by_sum else None) or (None, None)
    program = Program([messages.read()], streamed)
    (out,) = run_messages(
        scope.relation, program.messages(weighting), "sum" if op == "mean" else op, scope.policy,
        program.inputs(), [messages.without_rows],
    )  # fmt: skip
    return mean_of_sum(out, scope.relation) if op == "mean" else out


def _reduce_at_sources(messages: EdgeTensor, op: str) -> Tensor:
    """Reduce messages by their program where their edges start."""
    scope, program = messages.scope, Program([messages.read()])
    turned = reverse_relation(scope.relation)
    swapped, inputs = swap_sides(program.messages(), program.inputs())
    kind = "sum" if op == "mean" else op
    (out,) = run_messages(turned, swapped, kind, scope.policy, inputs, [messages.without_rows])
    return mean_of_sum(out, turned) if op == "mean" else out


def _agree(scope: Scope, *leaves: Leaf) -> None:
    """Raise on every rank where ranks differ in a gradient, on which the path depends."""
    named = [(f"column {leaf.name!r}", leaf.tensor) for leaf in leaves]
    agree_on_gradients(scope.relation.plan, named, len(named))


def mean_of_sum(total: Tensor, relation: AnyRelation) -> Tensor:
    """[num_dst, ...] sums divided by the number of messages; 0 stays 0."""
    count = relation.in_degrees.clamp(min=1).to(total.dtype)
    return total / count.view(-1, *[1] * (total.dim() - 1))


def aggregate_rows(
    relation: AnyRelation, x: Tensor, op: str, edge_weight: Tensor | None, policy: Policy
) -> Tensor:
    """[num_dst, ...] of rows of in-neighbors, times weights of edges if there are; collective."""
    check_reduction(relation, x, op, edge_weight)
    scope = Scope(relation, policy, relation.plan.device)
    messages: Any = rows_of(scope, "u", x, "x")
    if edge_weight is not None:
        weight = edge_weight.view(-1, *[1] * (x.dim() - 1))
        messages = messages * rows_of(scope, "e", weight, "edge_weight")
    return reduce_rows(messages, op)
