"""Where DGL's edge operators meet a sharded graph.

``dgl.ops`` and the layers that imported from it call three internal functions with
``graph._graph``, where a sharded graph gives a :class:`GraphMarker`. ``dgl.reverse`` takes the
graph itself, the segment operators below DGL's readouts take its counts. When a graph is first
used, these names are replaced by functions that send our kinds here and all others on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar._private import (
    EDGE_SOFTMAX,
    SDDMM,
    SPMM,
    TOP_ROWS,
    TYPED_EDGE_SOFTMAX,
    TYPED_SDDMM,
    TYPED_SPMM,
)
from sar.edges import reverse_relation
from sar.frontends.dgl import fused, sharing, typed
from sar.frontends.dgl.counts import Counts, LocalCount
from sar.frontends.dgl.readout import segment_reduce, segment_softmax, topk
from sar.frontends.dgl.undistributed import refuse_undistributed
from sar.ops import run_messages, swap_sides
from sar.tracing.binary import BuiltinMessage, Operand
from sar.tracing.lazy import EdgeTensor, Scope, eager, node_of
from sar.tracing.nodes import Leaf, Node, Softmax
from sar.tracing.program import Program
from sar.tracing.support import not_supported


class Patch(NamedTuple):
    """A function of DGL's that goes another way when its first argument is of a kind of ours.

    Attributes:
        name, modules: the function, and the modules that hold it under this name.
        kind: of the first argument.
        function: what is called then, with the same arguments.
    """

    name: str
    modules: tuple[str, ...]
    kind: type
    function: Callable[..., Any]


class GraphMarker:
    """What ``graph._graph`` is for a slice or a graph of one relation."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        install()

    def number_of_etypes(self) -> int:
        """Edge types of the graph."""
        return len(self.graph.canonical_etypes)

    def number_of_ntypes(self) -> int:
        """Node types of the graph."""
        return len(self.graph.ntypes)

    def __getattr__(self, name: str) -> Any:
        raise not_supported(f"DGL's graph index has no {name!r} on a sharded graph")


def install(kind: type | None = None) -> None:
    """Put the dispatching functions in place, once; a no-op while DGL is not imported.

    Args:
        kind: a class of graphs that ``dgl.nn.Sequential`` shall take beside DGL's.
    """
    sequential: Any = sys.modules.get(_SEQUENTIAL)
    if kind is not None and sequential is not None and isinstance(sequential.DGLGraph, type):
        sequential.DGLGraph = (sequential.DGLGraph, kind)  # it is there for an isinstance only
    for patch in _PATCHES:
        for module_name in patch.modules:
            module = sys.modules.get(module_name)
            original = getattr(module, patch.name, None)
            if original is not None and not hasattr(original, "sharded"):
                setattr(module, patch.name, _dispatching(original, patch))
    fused.install(Counts, refuse_undistributed)
    sharing.install()
    typed.install()


def _dispatching(original: Callable, patch: Patch) -> Callable:
    @wraps(original)
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = patch.function if isinstance(first, patch.kind) else original
        return chosen(first, *args, **kwargs)

    call.sharded = patch.function  # type: ignore[attr-defined]
    return call


def _of_marked(function: Callable) -> Callable:
    """``function`` of a graph as one of its marker."""
    return lambda marker, *args, **kwargs: function(marker.graph, *args, **kwargs)


def _reverse(graph: Any, copy_ndata: bool = True, copy_edata: bool = False, **_: Any) -> Any:
    return graph.reverse(copy_ndata, copy_edata)


def edge_softmax(graph: Any, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
    """Softmax over the edges that end in the same node, lazily.

    The result is a node of the program (:class:`sar.tracing.nodes.Softmax`): a sum weighted by it
    computes its own normalizer on the way, other uses store one row per destination.

    Args:
        logits: [num_edges, ...] edge tensor, lazy or eager; [len(eids), ...] with ``eids``.
        eids: int positions of the local edges among which to normalize; the result is eager.
        norm_by: ``"src"`` normalizes over the edges that start in the same node; the sums are
            pushed to the owners of the sources.
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
    node = node_of(logits, scope.relation)
    like = torch.empty((0, *tuple(logits.shape)[1:]), dtype=logits.dtype, device=scope.device)
    side = "v" if norm_by == "dst" else "u"
    weights = Softmax(node, partial(_normalizer, scope, node, like, side), side, logits.dtype)
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
    from sar.frontends.dgl.passing import reduce_messages

    u, e = Operand("u", "lhs"), Operand("e", "rhs")
    name = "copy" if op.startswith("copy") else op
    first = e if op == "copy_rhs" else u
    message = BuiltinMessage(name, first, None if name == "copy" else e, "m")
    operands = {o: t for o, t in ((u, lhs), (e, rhs)) if t is not None}
    scope = graph.scope()
    out = reduce_messages(scope, message, operands, reduce_op)
    if reduce_op not in ("max", "min") or not scope.relation.num_edges_global:
        return out
    empty = (scope.relation.in_degrees == 0).view(-1, *[1] * (out.dim() - 1))
    return out.masked_fill(empty, -torch.inf if reduce_op == "max" else torch.inf)


def _of_several(*_: Any, **__: Any) -> Any:
    raise not_supported(
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
    from sar.frontends.dgl.passing import edge_values

    left, right = Operand(lhs_target, "lhs"), Operand(rhs_target, "rhs")
    name = "copy" if op.startswith("copy") else op
    first = right if op == "copy_rhs" else left
    message = BuiltinMessage(name, first, None if name == "copy" else right, "m")
    operands = {o: t for o, t in ((left, lhs), (right, rhs)) if t is not None}
    return edge_values(graph.scope(), message, operands)


_SEQUENTIAL = "dgl.nn.pytorch.utils"
_PATCHES = (
    Patch(*EDGE_SOFTMAX, GraphMarker, _of_marked(edge_softmax)),
    Patch(*SPMM, GraphMarker, _of_marked(gspmm)),
    Patch(*SDDMM, GraphMarker, _of_marked(gsddmm)),
    Patch(*TYPED_EDGE_SOFTMAX, GraphMarker, _of_several),
    Patch(*TYPED_SPMM, GraphMarker, _of_several),
    Patch(*TYPED_SDDMM, GraphMarker, _of_several),
    Patch(
        "reverse",
        ("dgl", "dgl.transforms", "dgl.transforms.functional", "dgl.nn.pytorch.conv.graphconv"),
        Counts,
        _reverse,
    ),
    Patch("segment_reduce", ("dgl.ops.segment", "dgl.ops", "dgl"), LocalCount, segment_reduce),
    Patch("segment_softmax", ("dgl.ops.segment", "dgl.ops", "dgl"), LocalCount, segment_softmax),
    Patch(*TOP_ROWS, Counts, topk),
)
