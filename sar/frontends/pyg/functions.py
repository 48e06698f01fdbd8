"""Torch functions of edge indices, of their ends and of masks: what each becomes.

The table at the end is all that is known. A row of sources or of destinations that is taken by an
end is a lazy edge tensor; what is summed by an end is reduced there, over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.pyg.index import EdgeEnd, EdgeMask, ShardedEdgeIndex, Symbol
from sar.frontends.pyg.reducing import reduce_at
from sar.tracing.edge_rows import eager
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import NumEdges
from sar.tracing.reducing import rows_of

# -- rows by ends --------------------------------------------------------------------------------


def take(x: Tensor, dim: int, end: EdgeEnd) -> Tensor:
    """Rows of nodes along ``dim``, of the ends of the edges."""
    dim = dim % x.dim()
    if isinstance(x, EdgeTensor) or x.shape[dim] != end.num_rows:
        raise ValueError(
            f"index_select: got rows {tuple(x.shape)} along dimension {dim}, expected "
            f"{end.num_rows}, one for each of this rank's nodes"
        )
    rows = rows_of(end.graph.scope(), end.side, x.movedim(dim, 0) if dim else x)
    return rows.movedim(0, dim) if dim else rows


def _getitem(x: Any, item: Any) -> Any:
    if isinstance(x, ShardedEdgeIndex):
        return _item_of_index(x, item)
    if isinstance(x, EdgeEnd):
        return _item_of_end(x, item)
    if isinstance(item, EdgeEnd):
        return take(x, 0, item)
    if isinstance(item, EdgeMask):
        return _masked(x, item)
    raise NotSupportedError(f"indexing of a {type(x).__name__} by {_kinds(item)}")


def _kinds(item: Any) -> str:
    items = item if isinstance(item, tuple) else (item,)
    return ", ".join(type(one).__name__ for one in items)


def _item_of_index(index: ShardedEdgeIndex, item: Any) -> Any:
    if isinstance(item, int) and -2 <= item < 2:
        return index.end(item % 2)
    if item in ([0, 1], [1, 0]) or isinstance(item, slice) and item == slice(None):
        return index if item != [1, 0] else _turned(index)
    if isinstance(item, tuple) and len(item) == 2 and item[0] == slice(None):
        mask = as_mask(index.graph, item[1])
        if mask.kind == "loops":
            nodes = _loops(mask)
            return torch.stack([nodes, nodes])
        return ShardedEdgeIndex(_filtered(mask), index.order)
    raise NotSupportedError(
        f"indexing of an edge index by {_kinds(item)}; expected 0, 1, or [:, mask] with a mask of "
        "edges"
    )


def _turned(index: ShardedEdgeIndex) -> ShardedEdgeIndex:
    return ShardedEdgeIndex(index.graph, index.order[::-1])


def _item_of_end(end: EdgeEnd, item: Any) -> Any:
    if item is None or (isinstance(item, tuple) and None in item):
        raise NotSupportedError("indexing of an end of edges by None; expected view or unsqueeze")
    mask = as_mask(end.graph, item)
    return _loops(mask) if mask.kind == "loops" else EdgeEnd(_filtered(mask), end.side)


def as_mask(graph: Any, item: Any) -> EdgeMask:
    """A mask of the edges of a graph, given as one, as a lazy column or as bool [num_edges]."""
    if isinstance(item, EdgeMask):
        return item
    values = eager(item)
    if isinstance(values, Tensor) and values.dtype == torch.bool and values.dim() == 1:
        if len(values) == graph.num_edges():
            return EdgeMask(graph, values)
    raise NotSupportedError(
        f"indexing of edges by {_kinds(item)}; expected bool [{graph.num_edges()}], a mask of edges"
    )


def _filtered(mask: EdgeMask) -> Any:
    return mask.graph.drop_loops() if mask.kind == "others" else mask.graph.filtered(mask.values)


def _loops(mask: EdgeMask) -> Tensor:
    """int64 rows of this rank's nodes that have a loop, in the order of the loops."""
    relation = mask.graph.scope().relation
    _, dst, eid, _ = relation.arrays()
    chosen = mask.values[eid.long()]
    return dst[chosen][torch.argsort(eid[chosen])].long()


