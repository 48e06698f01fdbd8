"""What edge indices, their ends and masks look like, and how they are turned and broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sar._private import without_overrides
from sar.errors import NotSupportedError
from sar.frontends.pyg.index import EdgeEnd, Handler, ShardedEdgeIndex, Symbol
from sar.tracing.nodes import EdgesCounted, NumEdges


def kinds(item: Any) -> str:
    items = item if isinstance(item, tuple) else (item,)
    return ", ".join(type(one).__name__ for one in items)


def turned(index: ShardedEdgeIndex) -> ShardedEdgeIndex:
    return ShardedEdgeIndex(index.graph, index.order[::-1])


def _size(x: Any, dim: int | None = None) -> Any:
    looks = x.looks()
    return torch.Size(looks) if dim is None else looks[dim]


def _numel(x: Any) -> int:
    relation = x.graph.scope().relation
    return EdgesCounted.of(relation, 2 if isinstance(x, ShardedEdgeIndex) else 1)


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    moved = torch.empty(0, dtype=x.dtype, device=x.device).to(*args, **kwargs)
    device, dtype = moved.device, moved.dtype
    if dtype != x.dtype:
        raise NotSupportedError(f"to({dtype}) of a {type(x).__name__}")
    if device == x.device:
        return x
    raise NotSupportedError(
        f"to({device}) of a {type(x).__name__} on {x.device}; expected "
        "load_partition_data(.., device=..)"
    )


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


def _max(x: Any) -> Tensor:
    """The row of this rank's last node: what layers count nodes by."""
    rows = x.num_rows if isinstance(x, EdgeEnd) else max(x.end(0).num_rows, x.end(1).num_rows)
    return torch.tensor(rows - 1, device=x.graph.device)


def _min(x: Any) -> Tensor:
    return torch.tensor(0, device=x.graph.device)


def is_flat(end: EdgeEnd) -> bool:
    """Whether ends are as they came, [num_edges]."""
    return len(end.size_of_wrapper()) == 1


def unbind(x: ShardedEdgeIndex, dim: int = 0) -> tuple[EdgeEnd, EdgeEnd]:
    if dim not in (0, -2):
        raise NotSupportedError("unbind of an edge index along its edges")
    return x.end(0), x.end(1)


def iterate(x: ShardedEdgeIndex) -> Any:
    return iter(unbind(x))


def flip(x: ShardedEdgeIndex, *dims: Any) -> ShardedEdgeIndex:
    if dims not in ((0,), ([0],), ((0,),)):
        raise NotSupportedError(f"flip of an edge index along {dims}; expected 0")
    return turned(x)


def shaped(end: EdgeEnd, *sizes: Any, **_: Any) -> EdgeEnd:
    """view, reshape: ones along all axes but that of the edges."""
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Iterable) else list(sizes)
    places = [i for i, size in enumerate(given) if isinstance(size, NumEdges) or size == -1]
    if len(places) != 1 or any(int(s) != 1 for i, s in enumerate(given) if i != places[0]):
        raise NotSupportedError(f"view({given}) of ends of edges; expected one axis of edges")
    given[places[0]] = end.graph.num_edges()
    return EdgeEnd(end.graph, end.side, given, places[0])


def unsqueeze(end: EdgeEnd, dim: int) -> EdgeEnd:
    sizes = list(end.size_of_wrapper())
    dim = dim % (len(sizes) + 1)
    sizes.insert(dim, 1)
    return EdgeEnd(end.graph, end.side, sizes, end.axis + (dim <= end.axis))


def expand_as(end: EdgeEnd, other: Tensor) -> EdgeEnd:
    return expand(end, *other.shape)


def expand(end: EdgeEnd, *sizes: Any) -> EdgeEnd:
    given = list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Iterable) else list(sizes)
    old = list(end.size_of_wrapper())
    more = len(given) - len(old)
    given = [old[i - more] if size == -1 else int(size) for i, size in enumerate(given)]
    if any(
        old[i] not in (1, given[i + more]) or i == end.axis and old[i] != given[i + more]
        for i in range(len(old))
    ):
        raise NotSupportedError(f"expand({given}) of ends {tuple(end.looks())}")
    return EdgeEnd(end.graph, end.side, given, end.axis + more)


