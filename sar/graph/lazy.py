"""Lazy edge tensors: a torch tensor by its looks, an edge program inside.

Torch functions on an :class:`EdgeTensor` extend its program. Shapes are found by running each
function on meta tensors for E and for E + 1 edges: what changes with the edges is on the edge
axis. A function that cannot be recorded makes the tensor eager, with a warning.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sar.config import Policy
from sar.errors import SarError
from sar.graph.edge_reduce import reduction_of
from sar.graph.message_dropout import DROPOUTS, arguments
from sar.graph.program import EDGE_COUNT, Call, Dropout, Item, Leaf, Node, Program
from sar.graph.support import not_supported
from sar.ops import AnyRelation, run_messages

_META = torch.device("meta")
_PROBE_ROWS = 5
_PROBE_PART = slice(1, 4)  # the middle: a running sum agrees with itself at the start


class CannotRecord(SarError):
    """A function whose result is not one row per edge."""


@dataclass(frozen=True)
class Scope:
    """Whose edges a tensor has a row for, and how they are streamed."""

    relation: AnyRelation
    policy: Policy
    device: torch.device


class EdgeTensor(Tensor):
    """One row per local edge, computed block by block when it is reduced.

    A function that cannot be recorded gets the local edges, with a warning, which is collective. A
    use that leaves the tensors (``.item()``, iteration, saving) raises ``NotSupportedError``, as
    one rank alone may make it: :meth:`materialize` first, on every rank.
    """

    node: Node
    scope: Scope
    _eager: Tensor | None
    _with_grad: bool

    @staticmethod
    def __new__(cls, node: Node, like: Tensor, scope: Scope) -> EdgeTensor:
        """``like``: shape [*, ...] and dtype; only the trailing shape counts."""
        shape = (scope.relation.num_edges, *tuple(like.shape)[1:])
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=like.dtype, device=scope.device
        )
        made.node, made.scope = node, scope
        made._eager, made._with_grad = None, False
        return made

    @property
    def num_edges(self) -> int:
        """Local edges of the relation."""
        return self.scope.relation.num_edges

    def materialize(self) -> Tensor:
        """[num_edges, ...] eager values; collective unless stored, computed once."""
        if isinstance(self.node, Leaf) and self.node.side == "e":
            return self.node.tensor
        if self._eager is None or torch.is_grad_enabled() > self._with_grad:
            self._with_grad = torch.is_grad_enabled()
            program = Program([self.node])
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
        return self.num_edges * math.prod(self.shape[1:]) * self.dtype.itemsize

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, EdgeTensor))
        if func in _ESCAPES:
            refuse_escape(func, args)
        else:
            reduction = reduction_of(func, args, kwargs)
            if reduction is not None:
                return reduction()
            try:
                return record(func, args, kwargs, first)
            except CannotRecord as problem:
                hold_local_edges(func, args, kwargs, problem)
        eager_args, kwargs = tree_map(_made_eager, (args, kwargs))
        result = func(*eager_args, **kwargs)
        if func is Tensor.__setitem__ and isinstance(args[0], EdgeTensor):
            args[0].node = Leaf("e", eager_args[0])  # later functions see what was written
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_made_eager, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"EdgeTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


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


_METADATA = {
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
    Tensor.__iter__,
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

# In-place functions, recorded as what they compute and bound to the same Python object.
_IN_PLACE = {
    Tensor.__iadd__: operator.add,
    Tensor.__isub__: operator.sub,
    Tensor.__imul__: operator.mul,
    Tensor.__itruediv__: operator.truediv,
}


def node_of(tensor: Tensor, relation: AnyRelation) -> Node:
    """The program of an edge column of ``relation``, lazy or eager.

    A program over other edges, or over the same ones turned round, does not fit: it is computed.
    """
    if isinstance(tensor, EdgeTensor) and tensor.scope.relation is relation:
        return tensor.node
    return Leaf("e", eager(tensor))


def record(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeTensor) -> Any:
    """Extend the program by one function; raises :class:`CannotRecord`."""
    if func in DROPOUTS:
        _, probability, inplace = arguments(*args, **kwargs)
        return _record_dropout(first, probability, inplace)
    in_place = _functional(func, args, kwargs)
    if in_place is not None:
        if args[0] is not first:
            raise CannotRecord("it writes into a tensor that is stored")
        func, kwargs = in_place
    node, like = _infer(func, args, kwargs, first)
    result = _wrap(node, like, first)
    if in_place is None:
        return result
    if result.shape != first.shape or result.dtype != first.dtype:
        raise CannotRecord(f"it would change {first.dtype} {tuple(first.shape)} in place")
    first.node, first._eager = result.node, None
    return first


def _functional(func: Callable, args: Any, kwargs: dict[str, Any]) -> tuple[Callable, dict] | None:
    if kwargs.get("inplace"):
        return func, {**kwargs, "inplace": False}
    if func in _IN_PLACE:
        return _IN_PLACE[func], kwargs
    if func is Tensor.__setitem__:
        mask = args[1]
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            return _filled, kwargs
        raise CannotRecord("it writes rows")
    name = getattr(func, "__name__", "")
    if name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name[:-1]):
        return getattr(Tensor, name[:-1]), kwargs
    return None


def _filled(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``x`` [e, ...] after ``x[mask] = value``, for one value and a mask of rows or elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError("it writes several values")
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), value, x).to(x.dtype)


def _record_dropout(x: EdgeTensor, p: float, inplace: bool) -> EdgeTensor:
    if p == 0:
        return x
    like = torch.empty(tuple(x.shape), dtype=x.dtype, device=_META)
    relation = x.scope.relation
    seed = relation.group.seeds.draw(relation.group)
    node = Dropout(x.node, p, relation, seed)
    if not inplace:
        return EdgeTensor(node, like, x.scope)
    x.node, x._eager = node, None
    return x


def _infer(func: Callable, args: Any, kwargs: dict, first: EdgeTensor) -> tuple[Node, Any]:
    """The node, and its value on meta tensors of all local edges."""
    rows = first.num_edges
    problem: Exception | None = None
    for aligned, count in ((False, False), (True, False), (False, True), (True, True)):
        reading = _Reading(func, args, kwargs, first.scope.relation, aligned=aligned, count=count)
        try:
            small, large = reading.on_meta(rows), reading.on_meta(rows + 1)
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
            problem = problem or error
            continue
        if _grows(small, large, rows):
            reading.check_rowwise()
            return reading.node(), small
        problem = problem or CannotRecord("its result has no row per edge")
    raise CannotRecord(str(problem).split("\n")[0])


def _grows(small: Any, large: Any, rows: int) -> bool:
    """Whether every result has a row per edge, whatever the number of edges."""
    pairs = list(zip(_tensors(small), _tensors(large), strict=True))
    return bool(pairs) and all(
        a.dim() > 0 and len(a) == rows and len(b) == rows + 1 and a.shape[1:] == b.shape[1:]
        for a, b in pairs
    )


class _Reading:
    """One reading of a call: which of its arguments go along with the edges.

    Args:
        relation: whose local edges the tensors have rows for.
        aligned: eager tensors of that many rows are edge columns.
        count: literal integers equal to it stand for it.
    """

    def __init__(
        self,
        func: Callable,
        args: Any,
        kwargs: dict,
        relation: AnyRelation,
        *,
        aligned: bool,
        count: bool,
    ) -> None:
        self.func, self.args, self.kwargs = func, tuple(args), kwargs
        self.relation, self.rows = relation, relation.num_edges
        self.aligned, self.count = aligned, count

    def on_meta(self, rows: int) -> Any:
        """The call on tensors without data, for a number of edges."""

        def column(value: Tensor) -> Tensor:
            shape = (rows, *tuple(value.shape)[1:])
            return torch.empty(shape, dtype=value.dtype, device=_META)

        def other(value: Tensor) -> Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device=_META)

        return self._run(rows, column, other)

    def check_rowwise(self) -> None:
        """Shapes do not show whether rows are mixed (``softmax(0)``): compare 5 rows with 3."""
        generator = torch.Generator().manual_seed(0)
        blank: dict[int, Tensor] = {}

        def column(value: Tensor) -> Tensor:
            if id(value) not in blank:
                blank[id(value)] = _random_rows(value, generator)
            return blank[id(value)]

        def part(value: Tensor) -> Tensor:
            return column(value)[_PROBE_PART]

        try:
            whole = self._run(_PROBE_ROWS, column, _harmless)
            piece = self._run(3, part, _harmless)
        except (RuntimeError, ValueError, IndexError):  # random indices may be out of range
            return
        for long, short in zip(_tensors(whole), _tensors(piece), strict=True):
            if not torch.allclose(long[_PROBE_PART].double(), short.double(), equal_nan=True):
                raise CannotRecord("it mixes edges")

    def node(self) -> Call:
        """The call with nodes in place of edge columns."""

        def noted(value: Any) -> Any:
            if isinstance(value, EdgeTensor) or self._is_column(value):
                return node_of(value, self.relation)
            return EDGE_COUNT if self._is_count(value) else value

        args, kwargs = tree_map(noted, (self.args, self.kwargs))
        return Call(self.func, args, kwargs)

    def _run(
        self, rows: int, column: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
    ) -> Any:
        def replaced(value: Any) -> Any:
            if isinstance(value, EdgeTensor) or self._is_column(value):
                return column(value)
            if isinstance(value, Tensor):
                return other(value)
            return rows if self._is_count(value) else value

        args, kwargs = tree_map(replaced, (self.args, self.kwargs))
        with torch.no_grad():
            return self.func(*args, **kwargs)

    def _is_column(self, value: Any) -> bool:
        if not self.aligned or not isinstance(value, Tensor) or isinstance(value, EdgeTensor):
            return False
        return value.dim() > 0 and len(value) == self.rows

    def _is_count(self, value: Any) -> bool:
        return self.count and type(value) is int and value == self.rows


def _harmless(value: Tensor) -> Tensor:
    """What a trial run may write into: running statistics are buffers, without gradient."""
    return value.detach() if value.requires_grad else value.clone()


def _tensors(result: Any) -> list[Tensor]:
    return [value for value in tree_leaves(result) if isinstance(value, Tensor)]


def _random_rows(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = (_PROBE_ROWS, *tuple(like.shape)[1:])
    if like.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)


def _wrap(node: Node, like: Any, first: EdgeTensor) -> Any:
    if isinstance(like, Tensor):
        return EdgeTensor(node, like, first.scope)
    if isinstance(like, (tuple, list)):
        parts = [_wrap(Item(node, i), part, first) for i, part in enumerate(like)]
        return type(like)(parts) if type(like) in (tuple, list) else tuple(parts)
    raise CannotRecord("its result is not a tensor")