def _masked(x: Tensor, mask: EdgeMask) -> Tensor:
    """Rows of edges: plain ones of loops, lazy ones over the edges that are left of others."""
    rows = eager(x)[mask.values]
    return rows if mask.kind == "loops" else _filtered(mask).edge_columns(rows)


def _setitem(x: Any, item: Any, value: Any) -> None:
    if isinstance(item, EdgeMask) and isinstance(x, Tensor) and not isinstance(x, Symbol):
        rows = eager(x).clone() if isinstance(x, EdgeTensor) else x
        rows[item.values] = eager(value)
        if isinstance(x, EdgeTensor):
            x.rebind(item.graph.edge_columns(rows).node)
        return
    raise NotSupportedError(f"writing rows of a {type(x).__name__} at {_kinds(item)}")


# -- sums by ends --------------------------------------------------------------------------------

_OPS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}


def _scatter_reduce_(
    x: Tensor, dim: int, index: EdgeEnd, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if reduce not in _OPS or (reduce != "sum" and include_self):
        got = f"reduce={reduce!r}, include_self={include_self}"
        raise NotSupportedError(f"scatter_reduce_: got {got}; expected torch_geometric's scatter")
    found = reduce_at(index, src, dim, _OPS[reduce], x.shape[dim])
    if reduce == "sum":
        return x.add_(found)
    relation = index.graph.scope().relation
    degrees = relation.in_degrees if index.side == "v" else relation.out_degrees
    some = (degrees > 0).view(-1, *[1] * (x.dim() - 1 - dim % x.dim()))
    return x.copy_(torch.where(some, found, x))


def _scatter_add_(x: Tensor, dim: int, index: EdgeEnd, src: Tensor) -> Tensor:
    return _scatter_reduce_(x, dim, index, src, "sum")


def _index_add_(x: Tensor, dim: int, index: EdgeEnd, source: Tensor, *, alpha: Any = 1) -> Tensor:
    return x.add_(reduce_at(index, source, dim, "sum", x.shape[dim]), alpha=alpha)


def _on_copy(function: Callable) -> Callable:
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


def _bincount(end: EdgeEnd, weights: Any = None, minlength: int = 0) -> Tensor:
    if weights is not None:
        return reduce_at(end, weights, 0, "sum", end.num_rows)
    relation = end.graph.scope().relation
    degrees = relation.in_degrees if end.side == "v" else relation.out_degrees
    return degrees.clone()


# -- what the tensors look like ------------------------------------------------------------------


def _size(x: Any, dim: int | None = None) -> Any:
    looks = x.looks()
    return torch.Size(looks) if dim is None else looks[dim]


def _numel(x: Any) -> int:
    count = NumEdges.of(x.graph.scope().relation)
    return count if isinstance(x, (EdgeMask, EdgeEnd)) else 2 * int(count)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype not in (None, x.dtype):
        raise NotSupportedError(f"to({dtype}) of a {type(x).__name__}")
    if device in (None, x.graph.device):
        return x
    raise NotSupportedError(
        f"to({device}) of a {type(x).__name__} on {x.graph.device}; expected "
        "load_partition_data(.., device=..)"
    )


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _max(x: Any) -> Tensor:
    """The row of this rank's last node: what layers count nodes by."""
    rows = x.num_rows if isinstance(x, EdgeEnd) else max(x.end(0).num_rows, x.end(1).num_rows)
    return torch.tensor(rows - 1)


def _min(x: Any) -> Tensor:
    return torch.tensor(0)


def _unbind(x: ShardedEdgeIndex, dim: int = 0) -> tuple[EdgeEnd, EdgeEnd]:
    if dim not in (0, -2):
        raise NotSupportedError("unbind of an edge index along its edges")
    return x.end(0), x.end(1)


def _iter(x: ShardedEdgeIndex) -> Any:
    return iter(_unbind(x))


def _flip(x: ShardedEdgeIndex, *dims: Any) -> ShardedEdgeIndex:
    if dims not in ((0,), ([0],), ((0,),)):
        raise NotSupportedError(f"flip of an edge index along {dims}; expected 0")
    return _turned(x)


def _shaped(end: EdgeEnd, *sizes: Any, **_: Any) -> EdgeEnd:
    """view, reshape: ones along all axes but that of the edges."""
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Iterable) else list(sizes)
    places = [i for i, size in enumerate(given) if isinstance(size, NumEdges) or size == -1]
    if len(places) != 1 or any(int(s) != 1 for i, s in enumerate(given) if i != places[0]):
        raise NotSupportedError(f"view({given}) of ends of edges; expected one axis of edges")
    given[places[0]] = end.graph.num_edges()
    return EdgeEnd(end.graph, end.side, given, places[0])


