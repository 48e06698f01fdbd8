"""Lazy edge tensors: a torch tensor by its looks, an edge program inside.

Torch functions on an :class:`EdgeTensor` extend its program (:mod:`sar.tracing.recording`),
reduce it over all edges (:mod:`sar.tracing.edge_reduce`), or get the local edges, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sar._private import make_wrapper, tree_leaves, tree_map, without_overrides
from sar.edges import AnyRelation
from sar.errors import SarError
from sar.graph.view import Scope
from sar.ops import run_messages
from sar.tracing.edge_reduce import reduction_of
from sar.tracing.function_guard import asks_for_gradients, refuse_function
from sar.tracing.message_dropout import DROPOUTS
from sar.tracing.program import BLANK_ROWS, Call, Leaf, Node, Program
from sar.tracing.support import not_supported


class CannotRecord(SarError):
    """A function whose result is not one row per edge."""


class EdgeTensor(Tensor):
    """One row per local edge, computed block by block when it is reduced.

    ``axis`` is the dimension that the edges are along; only views lead to another than 0.

    A function that cannot be recorded gets the local edges, with a warning, which is collective. A
    use that leaves the tensors (``.item()``, iteration, saving) raises ``NotSupportedError``, as
    one rank alone may make it: :meth:`materialize` first, on every rank.
    """

    node: Node
    scope: Scope
    axis: int
    base: EdgeTensor | None
    _writes: int
    _writes_of_base: int  # when this view of it was taken
    _is_stale: bool
    is_dense: bool  # its elements would lie one behind the other
    column: Tensor | None  # the stored one that it is: what is written goes there
    _eager: Tensor | None
    _with_grad: bool
    _recorded_with_grad: bool

    @staticmethod
    def __new__(
        cls, node: Node, like: Tensor, scope: Scope, axis: int = 0, base: EdgeTensor | None = None
    ) -> EdgeTensor:
        """``like``: its shape, but for the size of ``axis``, and dtype; ``base``: of a view."""
        shape = list(like.shape)
        shape[axis] = scope.relation.num_edges
        made = make_wrapper(cls, shape, dtype=like.dtype, device=scope.device)
        made.node, made.scope, made.axis = node, scope, axis
        row = math.prod(shape[:axis] + shape[axis + 1 :]) * like.element_size()
        node.row_bytes = max(node.row_bytes, row)
        shape[axis] = BLANK_ROWS
        node.like = torch.empty(shape, dtype=like.dtype, device="meta")
        made.base, made._writes, made._is_stale = base, 0, False
        made._writes_of_base = 0 if base is None else base._writes
        made.is_dense = like.is_contiguous() and (base is None or base.is_dense)
        made._eager, made._with_grad, made.column = None, False, None
        made._recorded_with_grad = torch.is_grad_enabled()
        return made

    @property
    def num_edges(self) -> int:
        """Local edges of the relation."""
        return self.scope.relation.num_edges

    def read(self) -> Node:
        """The program; a constant to gradients where it was recorded without them."""
        self._refuse_stale()
        if not torch.is_grad_enabled():
            refuse_function(self, with_grad=self._recorded_with_grad)
        given = torch.is_grad_enabled() and not self._recorded_with_grad
        if given and not isinstance(self.node, Leaf):
            constant = Call(Tensor.detach, (self.node,), {})
            constant.like = self.node.like
            return constant
        return self.node

    def rebind(self, node: Node, *, same_values: bool = False) -> None:
        """What was written in place is the program from now on."""
        self._refuse_stale()
        if (
            self._recorded_with_grad
            and not torch.is_grad_enabled()
            and asks_for_gradients(self.node)
        ):
            raise not_supported(
                f"an edge tensor {tuple(self.shape)}: written in place where gradients are "
                "disabled, but its values have one; expected the write on its .detach()"
            )
        if not same_values and any(x.column is not None for x in self._bases()):
            raise not_supported(
                f"an edge tensor {tuple(self.shape)}: a view of an edge column, written in place; "
                "expected the write on the column, or on a copy that is stored"
            )
        node.like = self.node.like
        self.node, self._eager = node, None
        self._recorded_with_grad = torch.is_grad_enabled()
        if same_values:
            return
        self._writes += 1
        for x in self._bases():
            x._is_stale = True

    def write(self, func: Callable, args: Any, kwargs: dict[str, Any]) -> EdgeTensor:
        """``func`` on the stored column that this is, instead of on this, its first argument;
        collective if another has to be computed.

        What was recorded of its former values raises when it is run.
        """
        self._refuse_stale()
        if not torch.is_grad_enabled():
            refuse_function(self, with_grad=self._recorded_with_grad)
        others, kwargs = tree_map(_made_eager, (args[1:], kwargs))
        func(self.column, *others, **kwargs)
        old = self.node
        self.node = Leaf("e", self.column, getattr(old, "name", ""))  # type: ignore[arg-type]
        self.node.like, self.node.row_bytes = old.like, old.row_bytes
        self._writes += 1
        return self

    def _bases(self) -> Iterator[EdgeTensor]:
        """What this is a view of, and that is a view of, and so on."""
        base = self.base
        while base is not None:
            yield base
            base = base.base

    def _refuse_stale(self) -> None:
        views = zip((self, *self._bases()), self._bases(), strict=False)
        if self._is_stale or any(x._writes_of_base != base._writes for x, base in views):
            raise not_supported(
                f"an edge tensor {tuple(self.shape)}: a tensor that shares its values was written "
                "in place; expected the write on a copy, or a view that is taken after it"
            )

    def materialize(self) -> Tensor:
        """[num_edges, ...] eager values; collective unless stored, computed once."""
        self._refuse_stale()
        if isinstance(self.node, Leaf) and self.node.side == "e":
            return self.node.tensor
        if self.axis != 0:
            return self.movedim(self.axis, 0).materialize().movedim(0, self.axis)  # type: ignore
        if self._eager is None or torch.is_grad_enabled() > self._with_grad:
            self._with_grad = torch.is_grad_enabled()
            program = Program([self.read()])
            like = [torch.empty((0, *tuple(self.shape)[1:]), dtype=self.dtype)]
            results = run_messages(
                self.scope.relation,
                program.messages(),
                "edges",
                self.scope.policy,
                program.inputs(),
                like,
            )
            self._eager = results[0]
        return self._eager

    @property
    def is_stored(self) -> bool:
        """Whether the values exist already."""
        return self._eager is not None or (isinstance(self.node, Leaf) and self.node.side == "e")

    @property
    def num_bytes(self) -> int:
        """Of the values on the local edges."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _first_by_place(args, kwargs or {})
        view = _VIEWS.get(getattr(getattr(func, "__self__", None), "__name__", ""))
        if view is not None and getattr(func, "__name__", "") == "__get__":
            return view(args[0])
        if func in METADATA or getattr(func, "__name__", "") == "__get__":
            with without_overrides():
                return func(*args, **kwargs)
        from sar.tracing.recording import record

        first = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, EdgeTensor))
        if func in _ESCAPES:
            refuse_escape(func, args)
        else:
            _refuse_places(func, first, kwargs)
            if _writes_column(func, args, kwargs):
                return args[0].write(func, args, kwargs)
            reduction = reduction_of(func, args, kwargs)
            if reduction is not None:
                return reduction()
            try:
                return record(func, args, kwargs, first)
            except CannotRecord as problem:
                hold_local_edges(func, args, kwargs, problem)
        eager_args, kwargs = tree_map(_made_eager, (args, kwargs))
        result = func(*eager_args, **kwargs)
        if args and isinstance(args[0], EdgeTensor) and is_in_place(func):
            args[0].rebind(_stored(eager_args[0], args[0].axis))  # later functions see the write
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_made_eager, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __iter__(self) -> Any:
        refuse_escape(Tensor.__iter__, (self,))
        return iter(self.materialize())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EdgeTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _first_by_place(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same arguments, the tensor that a function is about in the first place."""
    for name in ("input", "tensor"):
        if not args and isinstance(kwargs.get(name), EdgeTensor):
            return (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    return args, kwargs


def _writes_column(func: Callable, args: Any, kwargs: dict[str, Any]) -> bool:
    in_place = func not in DROPOUTS and (is_in_place(func) or kwargs.get("inplace"))
    return bool(in_place and isinstance(args[0], EdgeTensor) and args[0].column is not None)


def _refuse_places(func: Callable, x: EdgeTensor, kwargs: dict[str, Any]) -> None:
    """Raise ``NotSupportedError`` where values are wanted in another tensor, or other rows."""
    name = getattr(func, "__name__", str(func))
    if kwargs.get("out") is not None:
        raise not_supported(
            f"{name}: got an edge tensor {tuple(x.shape)} and out=, expected to be called without "
            "it: values exist block by block"
        )
    if name in _RESHAPES:
        raise not_supported(
            f"{name}: got an edge tensor {tuple(x.shape)}, whose shape stays; expected "
            f"{name.removesuffix('_')}, which gives a view"
        )


def is_in_place(func: Callable) -> bool:
    """Whether a torch function writes into its first argument, as its name tells."""
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))


_RESHAPES = {
    "squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_",
    "as_strided_", "set_",
}  # fmt: skip


def _stored(values: Tensor, axis: int) -> Node:
    """A program for values whose edges are along ``axis``."""
    leaf = Leaf("e", values.movedim(axis, 0))
    return Call(Tensor.movedim, (leaf, 0, axis), {}) if axis else leaf


def refuse_escape(func: Callable, args: Any) -> None:
    """Raise ``NotSupportedError`` unless the values of all edge tensors exist."""
    for x in tree_leaves(args):
        if isinstance(x, EdgeTensor) and not x.is_stored:
            name = getattr(func, "__name__", func)
            raise not_supported(
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
            error = not_supported(
                f"{name} on an edge tensor cannot be streamed ({problem}) and the local edges take "
                f"{size} bytes, expected at most the memory budget of {budget}"
            )
        scope.relation.group.agree(error, name)
    known = _warned.setdefault(scope.relation, set())
    if name not in known:
        known.add(name)
        warnings.warn(
            f"{name} on an edge tensor cannot be streamed ({problem}): it gets the "
            f"{tensors[0].num_edges} local edges alone, held in memory with {size} bytes",
            stacklevel=3,
        )


_warned: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def _made_eager(value: Any) -> Any:
    return value.materialize() if isinstance(value, EdgeTensor) else value


def eager(tensor: Tensor) -> Tensor:
    """A plain tensor of what may be lazy."""
    return tensor.materialize() if isinstance(tensor, EdgeTensor) else tensor


# Attributes that are functions of the values.
_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.permute(*reversed(range(x.dim()))),
    "mT": lambda x: x.transpose(-2, -1),
    "H": torch.adjoint,
    "mH": torch.adjoint,
    "real": torch.real,
    "imag": torch.imag,
}

METADATA = {
    Tensor.dim,
    Tensor.size,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_complex,
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


def node_of(tensor: Tensor, relation: AnyRelation, name: str = "") -> Node:
    """The program of an edge column of ``relation``, lazy or eager.

    A program over other edges, or over the same ones turned round, does not fit: it is computed.
    """
    if isinstance(tensor, EdgeTensor) and tensor.scope.relation is relation and tensor.axis == 0:
        return tensor.read()
    return Leaf("e", eager(tensor), name)


def stored(tensor: Tensor) -> Tensor:
    """The tensor that a lazy one only stands for; itself otherwise."""
    return eager(tensor) if isinstance(tensor, EdgeTensor) and tensor.is_stored else tensor
