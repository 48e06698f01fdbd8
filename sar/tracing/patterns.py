"""Programs that a kernel computes as a whole: softmax attention as layers of the field write it.

What does not match runs block by block; both give the same numbers. Calls go by their names in
:mod:`sar.tracing.calls`, rows of ends of edges are leaves, whichever front end recorded them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sar.edges import Relation
from sar.kernels import has
from sar.kernels.attention import Scores
from sar.kernels.attention_loops import ADDITIVE, DOT, MIXED
from sar.ops.attention import Attention, attention
from sar.tracing.edge_rows import EdgeRows
from sar.tracing.nodes import (
    Call,
    Dropout,
    Leaf,
    Node,
    Softmax,
    arguments_of,
)


@dataclass(frozen=True)
class _Found:
    """The scores of a matched program, and its tensors: key, query, value, and where there are such
    weight, dropout (a node), factor, one number that multiplies the queries, and of_source, one of
    each source and head that multiplies the key."""

    scores: Scores
    parts: dict[str, Any]


def attend_if_matched(messages: EdgeRows) -> Tensor | None:
    """The sum of ``messages`` per destination when they are attention; ``None`` otherwise.

    Matched are ``v_j * dropout(softmax(z))``, dropout optional, with additive (GAT), mixed (GATv2)
    or dot product scores z. Collective when matched, the same on all ranks.
    """
    relation = messages.scope.relation
    if not isinstance(relation, Relation):
        return None
    output = messages.read()
    found = _match(output, relation)
    if found is None:
        return None
    scores, parts = found.scores, found.parts
    value, key, query = parts["value"], parts["key"], parts["query"]
    weight, drop, factor = parts.get("weight"), parts.get("dropout"), parts.get("factor")
    dropout = None if drop is None else (drop.seed, drop.probability)
    spec = Attention(relation, messages.scope.policy, scores, dropout)
    if "of_source" in parts:
        key = key * parts["of_source"].unsqueeze(-1)
    flat = value.reshape(len(value), scores.heads * scores.width)
    reach = scores.heads * (1 if scores.kind == ADDITIVE else scores.width)
    key = None if key is value else key.reshape(len(value), reach)
    query = query if factor is None else query * factor.view(())
    query = query.reshape(relation.num_dst, reach)
    out = attention(spec, flat, key, query, None if weight is None else weight.reshape(-1))
    return out.view(relation.num_dst, *value.shape[1:])


def _match(output: Node, relation: Relation) -> _Found | None:
    parts = _weighted_rows(output)
    if parts is None:
        return None
    value, softmax, dropout = parts
    if softmax.dtype != value.dtype:
        return None
    heads, width = math.prod(value.shape[1:-1]), value.shape[-1]
    found = _scores(softmax.scores, tuple(value.shape[1:]), heads, width)
    if found is None:
        return None
    found.parts["value"] = value
    if dropout is not None:
        found.parts["dropout"] = dropout
    return found if _fits(found.parts, value, relation) else None


_TENSORS = ("value", "key", "query", "weight", "of_source")


def _fits(parts: dict[str, Any], value: Tensor, relation: Relation) -> bool:
    """Whether one dtype and device of all parts has kernels, and there are rows and columns."""
    tensors = [parts[name] for name in _TENSORS if name in parts]
    if "factor" in parts:  # their product has the dtype of the queries
        if torch.result_type(parts["query"], parts["factor"].view(())) != value.dtype:
            return False
    return (
        has("attend", value.device, value.dtype)
        and all((t.dtype, t.device) == (value.dtype, value.device) for t in tensors)
        and math.prod(value.shape[1:]) > 0
        and len(value) == relation.num_src
    )


def _weighted_rows(node: Node) -> tuple[Tensor, Softmax, Dropout | None] | None:
    """(v, softmax, dropout) of ``v_j * dropout(softmax)``, one weight per row of the last axis."""
    operands = _operands(node, "mul")
    if operands is None:
        return None
    rows, weight = operands if _is_leaf(operands[0], "u") else operands[::-1]
    if not _is_leaf(rows, "u") or not isinstance(weight, Node) or rows.tensor.dim() < 2:
        return None
    if _row(weight) != (*rows.tensor.shape[1:-1], 1):
        return None
    dropout, weight = None, _without_last_axis(weight)
    if isinstance(weight, Dropout):
        dropout, weight = weight, _without_last_axis(weight.source)
    if not isinstance(weight, Softmax) or weight.side != "v":
        return None
    return rows.tensor, weight, dropout


def _row(node: Any) -> tuple[int, ...] | None:
    """The shape of an edge's value."""
    like = node.like if isinstance(node, Node) else None
    return None if like is None else tuple(like.shape[1:])