def _unsqueeze(end: EdgeEnd, dim: int) -> EdgeEnd:
    sizes = list(end.size_of_wrapper())
    dim = dim % (len(sizes) + 1)
    sizes.insert(dim, 1)
    return EdgeEnd(end.graph, end.side, sizes, end.axis + (dim <= end.axis))


def _expand_as(end: EdgeEnd, other: Tensor) -> EdgeEnd:
    return _expand(end, *other.shape)


def _expand(end: EdgeEnd, *sizes: Any) -> EdgeEnd:
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Iterable) else list(sizes)
    old = list(end.size_of_wrapper())
    more = len(given) - len(old)
    given = [old[i - more] if size == -1 else int(size) for i, size in enumerate(given)]
    if given[end.axis + more] != old[end.axis]:
        raise NotSupportedError(f"expand({given}) of ends of {old[end.axis]} edges")
    return EdgeEnd(end.graph, end.side, given, end.axis + more)


def _stack(tensors: Any, dim: int = 0) -> ShardedEdgeIndex:
    ends = list(tensors)
    alike = len(ends) == 2 and all(isinstance(end, EdgeEnd) for end in ends)
    if not alike or dim not in (0, -2) or {end.side for end in ends} != {"u", "v"}:
        raise NotSupportedError(
            "stack of ends of edges; expected the sources and the destinations of the same edges"
        )
    if ends[0].graph.scope().relation is not ends[1].graph.scope().relation:
        raise NotSupportedError("stack of ends of different edges")
    return ShardedEdgeIndex(ends[0].graph, ends[0].side + ends[1].side)


def _cat(tensors: Any, dim: int = 0) -> Any:
    """An edge index and a loop at each node behind it."""
    first, *others = list(tensors)
    if isinstance(first, ShardedEdgeIndex) and dim in (1, -1) and len(others) == 1:
        nodes = torch.arange(first.end(1).num_rows, device=first.graph.device)
        loops = others[0]
        plain = not isinstance(loops, Symbol) and tuple(loops.shape) == (2, len(nodes))
        if plain and bool((loops == nodes).all()):
            return ShardedEdgeIndex(first.graph.add_loops(), first.order)
    raise NotSupportedError(
        f"cat of {_kinds(tuple(tensors))}; expected an edge index and one loop at each node, which "
        "torch_geometric's add_self_loops makes"
    )


# -- masks ---------------------------------------------------------------------------------------


def _compared(kind: str) -> Callable:
    def compare(x: Any, y: Any) -> EdgeMask:
        ends = [x, y]
        alike = all(isinstance(end, EdgeEnd) for end in ends)
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
    return EdgeMask(mask.graph, ~mask.values, kind)


