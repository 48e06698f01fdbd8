"""Torch functions of edge indices, of their ends and of masks: what each becomes.

The table at the end is all that is known. A row of sources or of destinations that is taken by an
end is a lazy edge tensor; what is summed by an end is reduced there, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.edges import as_stored
from sar.errors import NotSupportedError
from sar.frontends.pyg.index import EdgeEnd, EdgeMask, Handler, ShardedEdgeIndex, Symbol, unknown
from sar.frontends.pyg.joined import OF_ENDS, OF_INDICES, is_all, take_end
from sar.frontends.pyg.looks import (
    LOOKS,
    each,
    expand,
    expand_as,
    flip,
    is_flat,
    iterate,
    kinds,
    named,
    shaped,
    turned,
    unbind,
    unsqueeze,
)
from sar.frontends.pyg.reducing import degrees_of, reduce_at
from sar.tracing.edge_rows import eager
from sar.tracing.lazy import EdgeTensor
from sar.tracing.reducing import rows_of

# -- rows by ends --------------------------------------------------------------------------------


def take(x: Tensor, dim: int, end: EdgeEnd) -> Tensor:
    """Rows of nodes along ``dim``, of the ends of the edges."""
    if isinstance(x, (EdgeTensor, Symbol)) or not is_flat(end):
        raise NotSupportedError(
            f"rows of a {type(x).__name__} {tuple(x.shape)}, taken by ends {tuple(end.looks())}; "
            "expected rows of nodes, taken by edge_index[0] or edge_index[1]"
        )
    dim = dim % x.dim()
    if not end.are_rows(x.shape[dim]):
        raise ValueError(
            f"index_select: got rows {tuple(x.shape)} along dimension {dim}, expected "
            f"{end.num_rows}, one for each of this rank's nodes"
        )
    x = x.movedim(dim, 0) if dim else x
    x = x if len(x) == end.num_rows else x[: end.num_rows]
    rows = rows_of(end.graph.scope(), end.side, x)
    return rows.movedim(0, dim) if dim else rows


def _index_select(input: Tensor, dim: int, index: Any) -> Tensor:
    if isinstance(index, EdgeEnd):
        return take(input, dim, index)
    raise NotSupportedError(f"index_select of a {type(input).__name__} by {kinds(index)}")


def _getitem(x: Any, item: Any) -> Any:
    if isinstance(x, ShardedEdgeIndex):
        return _item_of_index(x, item)
    if isinstance(x, EdgeEnd):
        return _item_of_end(x, item)
    if isinstance(item, EdgeEnd):
        return take(x, 0, item)
    if isinstance(item, EdgeMask):
        return _masked(x, item)
    raise NotSupportedError(f"indexing of a {type(x).__name__} by {kinds(item)}")


def _item_of_index(index: ShardedEdgeIndex, item: Any) -> Any:
    if isinstance(item, tuple) and len(item) == 2 and is_all(item[1]):
        item = item[0]
    if isinstance(item, int) and -2 <= item < 2:
        return take_end(index, item % 2)
    if is_all(item):
        return index
    if isinstance(item, list) and item in ([0, 1], [1, 0]):
        return index if item[0] == 0 else turned(index)
    if isinstance(item, tuple) and len(item) == 2 and is_all(item[0]):
        if is_lazy_mask(index.graph, item[1]):
            return ShardedEdgeIndex(index.graph.filtered(item[1]), index.order)
        mask = as_mask(index.graph, item[1])
        if mask.kind == "loops":
            nodes = _loops(mask)
            return torch.stack([nodes, nodes])
        return ShardedEdgeIndex(_filtered(mask), index.order)
    raise NotSupportedError(
        f"indexing of an edge index by {kinds(item)}; expected 0, 1, or [:, mask] with a mask of "
        "edges"
    )


def _item_of_end(end: EdgeEnd, item: Any) -> Any:
    if item is None or (isinstance(item, tuple) and any(one is None for one in item)):
        raise NotSupportedError("indexing of an end of edges by None; expected view or unsqueeze")
    mask = as_mask(end.graph, item)
    return _loops(mask) if mask.kind == "loops" else EdgeEnd(_filtered(mask), end.side)


def is_lazy_mask(graph: Any, item: Any) -> bool:
    """Whether an item is a lazy bool [num_edges] of the edges of a graph."""
    if not isinstance(item, EdgeTensor) or item.scope.relation is not graph.scope().relation:
        return False
    return item.dtype == torch.bool and item.dim() == 1


def as_mask(graph: Any, item: Any) -> EdgeMask:
    """A mask of the edges of a graph, given as one, as a lazy column or as bool [num_edges]."""
    if isinstance(item, EdgeMask):
        return item
    values = eager(item)
    if isinstance(values, Tensor) and values.dtype == torch.bool and values.dim() == 1:
        if len(values) == graph.num_edges():
            return EdgeMask(graph, values)
    raise NotSupportedError(
        f"indexing of edges by {kinds(item)}; expected bool [{graph.num_edges()}], a mask of edges"
    )


def _filtered(mask: EdgeMask) -> Any:
    if mask.kind == "all":
        return mask.graph
    return mask.graph.drop_loops() if mask.kind == "others" else mask.graph.filtered(mask.chosen)


def _loops(mask: EdgeMask) -> Tensor:
    """int64 rows of this rank's nodes that have a loop, in the order of the loops."""
    relation = as_stored(mask.graph.scope().relation, "loops")
    _, dst, eid, _ = relation.arrays()
    chosen = mask.chosen[eid.long()]
    return dst[chosen][torch.argsort(eid[chosen])].long()


