"""Where DGL's edge operators meet a sharded graph.

``dgl.ops`` and the layers that imported from it call three internal functions with
``graph._graph``. A sharded graph gives a :class:`GraphMarker` there; when it is first asked for
one, the three names are replaced by functions that send marked calls here and all others on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from sar.graph.builtin import BuiltinMessage, Operand
from sar.graph.lazy import EdgeTensor, node_of
from sar.graph.program import Call, Leaf, Program
from sar.graph.support import not_supported
from sar.ops import run_messages

_INTERNAL = {
    "dgl.ops.edge_softmax": "edge_softmax_internal",
    "dgl.ops.spmm": "gspmm_internal",
    "dgl.ops.sddmm": "gsddmm_internal",
}


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


def install() -> None:
    """Put the dispatching functions in place, once; a no-op while DGL is not imported."""
    for module_name, name in _INTERNAL.items():
        module = sys.modules.get(module_name)
        original = getattr(module, name, None)
        if original is not None and not hasattr(original, "sharded"):
            setattr(module, name, _dispatching(original, _SHARDED[name]))


def _dispatching(original: Callable, sharded: Callable) -> Callable:
    @wraps(original)
    def call(index: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(index, GraphMarker):
            return sharded(index.graph, *args, **kwargs)
        return original(index, *args, **kwargs)

    call.sharded = sharded  # type: ignore[attr-defined]
    return call


def edge_softmax(graph: Any, logits: Tensor, eids: Any = "__ALL__", norm_by: str = "dst") -> Tensor:
    """Softmax over the edges that end in the same node, lazily; collective.

    a_e = exp(z_e - lse_i), lse_i = log sum over the edges e' into i of exp(z_e'). Only lse, one
    row per destination, is stored; both passes recompute z block by block.

    Args:
        logits: [num_edges, ...] edge tensor, lazy or eager.
    """
    if norm_by != "dst":
        raise not_supported(f"edge_softmax: got norm_by={norm_by!r}, expected 'dst'")
    if not (isinstance(eids, str) and eids == "__ALL__"):
        raise not_supported("edge_softmax: got a subset of edges, expected all")
    scope = graph.scope()
    node = node_of(logits)
    program = Program([node])
    like = torch.empty((0, *tuple(logits.shape)[1:]), dtype=logits.dtype, device=scope.device)
    (lse,) = run_messages(
        scope.relation, program.messages(), "logsumexp", scope.policy, program.inputs(), [like]
    )
    shifted = Call(torch.sub, (node, Leaf("v", lse)), {})
    return EdgeTensor(Call(_exp_as, (shifted, logits.dtype), {}), like, scope)


def _exp_as(shifted: Tensor, dtype: torch.dtype) -> Tensor:
    return shifted.exp().to(dtype)


def gspmm(graph: Any, op: str, reduce_op: str, lhs: Tensor | None, rhs: Tensor | None) -> Tensor:
    """``reduce_op`` over messages ``op(source row, edge row)``; collective."""
    from sar.graph.passing import reduce_messages

    u, e = Operand("u", "lhs"), Operand("e", "rhs")
    name = "copy" if op.startswith("copy") else op
    first = e if op == "copy_rhs" else u
    message = BuiltinMessage(name, first, None if name == "copy" else e, "m")
    operands = {o: t for o, t in ((u, lhs), (e, rhs)) if t is not None}
    return reduce_messages(graph.scope(), message, operands, reduce_op)


def gsddmm(
    graph: Any,
    op: str,
    lhs: Tensor | None,
    rhs: Tensor | None,
    lhs_target: str = "u",
    rhs_target: str = "v",
) -> Tensor:
    """``op(left row, right row)`` per edge, lazily."""
    from sar.graph.passing import edge_values

    left, right = Operand(lhs_target, "lhs"), Operand(rhs_target, "rhs")
    name = "copy" if op.startswith("copy") else op
    first = right if op == "copy_rhs" else left
    message = BuiltinMessage(name, first, None if name == "copy" else right, "m")
    operands = {o: t for o, t in ((left, lhs), (right, rhs)) if t is not None}
    return edge_values(graph.scope(), message, operands)


_SHARDED: dict[str, Callable[..., Any]] = {
    "edge_softmax_internal": edge_softmax,
    "gspmm_internal": gspmm,
    "gsddmm_internal": gsddmm,
}
