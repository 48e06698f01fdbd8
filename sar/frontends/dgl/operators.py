"""What DGL's edge operators do on a sharded graph.

``dgl.ops`` and the layers that imported from it call three internal functions with
``graph._graph``, where a sharded graph gives a :class:`GraphMarker`;
:mod:`sar.frontends.dgl.patches` sends such calls here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.dgl.builtin import BuiltinMessage, Operand
from sar.frontends.dgl.passing import reduce_message
from sar.tracing.lazy import eager
from sar.tracing.reducing import softmax


class GraphMarker:
    """What ``graph._graph`` is for a slice or a graph of one relation."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def number_of_etypes(self) -> int:
        return len(self.graph.canonical_etypes)

    def number_of_ntypes(self) -> int:
        return len(self.graph.ntypes)

    def __getattr__(self, name: str) -> Any:
        raise NotSupportedError(f"DGL's graph index has no {name!r} on a sharded graph")


def edge_softmax(graph: Any, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
    """Softmax over the edges that end in the same node, lazily.

    Args:
        logits: [num_edges, ...] edge tensor, lazy or eager; [len(eids), ...] with ``eids``.
        eids: int positions of the local edges among which to normalize; the result is eager.
        norm_by: ``"src"``: over edges that start in the same node, by sums pushed to its owner.
    """
    if norm_by not in ("dst", "src"):
        raise ValueError(f"norm_by: got {norm_by!r}, expected 'dst' or 'src'")
    if not (isinstance(eids, str) and eids == "__ALL__"):
        return _softmax_of_some(graph, logits, torch.as_tensor(eids).long(), norm_by)
    scope = graph.scope()
    if len(logits) != scope.relation.num_edges:
        raise ValueError(
            f"logits: got {len(logits)} rows, expected {scope.relation.num_edges}, one per edge"
        )
    return softmax(scope, logits, "v" if norm_by == "dst" else "u")


def _softmax_of_some(graph: Any, logits: Tensor, eids: Tensor, norm_by: str) -> Tensor:
    """[len(eids), ...] eager softmax among the local edges ``eids`` alone; collective."""
    if len(logits) != len(eids):
        raise ValueError(f"logits: got {len(logits)} rows, expected {len(eids)}, one per edge id")
    logits = eager(logits)
    everywhere = logits.new_full((graph.num_edges(), *logits.shape[1:]), -torch.inf)
    everywhere = everywhere.index_copy(0, eids, logits)
    return eager(edge_softmax(graph, everywhere, norm_by=norm_by)).index_select(0, eids)


def gspmm(graph: Any, op: str, reduce_op: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
    """``reduce_op`` over messages ``op(source row, edge row)``; collective.

    As DGL's, unlike ``update_all``: a maximum of no messages is -inf, but 0 where the graph has no
    edge at all.
    """
    scope = graph.scope()
    out = reduce_message(scope, *_message(op, ("u", lhs), ("e", rhs)), reduce_op)
    if reduce_op not in ("max", "min") or not scope.relation.num_edges_global:
        return out
    empty = (scope.relation.in_degrees == 0).view(-1, *[1] * (out.dim() - 1))
    return out.masked_fill(empty, -torch.inf if reduce_op == "max" else torch.inf)


def of_several(*_: Any, **__: Any) -> Any:
    raise NotSupportedError(
        "dgl.ops: got a graph of several relations, expected graph[etype]; "
        "multi_update_all reduces several"
    )


def gsddmm(
    graph: Any,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """``op(left row, right row)`` per edge, lazily."""
    message, columns = _message(op, (lhs_target, lhs), (rhs_target, rhs))
    return message.rows(graph.scope(), columns)


def _message(
    op: str, lhs: tuple[str, Tensor | None], rhs: tuple[str, Tensor | None]
) -> tuple[BuiltinMessage, list[Tensor]]:
    """The message of an operator of DGL's on (side, column) each, and the columns it reads."""
    left, right = Operand(lhs[0], "lhs"), Operand(rhs[0], "rhs")
    if op.startswith("copy"):
        first, column = (right, rhs[1]) if op == "copy_rhs" else (left, lhs[1])
        message, columns = BuiltinMessage("copy", first, None, "m"), [column]
    else:
        message, columns = BuiltinMessage(op, left, right, "m"), [lhs[1], rhs[1]]
    return message, [column for column in columns if column is not None]