def _masked(x: Tensor, mask: EdgeMask) -> Tensor:
    """Rows of edges: plain ones of loops, lazy ones over the edges that are left of others."""
    check_same_edges(x, mask)
    if mask.kind == "all" and isinstance(x, EdgeTensor):
        return x
    rows = eager(x)[mask.chosen]
    return rows if mask.kind == "loops" else _filtered(mask).edge_columns(rows)


def check_same_edges(x: Any, mask: EdgeMask) -> None:
    if (
        isinstance(x, Symbol)
        or isinstance(x, EdgeTensor)
        and (x.axis or x.scope.relation is not mask.graph.scope().relation)
    ):
        raise NotSupportedError(
            f"indexing of a {type(x).__name__} {tuple(x.shape)} by a mask of edges; expected one "
            "row for each of the same edges"
        )
    if len(x) != len(mask.chosen):
        raise ValueError(
            f"indexing by a mask of edges: got rows {tuple(x.shape)}, expected "
            f"{len(mask.chosen)}, one for each of this rank's edges"
        )


def _setitem(x: Any, item: Any, value: Any) -> None:
    if isinstance(item, EdgeMask) and isinstance(x, Tensor):
        check_same_edges(x, item)
        rows = eager(x).clone() if isinstance(x, EdgeTensor) else x
        rows[item.chosen] = eager(value)
        if isinstance(x, EdgeTensor):
            x.rebind(item.graph.edge_columns(rows).node)
        return
    raise NotSupportedError(f"writing rows of a {type(x).__name__} at {kinds(item)}")


# -- sums by ends --------------------------------------------------------------------------------

_OPS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


