"""Lazy edge tensors: a torch tensor by its looks, an edge program inside.

Torch functions on an :class:`EdgeTensor` extend its program (:mod:`sar.tracing.recording`),
reduce it over all edges (:mod:`sar.tracing.edge_reduce`), or get the local edges, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar._private import tree_leaves, tree_map, version_of, without_overrides
from sar.errors import NotSupportedError
from sar.graph.view import Scope
from sar.tracing.calls import is_read
from sar.tracing.edge_reduce import reduction_of
from sar.tracing.edge_rows import EdgeRows, eager, node_of, stored, stored_values
from sar.tracing.nodes import EdgesCounted, NumEdges
from sar.tracing.recording import CannotRecord, record, record_again

__all__ = ["CannotRecord", "EdgeTensor", "Scope", "eager", "node_of", "stored"]


class EdgeTensor(EdgeRows):
    """One row per local edge, computed block by block when it is reduced.

    A function that cannot be recorded gets the local edges, with a warning, which is collective. A
    use that leaves the tensors (``.item()``, iteration, saving) raises ``NotSupportedError``, as
    one rank alone may make it: :meth:`materialize` first, on every rank.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(getattr(kind, "is_structure", False) for kind in types):
            return NotImplemented  # torch asks that class, which stands for ends of edges
        if func in _VIEWS:
            return _VIEWS[func](args[0])
        if func in _FILLED and not _of_edges(args[1:], kwargs):
            return func(args[0].without_rows, *args[1:], **(kwargs or {}))
        if func in _MOVES and isinstance(args[0], EdgeTensor):
            func, args, kwargs = _cast(func, *args, **(kwargs or {}))
        if not is_read(func) and func not in METADATA:
            return cls._call(func, *_first_by_place(args, kwargs or {}))
        with without_overrides():
            found = func(*args, **(kwargs or {}))
            return with_count(found, *args, **(kwargs or {})) if func in SIZES else found

    @classmethod
    def _call(cls, func: Callable, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a call of a function; one that cannot be recorded gets the local edges."""
        first = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, EdgeTensor))
        if func in _MOVES and (func is not Tensor.to or _names_device(args, kwargs)):
            blank = func(first.without_rows, *args[1:], **kwargs)
            if blank.device == first.device:
                return first if blank.dtype == first.dtype else first.to(blank.dtype)
        if func is Tensor.__getitem__ and _is_mask(args[1]):
            if isinstance(args[0], EdgeTensor) and args[0].is_stored and args[0].axis == 0:
                return eager(args[0])[eager(args[1])]
        again = record_again(func, args, kwargs, first)
        if again is not NotImplemented:
            return again
        writes = False
        if func in _ESCAPES:
            refuse_escape(func, args)
        else:
            _refuse_places(func, first, kwargs)
            reduction = reduction_of(func, args, kwargs)
            if reduction is not None:
                return reduction()
            try:
                return record(func, args, kwargs, first)
            except CannotRecord as problem:
                hold_local_edges(func, args, kwargs, problem)
                writes = problem.writes
        eager_args, kwargs = tree_map(eager, (args, kwargs))
        before = [version_of(eager_args[0])] if first is (*args, None)[0] else []
        result = func(*eager_args, **kwargs)
        if func is Tensor.__deepcopy__:
            return cls(stored_values(result, first.axis), result, first.scope, first.axis)
        if before and (writes or before != [version_of(eager_args[0])]):
            # Later functions see the write.
            args[0].rebind(stored_values(eager_args[0], args[0].axis))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(eager, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __iter__(self) -> Any:
        refuse_escape(Tensor.__iter__, (self,))
        return iter(self.materialize())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EdgeTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def with_count(found: Any, x: EdgeRows, dim: int | None = None) -> Any:
    """What ``size``, ``shape`` or ``numel`` gave, in which edges are :class:`EdgesCounted`."""
    count = NumEdges.of(x.scope.relation)
    if type(found) is int and dim is None:
        return EdgesCounted.of(x.scope.relation, math.prod(x.kind[0]))
    if dim is not None:
        return count if dim % x.dim() == x.axis else found
    return torch.Size((*found[: x.axis], count, *found[x.axis + 1 :]))


def _of_edges(sizes: tuple, kwargs: dict[str, Any] | None) -> bool:
    """Whether a size among arguments is the number of edges, not just as large."""
    return any(isinstance(one, NumEdges) for one in tree_leaves((sizes, kwargs)))


def _names_device(args: Any, kwargs: dict[str, Any]) -> bool:
    return "device" in kwargs or isinstance((*args, None, None)[1], (str, torch.device))


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype == torch.bool and item.dim() == 1


def _first_by_place(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with the tensor that a function is about in the first place."""
    for name in ("input", "tensor"):
        if not args and isinstance(kwargs.get(name), EdgeTensor):
            return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs


def _cast(func: Callable, x: EdgeTensor, *args: Any, **kwargs: Any) -> tuple[Callable, Any, Any]:
    """The same call as one to a dtype alone, where rows of edges stay on their device."""
    given = [one.without_rows if isinstance(one, EdgeTensor) else one for one in args]
    none = x.without_rows
    like = func(none, *given, **kwargs)
    if like.device != none.device:
        return func, (x, *args), kwargs
    return Tensor.to, (x, like.dtype), {}


def _refuse_places(func: Callable, x: EdgeTensor, kwargs: dict[str, Any]) -> None:
    """Raise ``NotSupportedError`` where values are wanted in another tensor, or other rows."""
    name = getattr(func, "__name__", str(func))
    if kwargs.get("out") is not None:
        raise NotSupportedError(
            f"{name}: got an edge tensor {tuple(x.shape)} and out=, expected to be called without "
            "it: values exist block by block"
        )
    if func in _RESHAPES:
        raise NotSupportedError(
            f"{name}: got an edge tensor {tuple(x.shape)}, whose shape stays; expected "
            f"{name.removesuffix('_')}, which gives a view"
        )
    if func is Tensor.requires_grad_:
        raise NotSupportedError(
            f"{name}: got an edge tensor {tuple(x.shape)}, expected a tensor [num_edges, ..] that "
            "asks for a gradient, such as a parameter, in its place"
        )


_RESHAPES = {
    Tensor.squeeze_, Tensor.unsqueeze_, Tensor.t_, Tensor.transpose_, Tensor.swapaxes_,
    Tensor.swapdims_, Tensor.resize_, Tensor.resize_as_, Tensor.as_strided_, Tensor.set_,
}  # fmt: skip


def refuse_escape(func: Callable, args: Any) -> None:
    """Raise ``NotSupportedError`` unless the values of all edge tensors exist."""
    for x in tree_leaves(args):
        if isinstance(x, EdgeTensor) and not x.is_stored:
            name = getattr(func, "__name__", func)
            raise NotSupportedError(
                f"{name}: got an edge tensor {tuple(x.shape)}, whose values exist block by block; "
                "expected its .materialize(), which every rank calls and which takes "
                f"{x.num_bytes} bytes on this rank"
            )


def hold_local_edges(func: Callable, args: Any, kwargs: Any, problem: Exception) -> None:
    """Say, once per graph, that a function takes the local edges; collective with a budget.

    Raises ``NotSupportedError`` on every rank when any rank's edges exceed the memory budget.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, EdgeTensor)]
    scope, size = tensors[0].scope, sum(x.num_bytes for x in tensors)
    name = getattr(func, "__name__", str(func))
    budget = scope.policy.memory_budget
    if budget is not None and not all(x.is_stored for x in tensors):
        error = None
        if size > int(budget):
            error = NotSupportedError(
                f"{name} on an edge tensor cannot be streamed ({problem}) and the local edges take "
                f"{size} bytes, expected at most the memory budget of {budget}"
            )
        scope.relation.group.agree(error, name)
    known = scope.relation.derived("warned of", set)
    if name not in known:
        known.add(name)
        warnings.warn(
            f"{name} on an edge tensor cannot be streamed ({problem}): it gets the "
            f"{tensors[0].num_edges} local edges alone, held in memory with {size} bytes",
            stacklevel=4,
        )


# Attributes that are functions of the values, by what reads them.
_VIEWS: dict[Callable, Callable[[Tensor], Tensor]] = {
    Tensor.T.__get__: lambda x: x.permute(*reversed(range(x.dim()))),  # type: ignore[attr-defined]
    Tensor.mT.__get__: lambda x: x.transpose(-2, -1),  # type: ignore[attr-defined]
    Tensor.H.__get__: torch.adjoint,  # type: ignore[attr-defined]
    Tensor.mH.__get__: torch.adjoint,  # type: ignore[attr-defined]
    Tensor.real.__get__: torch.real,  # type: ignore[attr-defined]
    Tensor.imag.__get__: torch.imag,  # type: ignore[attr-defined]
}

SIZES = {Tensor.size, Tensor.numel, torch.numel, Tensor.shape.__get__}  # type: ignore[attr-defined]
_MOVES = {Tensor.to, Tensor.cpu, Tensor.cuda}
# Made with sizes that are given, of dtype and device of the tensor.
_FILLED = {Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty}

METADATA = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    torch.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    Tensor.__len__,
    Tensor.__repr__,
    Tensor.element_size,
    Tensor.ndimension,
    Tensor.stride,
    Tensor.is_contiguous,
}

# What leaves the tensors, and may happen on one rank only.
_ESCAPES = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__complex__,
    Tensor.__index__,
    Tensor.__contains__,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
    Tensor.equal,
    Tensor.allclose,
    Tensor.is_nonzero,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