def _any(mask: EdgeMask) -> Tensor:
    return mask.graph.group.all_reduce(mask.values.any().int(), "max").bool()


def _all(mask: EdgeMask) -> Tensor:
    return ~_any(_not(mask))


# -- the table -----------------------------------------------------------------------------------


def _named(*names: str) -> list[Callable]:
    owners = (torch, Tensor)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


def _read(*names: str) -> list[Callable]:
    return [getattr(Tensor, name).__get__ for name in names]


def _plain(name: str) -> Callable:
    """What torch tells of the wrapper itself."""
    read = getattr(Tensor, name).__get__ if not callable(getattr(Tensor, name)) else None

    def of(x: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return read(x) if read else getattr(Tensor, name)(x)

    return of


_LOOKS: dict[Callable, Callable] = {
    **{f: _size for f in (Tensor.size, *_read("shape"))},
    **dict.fromkeys(_named("numel"), _numel),
    **dict.fromkeys(_named("nelement"), _numel),
    Tensor.to: _to,
    **dict.fromkeys([Tensor.cpu, Tensor.long, *_named("contiguous", "clone", "detach")], _same),
    **dict.fromkeys(_named("max"), _max),
    **dict.fromkeys(_named("min"), _min),
    Tensor.__len__: lambda x: int(x.looks()[0]),
    Tensor.__repr__: lambda x, **_: f"{type(x).__name__}({tuple(map(int, x.looks()))})",
}
for _name in (
    "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_sparse_csr", "requires_grad",
    "is_meta", "is_quantized", "is_mkldnn", "is_leaf", "is_nested",
):  # fmt: skip
    _LOOKS[getattr(Tensor, _name).__get__] = _plain(_name)
for _name in (
    "dim",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "element_size",
    "get_device",
):
    _LOOKS[getattr(Tensor, _name)] = _plain(_name)
    if hasattr(torch, _name):
        _LOOKS[getattr(torch, _name)] = _plain(_name)

_TAKE = {
    **dict.fromkeys(_named("index_select"), take),
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
}

ShardedEdgeIndex.handlers = _LOOKS | {
    Tensor.__getitem__: _getitem,
    Tensor.__iter__: _iter,
    **dict.fromkeys(_named("unbind"), _unbind),
    **dict.fromkeys(_named("flip"), _flip),
    **dict.fromkeys(_named("cat", "concat"), _cat),
}
EdgeEnd.handlers = (
    _LOOKS
    | _TAKE
    | {
        **dict.fromkeys(_named("scatter_reduce_"), _scatter_reduce_),
        **dict.fromkeys(_named("scatter_reduce"), _on_copy(_scatter_reduce_)),
        **dict.fromkeys(_named("scatter_add_"), _scatter_add_),
        **dict.fromkeys(_named("scatter_add"), _on_copy(_scatter_add_)),
        **dict.fromkeys(_named("index_add_"), _index_add_),
        **dict.fromkeys(_named("index_add"), _on_copy(_index_add_)),
        **dict.fromkeys(_named("bincount"), _bincount),
        **dict.fromkeys(_named("view", "reshape"), _shaped),
        **dict.fromkeys(_named("unsqueeze"), _unsqueeze),
        **dict.fromkeys(_named("expand"), _expand),
        **dict.fromkeys(_named("expand_as"), _expand_as),
        **dict.fromkeys(_named("stack"), _stack),
        **dict.fromkeys([*_named("eq"), Tensor.__eq__], _compared("loops")),
        **dict.fromkeys([*_named("ne"), Tensor.__ne__], _compared("others")),
    }
)
EdgeMask.handlers = (
    _LOOKS
    | _TAKE
    | {
        **dict.fromkeys([*_named("logical_not", "bitwise_not"), Tensor.__invert__], _not),
        **dict.fromkeys(_named("any"), _any),
        **dict.fromkeys(_named("all"), _all),
    }
)
