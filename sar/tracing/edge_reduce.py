"""Reductions of lazy edge tensors over all edges of all ranks: sum, mean, max, min, any, all, std.

Each is a reduction at the destinations, block by block, and then one over nodes and ranks, so
nothing edge-sized is made. The result is eager and equal on all ranks: Note [Replicated results]
in :mod:`sar.ops.readout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sar.edges import ReversedRelation
from sar.ops import run_messages, swap_sides
from sar.ops.readout import extreme_over_ranks, sum_over_ranks
from sar.tracing.calls import name_of
from sar.tracing.program import Program

if TYPE_CHECKING:
    from sar.tracing.edge_rows import EdgeRows

_KINDS = {"sum", "mean", "max", "min", "amax", "amin", "any", "all"}


def reduction_of(func: Callable, args: tuple, kwargs: dict) -> Callable[[], Tensor] | None:
    """What computes ``func`` when it reduces an edge tensor over its edges; else ``None``.

    ``max`` and ``min`` with a dimension, which also ask for the edge, are not among them.
    """
    name = name_of(func)
    if name not in {*_KINDS, "softmax", "var", "std"} or not args or not hasattr(args[0], "scope"):
        return None
    x, rest = args[0], list(args[1:])
    if x.axis != 0:
        return None
    if name == "softmax":
        dim = rest[0] if rest else kwargs.get("dim")
        over_edges = dim in (0, -x.dim()) and kwargs.get("dtype") is None and len(rest) < 3
        return (lambda: _softmax(x)) if over_edges else None
    if name in ("var", "std"):
        dim, keepdim, correction = _of_variance(*rest, **kwargs)
        rest, kwargs = [dim, keepdim], {}
    dim = rest.pop(0) if rest else kwargs.get("dim", kwargs.get("axis"))
    keepdim = rest.pop(0) if rest else kwargs.get("keepdim", False)
    if rest or set(kwargs) - {"dim", "axis", "keepdim"} or isinstance(dim, Tensor):
        return None
    dims = range(x.dim()) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    if any(not -x.dim() <= d < x.dim() for d in dims):
        return None  # torch says what is wrong
    dims = sorted({d % x.dim() for d in dims})
    if dims[0] != 0 or (name in ("max", "min") and dim is not None):
        return None
    if name in ("var", "std"):
        return lambda: _variance(x, dims, keepdim, correction, name == "std")
    kind = name[1:] if name in ("amax", "amin") else name
    return lambda: reduce_edges(x, kind, dims, keepdim)


def reduce_edges(x: EdgeRows, kind: str, dims: list[int], keepdim: bool) -> Tensor:
    """``kind`` over dimensions ``dims``, 0 among them, of the edges of all ranks; collective."""
    of_row: Any = x
    features = dims[1:]
    if kind in ("any", "all"):
        of_row = (x != 0).to(torch.uint8).to(torch.float32)
    elif not x.is_floating_point():
        of_row = x.to(torch.float64)
    extreme = {"any": "max", "all": "min"}.get(kind, kind)
    if features:
        feature_kind = {"mean": "sum", "max": "amax", "min": "amin"}.get(extreme, extreme)
        of_row = getattr(of_row, feature_kind)(features, keepdim=True)
    relation = x.scope.relation
    if extreme in ("sum", "mean"):
        total = sum_over_ranks(_at_destinations(of_row, "sum"), relation.group)
    else:
        rows = _at_destinations(of_row, extreme)
        rows = rows[_in_degrees(relation) > 0]
        total = extreme_over_ranks(rows, relation.group, largest=extreme == "max")
    if kind == "mean":
        total = total / (relation.num_edges_global * math.prod(x.shape[d] for d in features))
    total = total.unsqueeze(0)
    if not keepdim:
        total = total.reshape([s for d, s in enumerate(total.shape) if d not in dims])
    if kind in ("any", "all"):
        return total > 0
    return total if x.is_floating_point() or kind == "mean" else total.to(_counted(x.dtype, kind))


def _of_variance(
    dim: Any = None, unbiased: Any = True, keepdim: Any = False, *, correction: Any = None
) -> tuple[Any, Any, Any]:
    """The dimensions of ``var`` and ``std``, ``keepdim``, and what is taken off the count."""
    if isinstance(dim, bool):  # of all elements
        dim, unbiased = None, dim
    return dim, keepdim, int(unbiased) if correction is None else correction


def _variance(x: Any, dims: list[int], keepdim: bool, correction: Any, root: bool) -> Tensor:
    """Variance, or its root, over dimensions ``dims``, 0 among them, of all ranks; collective."""
    count = x.scope.relation.num_edges_global * math.prod(x.shape[d] for d in dims[1:])
    deviations = x - reduce_edges(x, "mean", dims, True)
    found = reduce_edges(deviations * deviations, "sum", dims, keepdim) / max(0, count - correction)
    if not root:
        return found
    is_some = found != 0  # torch's root of 0 has no gradient
    return torch.where(is_some, found, 1).sqrt() * is_some


def _softmax(x: EdgeRows) -> Tensor:
    """Softmax over the edges of all ranks, lazily; collective."""
    with torch.no_grad():
        largest = reduce_edges(x, "max", [0], True)  # a constant cancels
    weights: Any = (x - largest).exp()
    return weights / reduce_edges(weights, "sum", [0], True)


def _counted(dtype: torch.dtype, kind: str) -> torch.dtype:
    return torch.int64 if kind == "sum" else dtype


def _in_degrees(relation: Any) -> Tensor:
    return relation.out_degrees if isinstance(relation, ReversedRelation) else relation.in_degrees


def _at_destinations(x: EdgeRows, kind: str) -> Tensor:
    """[num_dst, ...] ``kind`` over edges that end in each row of the graph before a reversal."""
    program, scope = Program([x.read()]), x.scope
    messages, inputs, relation = program.messages(), program.inputs(), scope.relation
    if isinstance(relation, ReversedRelation):
        messages, inputs = swap_sides(messages, inputs)
        relation = relation.forward
    return run_messages(relation, messages, kind, scope.policy, inputs, [x.without_rows])[0]