def _scatter_reduce_(
    x: Tensor, dim: int, index: EdgeEnd, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if reduce not in _OPS or (reduce != "sum" and include_self):
        got = f"reduce={reduce!r}, include_self={include_self}"
        raise NotSupportedError(f"scatter_reduce_: got {got}; expected torch_geometric's scatter")
    dim = dim % x.dim()
    other, given = list(map(int, index.size_of_wrapper())), list(map(int, src.shape))
    alike = len(other) == len(given) and other[:dim] == given[:dim]
    if not alike or other[dim + 1 :] != given[dim + 1 :] or index.axis != dim:
        raise NotSupportedError(
            f"scatter_{reduce}_ along {dim} of rows {tuple(given)} by ends {tuple(other)}, edges "
            f"along {index.axis}; expected ends of the same shape, as expand_as gives"
        )
    _check_like(x, src, dim)
    found = reduce_at(index, src, dim, _OPS[reduce], x.shape[dim])
    if reduce == "sum":
        return x.add_(found)
    some = (degrees_of(index) > 0).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return x.copy_(torch.where(some, found, x))


def _scatter_add_(x: Tensor, dim: int, index: EdgeEnd, src: Tensor) -> Tensor:
    return _scatter_reduce_(x, dim, index, src, "sum")


def _index_add_(x: Tensor, dim: int, index: EdgeEnd, source: Tensor, *, alpha: Any = 1) -> Tensor:
    if not is_flat(index):
        raise NotSupportedError(f"index_add by ends {tuple(index.looks())}; expected [num_edges]")
    _check_like(x, source, dim % x.dim())
    return x.add_(reduce_at(index, source, dim, "sum", x.shape[dim]), alpha=alpha)


def _check_like(x: Tensor, rows: Tensor, dim: int) -> None:
    """Raise where rows of edges have not the shape of those of ``x``: sums are not broadcast."""
    into, given = list(x.shape), list(rows.shape)
    if into[:dim] != given[:dim] or into[dim + 1 :] != given[dim + 1 :]:
        got = f"rows {tuple(given)} into {tuple(into)}"
        raise NotSupportedError(f"a sum of {got}; expected the same shape, but for {dim}")


def on_copy(function: Callable) -> Callable:
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


def _bincount(end: EdgeEnd, weights: Any = None, minlength: int = 0) -> Tensor:
    if minlength > end.num_rows or not is_flat(end):
        got = f"minlength={minlength}, ends {tuple(end.looks())}"
        raise NotSupportedError(f"bincount: got {got}; expected this rank's {end.num_rows} nodes")
    if weights is not None:
        return reduce_at(end, weights.double(), 0, "sum")
    return degrees_of(end).clone()


# -- masks ---------------------------------------------------------------------------------------


def _compared(kind: str) -> Callable:
    def compare(x: Any, y: Any) -> EdgeMask:
        ends = [x, y]
        alike = all(isinstance(end, EdgeEnd) and is_flat(end) for end in ends)
        if (
            not alike
            or {x.side, y.side} != {"u", "v"}
            or x.graph.scope().relation is not (y.graph.scope().relation)
        ):
            raise NotSupportedError(
                "comparison of ends of edges with other numbers; expected edge_index[0] == "
                "edge_index[1]"
            )
        others = x.graph.are_no_loops()
        return EdgeMask(x.graph, others if kind == "others" else ~others, kind)

    return compare


def _not(mask: EdgeMask) -> EdgeMask:
    kind = {"loops": "others", "others": "loops"}.get(mask.kind, "")
    return EdgeMask(mask.graph, ~mask.chosen, kind)


def _any(mask: EdgeMask) -> Tensor:
    return mask.graph.group.all_reduce(mask.chosen.any().int(), "max").bool()


def _all(mask: EdgeMask) -> Tensor:
    return ~_any(_not(mask))


def _sum(mask: EdgeMask) -> Tensor:
    """How many loops there are on all ranks; other masks are counted as sizes, of this rank."""
    if mask.kind != "loops":
        raise unknown(Tensor.sum, EdgeMask)
    return mask.graph.group.all_reduce(mask.chosen.sum())


# -- the table -----------------------------------------------------------------------------------


_TAKE: dict[Callable, Handler] = {
    **each(named("index_select"), _index_select),
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}

_OF_INDICES: dict[Callable, Handler] = {
    Tensor.__getitem__: _getitem,
    Tensor.__iter__: iterate,
    **each(named("unbind"), unbind),
    **each(named("flip"), flip),
}
ShardedEdgeIndex.handlers = LOOKS | _OF_INDICES | OF_INDICES
EdgeEnd.handlers = (
    LOOKS
    | _TAKE
    | OF_ENDS
    | {
        **each(named("scatter_reduce_"), _scatter_reduce_),
        **each(named("scatter_reduce"), on_copy(_scatter_reduce_)),
        **each(named("scatter_add_"), _scatter_add_),
        **each(named("scatter_add"), on_copy(_scatter_add_)),
        **each(named("index_add_"), _index_add_),
        **each(named("index_add"), on_copy(_index_add_)),
        **each(named("bincount"), _bincount),
        **each(named("view", "reshape"), shaped),
        **each(named("unsqueeze"), unsqueeze),
        **each(named("expand"), expand),
        **each(named("expand_as"), expand_as),
        **each([*named("eq"), Tensor.__eq__], _compared("loops")),
        **each([*named("ne"), Tensor.__ne__], _compared("others")),
    }
)
EdgeMask.handlers = (
    LOOKS
    | _TAKE
    | {
        **each([*named("logical_not", "bitwise_not"), Tensor.__invert__], _not),
        **each(named("any"), _any),
        **each(named("all"), _all),
        **each(named("sum"), _sum),
    }
)