def _without_last_axis(node: Node) -> Node:
    """The input of a node that puts an axis of one behind it; else the node."""
    if isinstance(node, Call) and node.name in ("unsqueeze", "view", "reshape") and node.inputs:
        row = _row(node.inputs[0])
        if row is not None and _row(node) == (*row, 1):
            return node.inputs[0]
    return node


def _scores(node: Node, row: tuple[int, ...], heads: int, width: int) -> _Found | None:
    """Matched scores of one number a head, in the order of heads; ``row``: the shape of a value."""
    node = _without_last_axis(node)
    for match in (_additive, _mixed, _dot):
        found = match(node, row, Scores(ADDITIVE, heads, width))
        if found is not None:
            return found
    return None


def _additive(node: Node, row: tuple[int, ...], sizes: Scores) -> _Found | None:
    """lrelu(k_j + q_i), one number per head."""
    ends = _activated_sum(node)
    if ends is None or not _shaped(ends[:2], _row(node)):
        return None
    return _Found(replace(sizes, slope=ends[2]), {"key": ends[0], "query": ends[1]})


def _mixed(node: Node, row: tuple[int, ...], sizes: Scores) -> _Found | None:
    """sum_d w_d lrelu(k_jd + q_id)."""
    operands = _operands(_summed(node), "mul")
    if operands is None:
        return None
    rows, weight = operands if isinstance(operands[0], Node) else operands[::-1]
    ends = _activated_sum(rows)
    if ends is None or not isinstance(weight, Tensor) or not _shaped(ends[:2], row):
        return None
    if tuple(weight.shape) != (1, *row):
        return None
    scores = replace(sizes, kind=MIXED, slope=ends[2])
    return _Found(scores, {"key": ends[0], "query": ends[1], "weight": weight})


def _dot(node: Node, row: tuple[int, ...], sizes: Scores) -> _Found | None:
    """c sum_d k_jd q_id; c may be a tensor of one number, which is multiplied with q, or a number
    times one of each source."""
    scale, parts = 1.0, {}
    factors = _operands(node, "mul")
    if factors is not None:
        rows, factor = factors if isinstance(factors[0], Node) else factors[::-1]
        if isinstance(factor, Tensor):
            if factor.numel() != 1 or factor.dim() > len(row) + 1:  # that gives more axes
                return None
            node, parts = rows, {"factor": factor}
    for name in ("div", "mul"):
        pair = _operands(node, name)
        if pair is not None and isinstance(pair[0], Node) and _is_number(pair[1]):
            if name == "div" and pair[1] == 0:
                return None
            node, scale = pair[0], 1 / pair[1] if name == "div" else pair[1]
            break
    pair = _operands(node, "mul")
    if pair is not None and _is_leaf(pair[1], "u") and pair[1].tensor.shape[1:] == row[:-1]:
        node, parts["of_source"] = pair[0], pair[1].tensor
    ends = _ends(_summed(node), "mul")
    if ends is None or not _shaped(ends, row):
        return None
    return _Found(
        replace(sizes, kind=DOT, scale=scale), {"key": ends[0], "query": ends[1], **parts}
    )


def _summed(node: Node) -> Node | None:
    """The input of a sum over the last axis."""
    given = arguments_of(node, "sum", "input", "dim", "keepdim")
    if given is None or not isinstance(given[0], Node):
        return None
    row, dim = _row(given[0]), given[1]
    dims = tuple(dim) if isinstance(dim, (list, tuple)) else (dim,)
    return given[0] if row and dims in ((-1,), (len(row),)) else None


def _activated_sum(node: Node) -> tuple[Tensor, Tensor, float] | None:
    """(k, q, slope) of lrelu(k_j + q_i), or of k_j + q_i with slope 1."""
    slope, given = 1.0, arguments_of(node, "leaky_relu", "input", "negative_slope", "inplace")
    if given is not None:
        node, slope = given[0], 0.01 if given[1] is None else float(given[1])
    ends = _ends(node, "add")
    return None if ends is None else (*ends, slope)


def _ends(node: Any, name: str) -> tuple[Tensor, Tensor] | None:
    """The source's and the destination's tensor of a function of both ends of an edge."""
    operands = _operands(node, name)
    if operands is None:
        return None
    src, dst = operands if _is_leaf(operands[0], "u") else operands[::-1]
    if not (_is_leaf(src, "u") and _is_leaf(dst, "v")):
        return None
    return src.tensor, dst.tensor


def _shaped(tensors: Any, row: tuple[int, ...] | None) -> bool:
    return all(tuple(t.shape[1:]) == row for t in tensors)


def _operands(node: Any, name: str) -> list[Any] | None:
    """The two operands of a call of the function ``name``; ``None`` for other nodes."""
    return arguments_of(node, name, "input", "other")


def _is_leaf(node: Any, side: str) -> bool:
    return isinstance(node, Leaf) and node.side == side


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
