"""Recording torch functions on edge tensors: what goes along with the edges, and how.

Shapes are found by running each function on meta tensors for E and for E + 1 edges: what grows is
on the edge axis, which may move. A run on few random rows shows whether rows are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sar._private import storage_id, tree_flatten, tree_leaves, tree_map, tree_unflatten
from sar.edges import AnyRelation
from sar.tracing.edge_rows import EdgeRows, node_of
from sar.tracing.in_place import CannotRecord, functional
from sar.tracing.memo import is_known, keep, literals, recall, state_of_torch
from sar.tracing.message_dropout import DROPOUTS, arguments
from sar.tracing.nodes import EDGE_COUNT, Call, Dropout, Item, Node

_META = torch.device("meta")
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)
_PROBE_ROWS = 6
_PROBE_PART = (1, 3)  # start and length: neither from the start nor the middle, as a flip keeps it

_COPY_UNLESS_DENSE = {"contiguous", "flatten", "ravel", "reshape", "reshape_as"}


def record(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> Any:
    """Extend the program by one function; raises :class:`CannotRecord`."""
    if func in DROPOUTS:
        _, probability, inplace = arguments(*args, **kwargs)
        return _record_dropout(first, probability, inplace)
    in_place = functional(func, args, kwargs)
    if in_place is not None:
        if args[0] is not first:
            raise CannotRecord("it writes into a tensor that is stored")
        func, kwargs = in_place
    outcome = _infer(func, args, kwargs, first)
    leaves, spec = tree_flatten((args, kwargs))
    if in_place is None:
        key = _key(func, leaves, spec, first)
        if key is not None:
            keep(first.scope.relation, key, outcome)
    result = outcome.result(func, leaves, spec, first)
    if in_place is None:
        return result
    if result.shape != first.shape or result.dtype != first.dtype:
        raise CannotRecord(f"it would change {first.dtype} {tuple(first.shape)} in place")
    first.rebind(result.node, same_values=func is Tensor.detach)
    return first


def record_again(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> Any:
    """As :func:`record` where an equal call was recorded before; else ``NotImplemented``."""
    leaves, spec = tree_flatten((args, kwargs))
    outcome = recall(first.scope.relation, _key(func, leaves, spec, first))
    return NotImplemented if outcome is None else outcome.result(func, leaves, spec, first)


def _key(func: Callable, leaves: list[Any], spec: Any, first: EdgeRows) -> Hashable | None:
    """As :mod:`sar.tracing.memo` says; floating tensors have stand-ins when rows are compared."""
    if not is_known(func):
        return None
    key: list[Any] = [func, spec, state_of_torch(), literals(leaves, EdgeRows)]
    if key[-1] is None:
        return None
    for leaf in leaves:
        if isinstance(leaf, EdgeRows):
            if leaf.scope.relation is not first.scope.relation:
                return None
            key.append((leaf.kind, leaf.is_dense))
        elif isinstance(leaf, Tensor):
            if type(leaf) not in _PLAIN or not leaf.is_floating_point():
                return None
            key.append((leaf.shape, leaf.dtype, leaf.device, leaf.layout))
    return tuple(key)


_PLAIN = (Tensor, Parameter)


@dataclass(frozen=True)
class _Outcome:
    """What was found out about a call.

    Attributes:
        aligned, count: as of :class:`_Reading`.
        like: its value on meta tensors of all local edges.
        axes: where the edges are, by the id of each tensor of ``like``.
        bases: the place among the arguments of what each of them is a view of, if of any.
    """

    aligned: bool
    count: bool
    like: Any
    axes: dict[int, int]
    bases: dict[int, int | None]

    def result(self, func: Callable, leaves: list[Any], spec: Any, first: EdgeRows) -> Any:
        """The call on the present arguments, recorded."""
        relation = first.scope.relation
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, EdgeRows) and leaf.scope.relation is relation:
                given.append(leaf.read())
            elif isinstance(leaf, EdgeRows) or self._is_column(leaf, relation):
                given.append(node_of(leaf, relation))
            else:
                is_count = self.count and type(leaf) is int and leaf == relation.num_edges
                given.append(EDGE_COUNT if is_count else leaf)
        args, kwargs = tree_unflatten(given, spec)
        bases = {key: None if at is None else leaves[at] for key, at in self.bases.items()}
        return _wrap(Call(func, args, kwargs), self.like, self.axes, bases, first)

    def _is_column(self, value: Any, relation: AnyRelation) -> bool:
        if not self.aligned or not isinstance(value, Tensor):
            return False
        return value.dim() > 0 and len(value) == relation.num_edges


def _record_dropout(x: EdgeRows, p: float, inplace: bool) -> EdgeRows:
    if p == 0:
        return x
    if x.axis != 0:
        raise CannotRecord("its edges are not along the first dimension")
    like = torch.empty(tuple(x.shape), dtype=x.dtype, device=_META)
    relation = x.scope.relation
    seed = relation.group.seeds.draw(relation.group)
    node = Dropout(x.read(), p, relation, seed)
    if not inplace:
        return type(x)(node, like, x.scope)
    if x.column is not None:
        return x.write(Tensor.copy_, (x, type(x)(node, like, x.scope)), {})
    x.rebind(node)
    return x


def _infer(func: Callable, args: Any, kwargs: dict, first: EdgeRows) -> _Outcome:
    """Find out about a call.

    Raises ``ValueError`` for a call that no reading can run, before anything is computed.
    """
    rows = first.num_edges
    problem: Exception | None = None
    ways = ((False, False), (True, False), (False, True), (True, True))
    readings = [
        _Reading(func, args, kwargs, first.scope.relation, aligned=aligned, count=count)
        for aligned, count in ways
    ]
    for reading in readings:
        try:
            small, large = reading.on_meta(rows), reading.on_meta(rows + 1)
        except _FAILURES as error:
            problem = problem or error
            continue
        if len(_tensors(small)) != len(_tensors(large)):
            problem = problem or CannotRecord("its number of results depends on the edges")
            continue
        pairs = list(zip(_tensors(small), _tensors(large), strict=True))
        axes = [_growing(a, b, rows) for a, b in pairs]
        if axes and None not in axes:
            reading.check_rowwise([axis or 0 for axis in axes])
            by_id = {id(a): axis or 0 for (a, _), axis in zip(pairs, axes, strict=True)}
            bases = {id(a): reading.place_of_base(a) for a, _ in pairs}
            return _Outcome(reading.aligned, reading.count, small, by_id, bases)
        problem = problem or CannotRecord("its result has no row per edge")
    text = str(problem).split("\n")[0]
    if not isinstance(problem, CannotRecord) and not any(r.runs() for r in readings):
        name = getattr(func, "__name__", func)
        raise ValueError(f"{name} on an edge tensor {tuple(first.shape)}: {text}")
    raise CannotRecord(text)


def _growing(small: Tensor, large: Tensor, rows: int) -> int | None:
    """The one dimension that has a row per edge, whatever the number of edges."""
    if small.dim() != large.dim():
        return None
    sizes = enumerate(zip(small.shape, large.shape, strict=True))
    grown = [(d, a, b) for d, (a, b) in sizes if a != b]
    return grown[0][0] if len(grown) == 1 and grown[0][1:] == (rows, rows + 1) else None


def _axis(value: Tensor) -> int:
    return value.axis if isinstance(value, EdgeRows) else 0


def _with_rows(value: Tensor, rows: int) -> list[int]:
    """The shape of ``value`` with another number of edges."""
    shape = list(value.shape)
    shape[_axis(value)] = rows
    return shape


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
        self.shared: dict[int, EdgeRows] = {}  # by the storage of the meta tensor

    def on_meta(self, rows: int) -> Any:
        """The call on tensors without data, for a number of edges."""

        def column(value: Tensor) -> Tensor:
            made = torch.empty(_with_rows(value, rows), dtype=value.dtype, device=_META)
            if isinstance(value, EdgeRows):
                self.shared[storage_id(made)] = value
            return made

        def other(value: Tensor) -> Tensor:
            return torch.empty(value.shape, dtype=value.dtype, device=_META)

        return self._run(rows, column, other)

    def place_of_base(self, result: Tensor) -> int | None:
        """The argument that a result on meta tensors, which are dense, is a view of, if of any."""
        base = self.shared.get(storage_id(result))
        copies = getattr(self.func, "__name__", "") in _COPY_UNLESS_DENSE
        if base is None or (copies and not base.is_dense):
            return None
        leaves = tree_leaves((self.args, self.kwargs))
        return next(place for place, leaf in enumerate(leaves) if leaf is base)

    def check_rowwise(self, axes: list[int]) -> None:
        """Shapes do not show whether rows are mixed (``cumsum``): compare 6 rows with 3.

        Args:
            axes: of each tensor of the result.
        """
        generator = torch.Generator().manual_seed(0)
        blank: dict[int, Tensor] = {}

        def column(value: Tensor) -> Tensor:
            if id(value) not in blank:
                blank[id(value)] = _random_rows(value, generator)
            return blank[id(value)]

        def part(value: Tensor) -> Tensor:
            return column(value).narrow(_axis(value), *_PROBE_PART)

        try:
            whole = self._run(_PROBE_ROWS, column, _stand_ins())
            piece = self._run(3, part, _stand_ins())
        except (RuntimeError, ValueError, IndexError):  # random indices may be out of range
            return
        for long, short, axis in zip(_tensors(whole), _tensors(piece), axes, strict=True):
            middle = long.narrow(axis, *_PROBE_PART)
            if not _alike(middle, short):
                raise CannotRecord("it mixes edges")

    def runs(self) -> bool:
        """Whether the call works on a few rows; some functions fail on meta tensors alone."""
        generator = torch.Generator().manual_seed(0)
        try:
            self._run(_PROBE_ROWS, lambda value: _random_rows(value, generator), _stand_ins())
        except _FAILURES:
            return False
        return True

    def _run(
        self, rows: int, column: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
    ) -> Any:
        def replaced(value: Any) -> Any:
            if isinstance(value, EdgeRows) or self._is_column(value):
                return column(value)
            if isinstance(value, Tensor):
                return other(value)
            return rows if self._is_count(value) else value

        args, kwargs = tree_map(replaced, (self.args, self.kwargs))
        with torch.no_grad():
            return self.func(*args, **kwargs)

    def _is_column(self, value: Any) -> bool:
        if not self.aligned or not isinstance(value, Tensor) or isinstance(value, EdgeRows):
            return False
        return value.dim() > 0 and len(value) == self.rows

    def _is_count(self, value: Any) -> bool:
        return self.count and type(value) is int and value == self.rows


def _stand_ins() -> Callable[[Tensor], Tensor]:
    """What trial runs get for eager tensors, and may write into; the same in each run.

    Other numbers for floating point: a weight that is still 0 would hide that rows are mixed.
    """
    generator = torch.Generator().manual_seed(1)

    def stand_in(value: Tensor) -> Tensor:
        if type(value) not in _PLAIN or not value.is_floating_point():
            return value.detach().clone()
        return torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)

    return stand_in


def _tensors(result: Any) -> list[Tensor]:
    return [value for value in tree_leaves(result) if isinstance(value, Tensor)]


def _alike(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding, which is more where rows are fewer."""
    digits = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    a, b = a.double(), b.double()
    size = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=100 * digits * size, equal_nan=True)


def _random_rows(like: Tensor, generator: torch.Generator) -> Tensor:
    shape = _with_rows(like, _PROBE_ROWS)
    if like.dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(like.dtype)
    return torch.randint(0, 2, shape, generator=generator).to(like.dtype)


def _wrap(
    node: Node,
    like: Any,
    axes: dict[int, int],
    bases: dict[int, EdgeRows | None],
    first: EdgeRows,
) -> Any:
    if isinstance(like, Tensor):
        return type(first)(node, like, first.scope, axes[id(like)], bases[id(like)])
    if isinstance(like, (tuple, list)):
        parts = [_wrap(Item(node, i), part, axes, bases, first) for i, part in enumerate(like)]
        named = hasattr(like, "n_sequence_fields")  # as torch.max gives
        return type(like)(parts) if named or type(like) in (tuple, list) else tuple(parts)
    raise CannotRecord("its result is not a tensor")
