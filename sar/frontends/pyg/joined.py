"""Relations side by side as one: edge indices with offsets added to them, behind each other.

Models over several types put the rows of all types into one tensor and add to each edge index where
those of its types begin (``edge_index[0] += n``); ``torch.cat`` then gives one index of all edges.
What was added differs between ranks, which own other numbers of rows: that of a row's owner counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from sar._private import make_wrapper, tree_leaves, tree_map
from sar.comm import Group
from sar.edges import Relation, as_stored
from sar.edges.build import EdgeEnds, edge_ends, relation_of_edges
from sar.errors import NotSupportedError
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.index import EdgeEnd, Handler, ShardedEdgeIndex, Symbol
from sar.frontends.pyg.looks import LOOKS, cat, named, stack
from sar.graph.view import Scope
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import NumEdges
from sar.tracing.reducing import rows_of

# -- offsets -------------------------------------------------------------------------------------


class ShiftedEnd(Symbol):
    """int64 [num_edges]: ends of edges plus an offset, which only an edge index takes."""

    hint = "numbers were added to ends of edges; expected an edge index of them, for torch.cat"
    handlers: dict[Callable, Handler] = {}
    end: EdgeEnd
    shift: int

    @staticmethod
    def __new__(cls, end: EdgeEnd, shift: int) -> ShiftedEnd:
        made = make_wrapper(cls, [end.graph.num_edges()], dtype=torch.int64, device=end.device)
        made.graph, made.end, made.shift = end.graph, end, shift
        return made

    def looks(self) -> list[int]:
        return self.end.looks()


def shift_end(x: EdgeEnd | ShiftedEnd, other: Any, *, alpha: int = 1) -> ShiftedEnd:
    """Ends plus a number."""
    end, before = (x.end, x.shift) if isinstance(x, ShiftedEnd) else (x, 0)
    return ShiftedEnd(end, before + alpha * _offset(other))


def shift_end_in_place(x: EdgeEnd | ShiftedEnd, other: Any, *, alpha: int = 1) -> ShiftedEnd:
    """Ends plus a number, in the edge index, too, that they were taken from."""
    made = shift_end(x, other, alpha=alpha)
    if made.end.whole is not None:
        put_end(made.end.whole, made.end.whole.order.index(made.end.side), made)
    return made


def shift_index(x: ShardedEdgeIndex, other: Any) -> ShardedEdgeIndex:
    """An edge index plus int64 [2, 1], a number for each of its rows."""
    if isinstance(other, Symbol) or not isinstance(other, Tensor) or other.shape != (2, 1):
        raise NotSupportedError(
            f"addition of a {type(other).__name__} to an edge index; expected int64 [2, 1]"
        )
    before, (first, second) = x.shifts or (0, 0), map(_offset, other.view(2))
    return ShardedEdgeIndex(x.piece, x.order, (before[0] + first, before[1] + second))


def put_end(index: ShardedEdgeIndex, place: Any, value: Any) -> None:
    """``index[place] = value``, for its own ends with an offset."""
    place = place[0] if isinstance(place, tuple) and all(map(is_all, place[1:])) else place
    is_end = isinstance(value, (ShiftedEnd, EdgeEnd)) and place in (0, 1, -1, -2)
    end = value.end if isinstance(value, ShiftedEnd) else value
    if not is_end or end.graph is not index.piece or end.side != index.order[place]:
        raise NotSupportedError(
            f"writing a {type(value).__name__} into an edge index; expected index[i] += n"
        )
    shifts = list(index.shifts or (0, 0))
    shifts[place] = value.shift if isinstance(value, ShiftedEnd) else 0
    index.shifts = (shifts[0], shifts[1])


def is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def take_end(index: ShardedEdgeIndex, place: int) -> EdgeEnd | ShiftedEnd:
    """Ends of an index as they are now."""
    end = index.end(place)
    return end if index.shifts is None else ShiftedEnd(end, index.shifts[place])


def copy_of_index(index: ShardedEdgeIndex) -> ShardedEdgeIndex:
    return ShardedEdgeIndex(index.piece, index.order, index.shifts)


def stack_shifted(ends: Sequence[ShiftedEnd | EdgeEnd]) -> ShardedEdgeIndex:
    """Both ends of the same edges, with offsets, as an index."""
    first, second = (shift_end(end, 0) for end in ends)
    if first.end.graph is not second.end.graph or {first.end.side, second.end.side} != {"u", "v"}:
        raise NotSupportedError("stack of ends of edges; expected both ends of the same edges")
    order = first.end.side + second.end.side
    return ShardedEdgeIndex(first.end.graph, order, (first.shift, second.shift))


def _offset(value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and isinstance(value, Tensor) and not isinstance(value, (Symbol, EdgeTensor)):
        whole = value.numel() == 1 and not value.is_floating_point() and value.dtype != torch.bool
    if not whole:
        raise NotSupportedError(
            f"addition of a {type(value).__name__} to ends of edges; expected a whole number, "
            "where the rows of their type begin"
        )
    return int(value)


# -- relations side by side ----------------------------------------------------------------------


class JoinedGraph(EdgeGraph):
    """Edges of several relations as one relation, between rows of several types behind each other.

    Rows behind those that edges may reach are not its own: tensors of nodes may have more.
    """

    may_have_more_rows = True


class _Pieces(NamedTuple):
    """Of a joined relation: weak references to the relations, and how many edges each has here."""

    relations: tuple
    counts: list[int]


def join(indices: Sequence[ShardedEdgeIndex]) -> ShardedEdgeIndex:
    """The edges of several indices behind each other, as ``torch.cat(.., 1)``; collective.

    Raises ``NotSupportedError`` on every rank where rows of one type lie among those of another.
    """
    order, group = indices[0].order, indices[0].piece.group
    if any(index.order != order for index in indices):
        raise NotSupportedError(
            "cat of edge indices, some of them flipped; expected all in one direction"
        )
    relations = [as_stored(index.piece.scope().relation, "cat") for index in indices]
    etypes = [index.piece.canonical_etypes[0] for index in indices]
    own = torch.tensor([index.shifts or (0, 0) for index in indices])
    own = own if order == "uv" else own.flip(1)
    with group.agreed("cat of edge indices"):
        for side, name in ((0, "num_src"), (1, "num_dst")):
            types = [etype[-side] for etype in etypes]
            _check_apart(types, own[:, side].tolist(), [getattr(r, name) for r in relations])
    shifts = torch.stack(group.all_gather(own))
    known: dict[Any, Relation] = relations[0].derived("behind each other", dict)
    key = (*map(ref, relations), *shifts.flatten().tolist())
    if key not in known:
        for old in [old for old in known if any(one() is None for one in old[: len(relations)])]:
            del known[old]
        known[key] = _joined(group, relations, shifts)
    return ShardedEdgeIndex(_graph_of(indices, known[key]), order)


def _check_apart(types: list[str], starts: list[int], counts: list[int]) -> None:
    """Raise where two ranges of rows overlap and are not those of one type."""
    ranges = sorted((low, low + n, t) for low, n, t in zip(starts, counts, types) if n)
    for (low, high, ntype), (start, _, other) in zip(ranges, ranges[1:]):
        if start < high and (start, other) != (low, ntype):
            raise NotSupportedError(
                f"cat of edge indices: rows of {ntype!r} are {low} to {high - 1}, and those of "
                f"{other!r} begin at {start}; expected edge_index[i] += n, with rows of each type "
                "apart from others"
            )


def _joined(group: Group, relations: Sequence[Relation], shifts: Tensor) -> Relation:
    """One relation of the edges of all; ``shifts`` int64 [ranks, relations, 2]; collective."""
    own = shifts[group.rank]
    ends = [edge_ends(relation) for relation in relations]
    moved = EdgeEnds(
        torch.cat([one.owner for one in ends]),
        torch.cat([one.src + shifts[one.owner, i, 0] for i, one in enumerate(ends)]),
        torch.cat([one.dst + own[i, 1] for i, one in enumerate(ends)]),
    )
    num_src = max(r.num_src + int(n) for r, n in zip(relations, own[:, 0]))
    num_dst = max(r.num_dst + int(n) for r, n in zip(relations, own[:, 1]))
    keys = [relation.make_keys for relation in relations]
    made = relation_of_edges(
        group, moved, (num_src, num_dst), lambda: torch.cat([make() for make in keys])
    ).to(relations[0].plan.device)
    pieces = _Pieces(tuple(map(ref, relations)), [relation.num_edges for relation in relations])
    return made if made.derived("pieces", lambda: pieces) else made


def _graph_of(indices: Sequence[ShardedEdgeIndex], relation: Relation) -> JoinedGraph:
    pieces = [index.piece for index in indices]
    store, etypes = pieces[0]._store, [piece.canonical_etypes[0] for piece in pieces]
    src, dst = (", ".join(dict.fromkeys(etype[side] for etype in etypes)) for side in (0, -1))
    etype = (f"sources: {src}", "joined", f"destinations: {dst}")
    ids = [piece._store.edge_ids[name] for piece, name in zip(pieces, etypes)]
    made = replace(
        store,
        relations={etype: relation},
        edge_ids={etype: lambda: torch.cat([make() for make in ids])},
        src_rows={etype[0]: torch.arange(relation.num_src, device=store.device)},
        dst_rows={etype[2]: torch.arange(relation.num_dst, device=store.device)},
        joined={},
    )
    return JoinedGraph(made, [etype], pieces[0]._policy)


# -- one row for all edges of a relation ---------------------------------------------------------


class PieceRows(Symbol):
    """[num_edges, ...] rows of edges, equal ones for each of several relations behind each other.

    Attributes:
        relations: weak references to them.
        table: [number of relations, ...] rows.
        counts: of edges, on this rank and on all.
    """

    hint = "one number for all edges of a relation; expected torch.cat of such, or rows by them"
    handlers: dict[Callable, Handler] = {}
    relations: tuple
    table: Tensor
    counts: tuple[int, int]

    @staticmethod
    def __new__(cls, relations: tuple, table: Tensor, counts: tuple[int, int]) -> PieceRows:
        size = [counts[0], *table.shape[1:]]
        made = make_wrapper(cls, size, dtype=table.dtype, device=table.device)
        made.relations, made.table, made.counts = relations, table, counts
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        among = [x for x in tree_leaves((args, kwargs)) if isinstance(x, EdgeTensor)]
        if not among:
            return super().__torch_function__(func, types, args, kwargs)
        scope = among[0].scope

        def lazy(x: Any) -> Any:
            return rows_of_pieces(scope, x.relations, x.table) if isinstance(x, PieceRows) else x

        args, kwargs = tree_map(lazy, (args, kwargs or {}))
        return func(*args, **kwargs)

    def looks(self) -> list[int]:
        count = NumEdges(self.counts[0])
        count.everywhere = self.counts[1]
        return [count, *self.table.shape[1:]]

    def with_table(self, table: Tensor) -> PieceRows:
        return PieceRows(self.relations, table, self.counts)


def rows_of_pieces(scope: Scope, relations: tuple, table: Tensor) -> Tensor:
    """[num_edges, ...] the row in ``table`` of the relation that each edge is from, lazily."""
    pieces: _Pieces | None = scope.relation.known.get("pieces")
    if pieces is None or pieces.relations != relations:
        raise NotSupportedError("rows of edges of some relations, with rows of other edges")

    def kinds() -> Tensor:
        dtype = torch.uint8 if len(pieces.counts) < 256 else torch.int32
        numbers = torch.arange(len(pieces.counts), dtype=dtype)
        return numbers.repeat_interleave(torch.tensor(pieces.counts)).to(scope.device)

    return table[rows_of(scope, "e", scope.relation.derived("kinds of edges", kinds)).long()]


def rows_by_source(indices: Sequence[ShardedEdgeIndex], joined: Any, table: Tensor) -> Tensor:
    """[num_edges, ...] the row in ``table`` of the relation that each edge is from, lazily: a row
    of sources where those of all relations are apart, which kernels take; collective at first."""
    scope = joined.graph.scope()
    relations = [index.piece.scope().relation for index in indices]

    def blocks() -> Tensor | None:
        starts = [(index.shifts or (0, 0))[index.order.index("u")] for index in indices]
        ranges = sorted((n, n + one.num_src) for n, one in zip(starts, relations) if one.num_src)
        are_apart = all(stop <= start for (_, stop), (start, _) in zip(ranges, ranges[1:]))
        if not scope.relation.group.all_reduce(torch.tensor(are_apart, dtype=torch.int64), "min"):
            return None
        found = torch.zeros(scope.relation.num_src, dtype=torch.int64)
        for i, (start, one) in enumerate(zip(starts, relations)):
            found[start : start + one.num_src] = i
        return found.to(scope.device)

    found = scope.relation.derived("relation of each source", blocks)
    if found is None:
        return rows_of_pieces(scope, tuple(map(ref, relations)), table)
    return rows_of(scope, "u", table[found])


def filled_rows(
    index: ShardedEdgeIndex, size: Any, fill_value: Any, *, dtype: Any = None, device: Any = None
) -> Tensor:
    """``new_full`` of an edge index: one number for each edge, or a tensor of another size."""
    size = tuple(size) if isinstance(size, (tuple, list, torch.Size)) else (size,)
    relation = index.piece.scope().relation
    device = index.piece.device if device is None else device
    if not isinstance(size[0], NumEdges) or int(size[0]) != relation.num_edges or len(size) > 1:
        return torch.full(size, fill_value, dtype=dtype or torch.int64, device=device)
    table = torch.full((1,), fill_value, dtype=dtype or torch.int64, device=device)
    return PieceRows((ref(relation),), table, (relation.num_edges, relation.num_edges_global))


def _cat(tensors: Any, dim: int = 0) -> PieceRows:
    some = list(tensors)
    if dim != 0 or not all(isinstance(one, PieceRows) for one in some):
        raise NotSupportedError("cat of rows of edges of several relations with other tensors")
    counts = tuple(sum(one.counts[i] for one in some) for i in (0, 1))
    relations = tuple(one for some_rows in some for one in some_rows.relations)
    return PieceRows(relations, torch.cat([one.table for one in some]), counts)  # type: ignore


def _item(x: Any, item: Any) -> PieceRows:
    if isinstance(x, Symbol) or not isinstance(item, PieceRows) or item.dtype == torch.bool:
        raise NotSupportedError(f"indexing of a {type(x).__name__} by a {type(item).__name__}")
    return item.with_table(x[item.table])


def _view(x: PieceRows, *sizes: Any) -> PieceRows:
    given = list(sizes[0]) if isinstance(sizes[0], (list, tuple)) else list(sizes)
    if not isinstance(given[0], NumEdges) and given[0] != -1:
        raise NotSupportedError(f"view({given}) of rows of edges; expected those along axis 0")
    return x.with_table(x.table.view(len(x.table), *given[1:]))


def _cat_indices(tensors: Any, dim: int = 0) -> ShardedEdgeIndex:
    """Indices behind each other, or loops behind an index."""
    some = list(tensors)
    if dim in (1, -1) and all(isinstance(one, ShardedEdgeIndex) for one in some):
        return join(some)
    return cat(some, dim)  # type: ignore[no-any-return]


def _stack_ends(tensors: Any, dim: int = 0) -> ShardedEdgeIndex:
    ends = list(tensors)
    is_shifted = any(isinstance(end, ShiftedEnd) for end in ends)
    return stack_shifted(ends) if is_shifted and dim in (0, -2) else stack(ends, dim)


_PLUS = [*named("add"), Tensor.__add__, Tensor.__radd__]
OF_INDICES: dict[Callable, Handler] = {
    **dict.fromkeys(named("cat", "concat"), _cat_indices),
    **dict.fromkeys(named("clone"), copy_of_index),
    **dict.fromkeys(_PLUS, shift_index),
    Tensor.__setitem__: put_end,
    Tensor.new_full: filled_rows,
}
OF_ENDS: dict[Callable, Handler] = {
    **dict.fromkeys(named("stack"), _stack_ends),
    **dict.fromkeys(_PLUS, shift_end),
    **dict.fromkeys([Tensor.add_, Tensor.__iadd__], shift_end_in_place),
}
ShiftedEnd.handlers = LOOKS | OF_ENDS
_OF_PIECES: dict[Callable, Handler] = {
    **dict.fromkeys(named("cat", "concat"), _cat),
    **dict.fromkeys(named("view", "reshape"), _view),
    Tensor.__getitem__: _item,
}
PieceRows.handlers = LOOKS | _OF_PIECES
