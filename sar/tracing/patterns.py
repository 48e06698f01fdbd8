"""Programs that a kernel computes as a whole: softmax attention as layers of the field write it.

What does not match runs block by block; both give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sar.edges import Relation
from sar.kernels import has
from sar.kernels.attention import Scores
from sar.kernels.attention_loops import ADDITIVE, DOT, MIXED
from sar.ops.attention import Attention, attention
from sar.tracing.binary import apply_binary
from sar.tracing.edge_rows import EdgeRows
from sar.tracing.memo import Outline, outline, remembered
from sar.tracing.nodes import Call, Dropout, Leaf, Node, Softmax, refuse_written


@dataclass(frozen=True)
class _Found:
    """The scores of a matched program and the tensors that it reads, or their places in it.

    ``factor`` of one number multiplies the queries.
    """

    scores: Scores
    key: Any
    query: Any
    weight: Any = None
    factor: Any = None
    value: Any = None
    dropout: Any = None

    def placed(self, drawn: Outline) -> _Found:
        """With places in a program instead of tensors and nodes."""
        places: dict[str, Any] = {
            name: None if part is None else drawn.place(part) for name, part in self._tensors()
        }
        nodes = [id(node) for node in drawn.nodes]
        dropout = None if self.dropout is None else nodes.index(id(self.dropout))
        return replace(self, dropout=dropout, **places)

    def taken(self, drawn: Outline) -> _Found:
        """With what a program has in these places."""
        tensors = drawn.tensors
        return _Found(
            self.scores,
            tensors[self.key],
            tensors[self.query],
            None if self.weight is None else tensors[self.weight],
            None if self.factor is None else tensors[self.factor],
            tensors[self.value],
            None if self.dropout is None else drawn.nodes[self.dropout],
        )

    def _tensors(self) -> list[tuple[str, Tensor | None]]:
        names = ("key", "query", "weight", "factor", "value")
        return [(name, getattr(self, name)) for name in names]


def attend_if_matched(messages: EdgeRows) -> Tensor | None:
    """The sum of ``messages`` per destination when they are attention; ``None`` otherwise.

    Matched are ``v_j * dropout(softmax(z))``, dropout optional, with additive (GAT), mixed (GATv2)
    or dot product scores z. Collective when matched, the same on all ranks.
    """
    relation = messages.scope.relation
    if not isinstance(relation, Relation):
        return None
    drawn = outline(messages.read())
    found = _matched(drawn, relation)
    if found is None:
        return None
    refuse_written([drawn.nodes[-1]])
    scores, value = found.scores, found.value
    dropout = None if found.dropout is None else (found.dropout.seed, found.dropout.probability)
    spec = Attention(relation, messages.scope.policy, scores, dropout)
    flat = value.reshape(len(value), scores.heads * scores.width)
    reach = scores.heads * (1 if scores.kind == ADDITIVE else scores.width)
    key = None if found.key is value else found.key.reshape(len(value), reach)
    query = found.query if found.factor is None else found.query * found.factor.view(())
    query = query.reshape(relation.num_dst, reach)
    weight = None if found.weight is None else found.weight.reshape(-1)
    out = attention(spec, flat, key, query, weight)
    return out.view(relation.num_dst, *value.shape[1:])


def _matched(drawn: Outline, relation: Relation) -> _Found | None:
    """The attention that a program is; found out once for all programs of one outline."""
    if drawn.key is None:
        return _match(drawn.nodes[-1], relation)

    def find() -> _Found | None:
        found = _match(drawn.nodes[-1], relation)
        return None if found is None else found.placed(drawn)

    found = remembered(relation, ("attention", drawn.key), find)
    return None if found is None else found.taken(drawn)


def _match(output: Node, relation: Relation) -> _Found | None:
    parts = _weighted_rows(output)
    if parts is None:
        return None
    value, softmax, dropout = parts
    if value.dim() < 2 or softmax.dtype != value.dtype:
        return None
    heads, width = math.prod(value.shape[1:-1]), value.shape[-1]
    found = _scores(softmax.scores, value, heads, width)
    if found is None or not _fits(found, value, relation):
        return None
    return replace(found, value=value, dropout=dropout)


def _fits(found: _Found, value: Tensor, relation: Relation) -> bool:
    """One dtype and device that there are kernels for, with rows and columns to work on."""
    tensors = [t for t in (value, found.key, found.query, found.weight) if t is not None]
    if found.factor is not None:  # their product has the dtype of the queries
        kind = torch.result_type(found.query, found.factor.view(()))
        if kind != value.dtype:
            return False
    return (
        has("attend", value.device, value.dtype)
        and all((t.dtype, t.device) == (value.dtype, value.device) for t in tensors)
        and math.prod(value.shape[1:]) > 0
        and len(value) == relation.num_src
    )


def _weighted_rows(node: Node) -> tuple[Tensor, Softmax, Dropout | None] | None:
    """(v, softmax, dropout) of ``v_j * dropout(softmax)``, one weight per row of the last axis."""
    operands = _binary(node, "mul")
    if operands is None:
        return None
    rows, weight = operands if _is_leaf(operands[0], "u") else operands[::-1]
    dropout = None
    if isinstance(weight, Dropout):
        dropout, weight = weight, weight.source
    if not _is_leaf(rows, "u") or not isinstance(weight, Softmax) or weight.side != "v":
        return None
    return rows.tensor, weight, dropout


def _scores(node: Node, value: Tensor, heads: int, width: int) -> _Found | None:
    lead = tuple(value.shape[1:-1])
    for match in (_additive, _mixed, _dot):
        found = match(node, value, lead, Scores(ADDITIVE, heads, width))
        if found is not None:
            return found
    return None


def _additive(node: Node, value: Tensor, lead: tuple, sizes: Scores) -> _Found | None:
    """lrelu(k_j + q_i), one number per head."""
    ends = _activated_sum(node)
    if ends is None or not _shaped(ends[:2], (*lead, 1)):
        return None
    scores = Scores(ADDITIVE, sizes.heads, sizes.width, slope=ends[2])
    return _Found(scores, ends[0], ends[1])


def _mixed(node: Node, value: Tensor, lead: tuple, sizes: Scores) -> _Found | None:
    """sum_d w_d lrelu(k_jd + q_id), the sum kept as an axis of one."""
    last = len(lead) + 1
    wrapped = _call(node, "unsqueeze", ("input", "dim"))
    kept = wrapped is None
    if wrapped is not None:
        if wrapped["dim"] not in (-1, last):
            return None
        node = wrapped["input"]
    total = _call(node, "sum", ("input", "dim", "keepdim"))
    if total is None or total["dim"] not in (-1, [-1], (-1,), last):
        return None
    if (total["keepdim"] is True) is not kept:
        return None
    factors = _operands(total["input"], ("mul", "__mul__", "__rmul__"))
    if factors is None:
        return None
    rows, weight = factors if isinstance(factors[0], Node) else factors[::-1]
    ends = _activated_sum(rows)
    shape = tuple(value.shape[1:])
    if ends is None or not isinstance(weight, Tensor) or not _shaped(ends[:2], shape):
        return None
    if tuple(weight.shape) != (1, *shape):
        return None
    scores = Scores(MIXED, sizes.heads, sizes.width, slope=ends[2])
    return _Found(scores, ends[0], ends[1], weight)


def _dot(node: Node, value: Tensor, lead: tuple, sizes: Scores) -> _Found | None:
    """c sum_d k_jd q_id; c may be a tensor of one number, which is multiplied with q."""
    scale, factor = 1.0, None
    factors = _operands(node, ("mul", "__mul__", "__rmul__"))
    if factors is not None:
        rows, factor = factors if isinstance(factors[0], Node) else factors[::-1]
        if not isinstance(factor, Tensor):
            factor = None
        elif factor.numel() != 1 or factor.dim() > value.dim():  # that gives more axes
            return None
        else:
            node = rows
    for names, inverse in ((("div", "true_divide", "__truediv__"), True), (("mul",), False)):
        pair = _operands(node, names)
        if pair is not None and isinstance(pair[0], Node) and _is_number(pair[1]):
            if inverse and pair[1] == 0:
                return None
            node, scale = pair[0], 1 / pair[1] if inverse else pair[1]
            break
    ends = _ends(node, "dot")
    if ends is None or not _shaped(ends, tuple(value.shape[1:])):
        return None
    scores = Scores(DOT, sizes.heads, sizes.width, scale=scale)
    return _Found(scores, ends[0], ends[1], factor=factor)


def _activated_sum(node: Node) -> tuple[Tensor, Tensor, float] | None:
    """(k, q, slope) of lrelu(k_j + q_i), or of k_j + q_i with slope 1."""
    slope = 1.0
    call = _call(node, "leaky_relu", ("input", "negative_slope", "inplace"))
    if call is not None:
        given = call["negative_slope"]
        slope, node = 0.01 if given is None else float(given), call["input"]
    ends = _ends(node, "add")
    return None if ends is None else (*ends, slope)


def _ends(node: Node, op: str) -> tuple[Tensor, Tensor] | None:
    """The source's and the destination's tensor of ``op`` on both ends of an edge."""
    operands = _binary(node, op)
    if operands is None:
        return None
    src, dst = operands if _is_leaf(operands[0], "u") else operands[::-1]
    if not (_is_leaf(src, "u") and _is_leaf(dst, "v")):
        return None
    return src.tensor, dst.tensor


def _shaped(tensors: Any, shape: tuple) -> bool:
    return all(tuple(t.shape[1:]) == shape for t in tensors)


def _binary(node: Any, op: str) -> tuple[Any, Any] | None:
    """The operands of a built-in message."""
    if isinstance(node, Call) and node.function is apply_binary and node.args[0] == op:
        return node.args[1], node.args[2]
    return None


def _operands(node: Any, names: tuple[str, ...]) -> tuple[Any, Any] | None:
    """The operands of a torch function of two."""
    if (
        isinstance(node, Call)
        and _name(node.function) in names
        and not node.kwargs
        and len(node.args) == 2
    ):
        return node.args[0], node.args[1]
    return None


def _call(node: Any, name: str, known: tuple[str, ...]) -> dict[str, Any] | None:
    """The arguments of a torch function by name, ``None`` for one that was not given.

    No match for a function that is given any but the ``known`` arguments, here in their order.
    """
    if not isinstance(node, Call) or _name(node.function) != name:
        return None
    if len(node.args) > len(known) or not set(node.kwargs) <= set(known):
        return None
    return {**dict.fromkeys(known), **dict(zip(known, node.args, strict=False)), **node.kwargs}


def _name(function: Callable) -> str:
    return getattr(function, "__name__", "")


def _is_leaf(node: Any, side: str) -> bool:
    return isinstance(node, Leaf) and node.side == side


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
