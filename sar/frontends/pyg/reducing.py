"""Reductions and softmax of rows of edges by one of their ends, over all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.pyg.factors import scaled_rows, times
from sar.frontends.pyg.index import EdgeEnd
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import BLANK_ROWS, Call, Leaf, raise_if_written
from sar.tracing.reducing import reduce_rows, rows_of
from sar.tracing.reducing import softmax as softmax_of_scope

OPS = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "amax": "max", "min": "min",
       "amin": "min"}  # fmt: skip


def edges_first(end: EdgeEnd, rows: Tensor, dim: int) -> Any:
    """Rows of edges, which are along ``dim``, as lazy ones along the first axis."""
    dim = dim % rows.dim()
    if isinstance(rows, EdgeTensor):
        if rows.scope.relation is not end.graph.scope().relation or rows.axis != dim:
            raise NotSupportedError(
                f"a sum of rows {tuple(rows.shape)} along dimension {dim} by ends of other edges"
            )
        return rows.movedim(dim, 0) if dim else rows
    if rows.shape[dim] != end.graph.num_edges():
        raise ValueError(
            f"rows: got {tuple(rows.shape)} along dimension {dim}, expected "
            f"{end.graph.num_edges()}, one for each of this rank's edges"
        )
    return rows_of(end.graph.scope(), "e", rows.movedim(dim, 0) if dim else rows)


def reduce_at(end: EdgeEnd, rows: Tensor, dim: int, op: str, num_rows: Any = None) -> Tensor:
    """Sum, mean, max or min at ``end`` of rows of edges, nodes along ``dim`` then; collective."""
    check_rows(end, "dim_size", num_rows)
    dim = dim % rows.dim()
    messages, dtype = edges_first(end, rows, dim), rows.dtype
    if dtype.is_complex:
        raise NotSupportedError(f"a {op} of rows of {dtype}; expected real numbers")
    if is_one_each(messages) and op == "sum":
        counts = degrees_of(end).to(dtype).view(-1, *[1] * (messages.dim() - 1))
        ones = padded(counts.expand(-1, *messages.shape[1:]).clone(), num_rows)
        return ones.movedim(0, dim) if dim else ones
    if not dtype.is_floating_point:
        messages = messages.to(torch.float64)
    found = _shared(end, messages, op)
    if found is None:
        found = _scaled(end, messages, op)
    if found is None:
        inner, row = _without_view(messages)
        found = reduce_rows(inner, op, end.side)
        found = found if row is None else found.reshape(len(found), *row)
    out = found
    if not dtype.is_floating_point:  # whole numbers have means of the default type
        out = out.to(torch.get_default_dtype()) if op == "mean" else out.long().to(dtype)
    out = padded(out, num_rows)
    return out.movedim(0, dim) if dim else out


def _shared(end: EdgeEnd, messages: EdgeTensor, op: str) -> Tensor | None:
    """What other modules of a layer that read the same rows of sources have brought, or bring."""
    sharing, node = end.graph.sharing, messages.node
    if sharing is None or end.side != "v" or not isinstance(node, Leaf) or node.side != "u":
        return None
    scope = messages.scope
    return sharing.reduce(scope.relation, node.tensor, op, scope.policy)  # type: ignore[no-any-return]


def _scaled(end: EdgeEnd, messages: EdgeTensor, op: str) -> Tensor | None:
    """The sum or mean of rows times numbers, which are multiplied where they are, before and after
    they travel; ``None`` of other messages."""
    if end.side != "v" or op not in ("sum", "mean"):
        return None
    node, scope = messages.read(), messages.scope
    found = scaled_rows(node)
    if found is None:
        return None
    raise_if_written([node])
    x, of_edges, of_rows = found
    rows: Any = rows_of(scope, "u", x)
    if of_edges is not None:
        rows = rows * rows_of(scope, "e", of_edges.view(-1, *[1] * (x.dim() - 1)))
    out = times(reduce_rows(rows, op), of_rows)
    return out.reshape(len(out), *messages.shape[1:])  # type: ignore[no-any-return]


def _without_view(messages: Any) -> tuple[EdgeTensor, Any]:
    """What messages are a view of, with the shape of a row of theirs, so that patterns are seen."""
    node = messages.read()
    if messages.axis == 0 and isinstance(node, Call) and node.name in _VIEWS and not node.tensors:
        inner = node.inputs[0].like
        if inner is not None and inner.dim() > 1 and len(inner) == BLANK_ROWS:
            return EdgeTensor(node.inputs[0], inner, messages.scope), messages.shape[1:]
    return messages, None


_VIEWS = ("view", "reshape", "flatten")


def is_one_each(rows: EdgeTensor) -> bool:
    """Whether all numbers are known to be 1."""
    return isinstance(rows.node, Call) and rows.node.function in _ONES


_ONES = (Tensor.new_ones, torch.ones_like)


def degrees_of(end: EdgeEnd) -> Tensor:
    """int64 [num_rows] edges of each row that an end may be; not to be written into."""
    relation = end.graph.scope().relation
    return relation.in_degrees if end.side == "v" else relation.out_degrees


def padded(out: Tensor, num_rows: Any = None) -> Tensor:
    """[num_rows, ...] rows, zeros behind those of the ends of edges."""
    if num_rows is None or int(num_rows) <= len(out):
        return out
    return torch.cat([out, out.new_zeros(int(num_rows) - len(out), *out.shape[1:])])


def check_rows(end: EdgeEnd, name: str, count: Any) -> None:
    if count is not None and not end.are_rows(count):
        raise ValueError(
            f"{name}: got {int(count)}, expected {end.num_rows}, this rank's nodes at that end"
        )


def softmax_at(end: EdgeEnd, scores: Tensor, dim: int) -> Tensor:
    """Softmax over the edges that share an end, lazily."""
    dim = dim % scores.dim()
    weights = softmax_of_scope(end.graph.scope(), edges_first(end, scores, dim), end.side)
    return weights.movedim(0, dim) if dim else weights