def stack(tensors: Any, dim: int = 0) -> ShardedEdgeIndex:
    ends = list(tensors)
    alike = len(ends) == 2 and all(isinstance(end, EdgeEnd) and is_flat(end) for end in ends)
    if not alike or dim not in (0, -2) or {end.side for end in ends} != {"u", "v"}:
        raise NotSupportedError(
            "stack of ends of edges; expected the sources and the destinations of the same edges"
        )
    if ends[0].graph.scope().relation is not ends[1].graph.scope().relation:
        raise NotSupportedError("stack of ends of different edges")
    return ShardedEdgeIndex(ends[0].graph, ends[0].side + ends[1].side)


def cat(tensors: Any, dim: int = 0) -> Any:
    """An edge index and a loop at each node behind it."""
    first, *others = list(tensors)
    if isinstance(first, ShardedEdgeIndex) and dim in (1, -1) and len(others) == 1:
        nodes = torch.arange(first.end(1).num_rows, device=first.graph.device)
        loops = others[0]
        plain = not isinstance(loops, Symbol) and tuple(loops.shape) == (2, len(nodes))
        if plain and bool((loops == nodes).all()):
            return ShardedEdgeIndex(first.graph.add_loops(), first.order)
    raise NotSupportedError(
        f"cat of {kinds(tuple(tensors))}; expected an edge index and one loop at each node, which "
        "torch_geometric's add_self_loops makes"
    )


def named(*names: str) -> list[Callable]:
    owners = (torch, Tensor)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


def each(functions: list[Any], handler: Handler) -> dict[Callable, Handler]:
    return dict.fromkeys(functions, handler)


def _read(name: str, how: str = "__get__") -> list[Callable]:
    return [getattr(getattr(Tensor, name), how)]


def _plain(name: str) -> Callable:
    """What torch tells of the wrapper itself."""
    read = getattr(Tensor, name).__get__ if not callable(getattr(Tensor, name)) else None

    def of(x: Any) -> Any:
        with without_overrides():
            return read(x) if read else getattr(Tensor, name)(x)

    return of


def _ask(x: Any, asks: bool) -> None:
    if asks:
        raise NotSupportedError(f"requires_grad of a {type(x).__name__}, which has whole numbers")


def _text(x: Any) -> str:
    return f"{type(x).__name__}({tuple(map(int, x.looks()))})"


LOOKS: dict[Callable, Callable] = {
    **each([Tensor.size, *_read("shape")], _size),
    **each(named("numel"), _numel),
    **each(named("nelement"), _numel),
    Tensor.to: _to,
    Tensor.cpu: lambda x, **_: _to(x, "cpu"),
    Tensor.cuda: lambda x, device="cuda", **_: _to(x, device),
    **each(
        [Tensor.long, Tensor.__deepcopy__, *named("contiguous", "clone", "detach")],
        _same,
    ),
    **each(_read("requires_grad", "__set__"), _ask),
    **each(named("max"), _max),
    **each(named("min"), _min),
    Tensor.__len__: lambda x: int(x.looks()[0]),
    Tensor.__repr__: lambda x, **_: _text(x),
    Tensor.__format__: lambda x, spec: format(_text(x), spec),
    Tensor.__hash__: id,
}
for _name in (
    "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_sparse_csr", "requires_grad",
    "is_meta", "is_quantized", "is_mkldnn", "is_leaf", "is_nested", "is_cpu", "grad", "grad_fn",
):  # fmt: skip
    LOOKS[getattr(Tensor, _name).__get__] = _plain(_name)
for _name in (
    "dim",
    "is_floating_point",
    "is_complex",
    "is_contiguous",
    "element_size",
    "get_device",
):
    LOOKS[getattr(Tensor, _name)] = _plain(_name)
    if hasattr(torch, _name):
        LOOKS[getattr(torch, _name)] = _plain(_name)
