"""Recording torch functions on edge tensors: what goes along with the edges, and how.

Shapes are found by running each function on meta tensors for E and for E + 1 edges: what grows is
on the edge axis, which may move. A run on few random rows shows whether rows are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sar._private import (
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    version_of,
)
from sar.errors import SarError
from sar.tracing.calls import COPY_UNLESS_DENSE, filled, is_known, name_of, on_copy
from sar.tracing.chunks import ALL, PART, ROWS, alike
from sar.tracing.edge_rows import EdgeRows, node_of
from sar.tracing.memo import literals, recall, remembered, state_of_torch
from sar.tracing.message_dropout import DROPOUTS, arguments
from sar.tracing.nodes import BLANK_ROWS, EDGE_COUNT, Call, Dropout, Item, Node, NumEdges

_META = torch.device("meta")
_FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


class CannotRecord(SarError):
    """A function whose result is not one row per edge; ``writes``: into its first argument."""

    def __init__(self, why: str, writes: bool = False) -> None:
        super().__init__(why)
        self.writes = writes


def record(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> Any:
    """Extend the program by one function; raises :class:`CannotRecord`."""
    if func in DROPOUTS:
        _, probability, inplace = arguments(*args, **kwargs)
        return _record_dropout(first, probability, inplace)
    if not _writes(func, args, kwargs, first):
        return _recorded(func, args, kwargs, first)
    if first.column is not None:
        return first.write(func, args, kwargs)
    if func is Tensor.detach_:
        first.rebind(Call(Tensor.detach, (first.read(),), {}), same_values=True)
        return first
    func, args, kwargs = _without_write(func, args, kwargs)
    try:
        result = _recorded(func, args, kwargs, first)
    except CannotRecord as problem:
        raise CannotRecord(str(problem), writes=True) from problem
    if result.shape != first.shape or result.dtype != first.dtype:
        raise CannotRecord(f"it would change {first.dtype} {tuple(first.shape)} in place", True)
    first.rebind(result.node)
    return first


def _recorded(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    key = _key(func, leaves, spec, first)
    find = partial(_infer, func, args, kwargs, first)
    return remembered(first.scope.relation, key, find).result(func, leaves, spec, first)


_STATES = (Tensor.detach_, Tensor.requires_grad_)  # which change no values


def _writes(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> bool:
    """Whether a call writes into its first argument; raises ``CannotRecord`` if into another."""
    if func is Tensor.__setitem__ or func in _STATES or kwargs.get("inplace"):
        places = [0]
    else:
        leaves, spec = tree_flatten((args, kwargs))
        with torch.inference_mode(False), torch.no_grad():
            tried = [_blank(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args_tried, kwargs_tried = tree_unflatten(tried, spec)
            try:
                func(*args_tried, **kwargs_tried)
            except _FAILURES:
                return False
        places = [i for i, one in enumerate(tried) if isinstance(one, Tensor) and version_of(one)]
    if places and (places != [0] or args[0] is not first):
        raise CannotRecord("it writes into a tensor that is stored")
    return bool(places)


def _blank(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=_META)


def _without_write(
    func: Callable, args: Any, kwargs: dict[str, Any]
) -> tuple[Callable, Any, dict[str, Any]]:
    """A call that returns what this one writes into its first argument."""
    if kwargs.get("inplace"):
        return func, args, {**kwargs, "inplace": False}
    if func is Tensor.__setitem__:
        is_mask = isinstance(args[1], Tensor) and args[1].dtype == torch.bool
        if is_mask and not isinstance(args[2], EdgeRows):  # rows of some edges
            return filled, args, kwargs
        raise CannotRecord("it writes rows", writes=True)
    if func is Tensor.requires_grad_:
        raise CannotRecord("it is a leaf that requires a gradient", writes=True)
    return on_copy, (func, *args), kwargs


def record_again(func: Callable, args: Any, kwargs: dict[str, Any], first: EdgeRows) -> Any:
    """As :func:`record` where an equal call was recorded before; else ``NotImplemented``."""
    leaves, spec = tree_flatten((args, kwargs))
    outcome = recall(first.scope.relation, _key(func, leaves, spec, first))
    return NotImplemented if outcome is None else outcome.result(func, leaves, spec, first)


def _key(func: Callable, leaves: list[Any], spec: Any, first: EdgeRows) -> Hashable | None:
    """The key of a call, if any; floating tensors count by look: stand-ins are used for them."""
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
class _Reading:
    """What goes along with the edges besides edge tensors: eager tensors of as many rows where
    ``aligned``, and integers equal to that number where ``count``."""

    aligned: bool
    count: bool

    def has_rows(self, value: Any, rows: int) -> bool:
        if isinstance(value, EdgeRows) or not self.aligned or not isinstance(value, Tensor):
            return isinstance(value, EdgeRows)
        return value.dim() > 0 and len(value) == rows

    def is_count(self, value: Any, rows: int) -> bool:
        return isinstance(value, NumEdges) or (self.count and type(value) is int and value == rows)


_READINGS = [_Reading(aligned, count) for count in (False, True) for aligned in (False, True)]


@dataclass(frozen=True)
class _Outcome:
    """What was found out about a call: ``like`` is its value on meta tensors of all local edges.

    ``looks`` has, by the id of each tensor of ``like``, the axis of the edges and the place among
    the arguments of what it is a view of, if of any.
    """

    reading: _Reading
    like: Any
    looks: dict[int, tuple[int, int | None]]

    def result(self, func: Callable, leaves: list[Any], spec: Any, first: EdgeRows) -> Any:
        relation = first.scope.relation
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, EdgeRows) and leaf.scope.relation is relation:
                given.append(leaf.read())
            elif self.reading.has_rows(leaf, relation.num_edges):
                given.append(node_of(leaf, relation))
            else:
                is_count = self.reading.is_count(leaf, relation.num_edges)
                given.append(EDGE_COUNT if is_count else leaf)
        args, kwargs = tree_unflatten(given, spec)
        return self._wrapped(Call(func, args, kwargs), self.like, leaves, first)

    def _wrapped(self, node: Node, like: Any, leaves: list[Any], first: EdgeRows) -> Any:
        if isinstance(like, Tensor):
            axis, base = self.looks[id(like)]
            return type(first)(
                node, like, first.scope, axis, None if base is None else leaves[base]
            )
        if isinstance(like, (tuple, list)):
            parts = [
                self._wrapped(Item(node, i), part, leaves, first) for i, part in enumerate(like)
            ]
            named = hasattr(like, "n_sequence_fields")  # as torch.max gives
            return type(like)(parts) if named or type(like) in (tuple, list) else tuple(parts)
        raise CannotRecord("its result is not a tensor")


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
    """Find out about a call; ``ValueError`` where no reading runs, before anything is computed."""
    if func in _CATS and _dim_of_cat(*args, **kwargs) % first.dim() == first.axis:
        raise CannotRecord("its result has no row per edge")  # also where nothing is added here
    problem: Exception | None = None
    leaves, spec = tree_flatten((args, kwargs))
    trials = [_Trial(func, leaves, spec, first.num_edges, reading) for reading in _READINGS]
    rows = first.num_edges or BLANK_ROWS  # of none, shapes cannot be told
    for trial in trials:
        try:
            like, larger = trial.on_meta(rows), trial.on_meta(rows + 1)
        except _FAILURES as error:
            problem = problem or error
            continue
        small, large = _tensors(like), _tensors(larger)
        axes = [_growing(a, b, rows) for a, b in zip(small, large, strict=False)]
        if len(small) != len(large):
            problem = problem or CannotRecord("its number of results depends on the edges")
        elif axes and None not in axes:
            trial.check_rowwise([axis or 0 for axis in axes])
            looks = {id(t): (axis or 0, trial.base_of(t)) for t, axis in zip(small, axes)}
            return _Outcome(trial.reading, like, looks)
        else:
            problem = problem or CannotRecord("its result has no row per edge")
    text = str(problem).split("\n")[0]
    if not isinstance(problem, CannotRecord) and not any(trial.runs() for trial in trials):
        name = getattr(func, "__name__", func)
        raise ValueError(f"{name} on an edge tensor {tuple(first.shape)}: {text}")
    raise CannotRecord(text)


_CATS = (torch.cat, torch.concat, torch.concatenate)


def _dim_of_cat(tensors: Any = (), dim: int = 0, **_: Any) -> int:
    return dim


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
    shape = list(value.shape)
    shape[_axis(value)] = rows
    return shape


@dataclass
class _Trial:
    """A call in one reading, on other tensors than its ``leaves``; ``rows``: local edges.

    ``shared``: places of edge tensors, by the storage of what stood for them on the meta device.
    """

    func: Callable
    leaves: list[Any]
    spec: Any
    rows: int
    reading: _Reading
    shared: dict[int, int] = field(default_factory=dict)

    def on_meta(self, rows: int) -> Any:
        """The call on tensors without data, for a number of edges."""

        def column(value: Tensor) -> Tensor:
            return torch.empty(_with_rows(value, rows), dtype=value.dtype, device=_META)

        return self._run(rows, column, _blank)

    def base_of(self, result: Tensor) -> int | None:
        """The place of the argument that a result on meta tensors (dense ones) is a view of."""
        place = self.shared.get(storage_id(result))
        if place is None or self.leaves[place].is_dense:
            return place
        return None if name_of(self.func) in COPY_UNLESS_DENSE else place

    def check_rowwise(self, axes: list[int]) -> None:
        """Compare 6 rows with 3: shapes hide that rows mix (``cumsum``); ``axes``: of edges."""
        try:
            whole, piece = self._on_rows(ALL), self._on_rows(PART)
        except (RuntimeError, ValueError, IndexError):  # random indices may be out of range
            return
        for long, short, axis in zip(_tensors(whole), _tensors(piece), axes, strict=True):
            digits = torch.finfo(long.dtype).eps if long.is_floating_point() else 0.0
            # rounding is more where rows are fewer
            if not alike(_part(long, axis, PART), short, 100 * digits):
                raise CannotRecord("it mixes edges")

    def runs(self) -> bool:
        """Whether the call works on a few rows; some functions fail on meta tensors alone."""
        try:
            self._on_rows(ALL)
        except _FAILURES:
            return False
        return True

    def _on_rows(self, part: slice) -> Any:
        """The call on some of the same few random rows."""
        generator, other = (torch.Generator().manual_seed(seed) for seed in (0, 1))

        def column(value: Tensor) -> Tensor:
            return _part(
                _random(_with_rows(value, ROWS), value.dtype, generator), _axis(value), part
            )

        def stand_in(value: Tensor) -> Tensor:
            # Other numbers: a weight that is still 0 would hide that rows are mixed.
            if type(value) not in _PLAIN or not value.is_floating_point():
                return value.detach().clone()
            return _random(list(value.shape), value.dtype, other)

        return self._run(len(range(ROWS)[part]), column, stand_in)

    def _run(
        self, rows: int, column: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
    ) -> Any:
        given: list[Any] = []
        for place, leaf in enumerate(self.leaves):
            if self.reading.has_rows(leaf, self.rows):
                given.append(column(leaf))
                if isinstance(leaf, EdgeRows) and given[-1].is_meta:
                    self.shared[storage_id(given[-1])] = place
            elif isinstance(leaf, Tensor):
                given.append(other(leaf))
            else:
                given.append(rows if self.reading.is_count(leaf, self.rows) else leaf)
        args, kwargs = tree_unflatten(given, self.spec)
        with torch.no_grad():
            return self.func(*args, **kwargs)


def _part(rows: Tensor, axis: int, part: slice) -> Tensor:
    return rows.narrow(axis, part.start or 0, len(range(ROWS)[part]))


def _random(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _tensors(result: Any) -> list[Tensor]:
    return [value for value in tree_leaves(result) if isinstance(value, Tensor)]
