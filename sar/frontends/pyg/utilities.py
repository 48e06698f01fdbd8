"""PyG's utilities on sharded edges, by the name and module of the function each stands in for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.edges import as_stored
from sar.errors import NotSupportedError
from sar.frontends.pyg.aggregations import AGGREGATIONS, refuse_dense
from sar.frontends.pyg.functions import _masked, take
from sar.frontends.pyg.index import EdgeEnd, EdgeMask, ShardedEdgeIndex
from sar.frontends.pyg.looks import is_flat
from sar.frontends.pyg.reducing import OPS, check_rows, degrees_of, padded, reduce_at, softmax_at
from sar.layers.gcn import Degrees, degree_factor
from sar.tracing.edge_rows import eager
from sar.tracing.lazy import EdgeTensor


def scatter(
    src: Tensor, index: EdgeEnd, dim: int = 0, dim_size: Any = None, reduce: str = "sum"
) -> Tensor:
    if reduce == "mul":
        from torch_geometric.nn.aggr import MulAggregation

        return MulAggregation()(src, index, dim_size=dim_size, dim=dim)  # type: ignore[no-any-return]
    if reduce not in OPS:
        raise NotSupportedError(f"scatter: got reduce={reduce!r}, expected one of {', '.join(OPS)}")
    if not is_flat(index):
        raise ValueError(f"scatter: got ends {tuple(index.looks())}, expected one dimension")
    return reduce_at(index, src, dim, OPS[reduce], dim_size)


def one_hot(index: EdgeTensor, num_classes: int | None = None, dtype: Any = None) -> Tensor:
    """[num_edges, num_classes] lazily, of a column of the edges."""
    if index.dim() != 1:
        raise ValueError(f"one_hot: got {tuple(index.shape)}, expected a number an edge")
    count = int(index.max()) + 1 if num_classes is None else num_classes
    kinds = torch.arange(
        count, dtype=torch.float64, device=index.device
    )  # floats: a call is known again
    found = index.view(-1, 1) == kinds
    return found.to(torch.get_default_dtype() if dtype is None else dtype)


def scatter_by_column(
    src: Tensor, index: EdgeTensor, dim: int = 0, dim_size: Any = None, reduce: str = "sum"
) -> Tensor:
    """[dim_size, ...] sums or means of rows of edges over all ranks, by a column of the edges."""
    if reduce not in ("sum", "add", "mean") or dim % src.dim() or not isinstance(src, EdgeTensor):
        raise NotSupportedError(
            f"scatter by a column of edges: got reduce={reduce!r}, dim={dim} and "
            f"{type(src).__name__} {tuple(src.shape)}; expected sums or means of rows of edges"
        )
    hot = one_hot(index, dim_size, torch.float64)
    count = hot.sum(0)
    rows = hot.view(-1, hot.shape[1], *[1] * (src.dim() - 1)) * src.unsqueeze(1)
    found = rows.sum(0)
    if reduce == "mean":
        found = found / count.clamp(min=1).view(-1, *[1] * (src.dim() - 1))
    return found.to(src.dtype)


def _of_all_classes(forward: Callable) -> Callable:
    """``LabelPropagation.forward``, where classes are counted on all ranks."""

    @wraps(forward)
    def call(layer: Any, y: Tensor, edge_index: Any, *args: Any, **kwargs: Any) -> Tensor:
        are_classes = y.dtype == torch.int64 and y.shape[1:].numel() == 1
        if isinstance(edge_index, ShardedEdgeIndex) and are_classes:
            largest = torch.cat([y.view(-1), y.new_tensor([-1])]).max()
            count = int(edge_index.graph.group.all_reduce(largest, "max")) + 1
            y = F.one_hot(y.view(-1), count).to(torch.get_default_dtype())
        return forward(layer, y, edge_index, *args, **kwargs)  # type: ignore[no-any-return]

    return call


def degree(index: EdgeEnd, num_nodes: Any = None, dtype: Any = None) -> Tensor:
    """[num_rows] edges that end in each row, or start in it on any rank."""
    check_rows(index, "num_nodes", num_nodes)
    degrees = padded(degrees_of(index), num_nodes)
    return degrees.to(torch.get_default_dtype() if dtype is None else dtype)


def gcn_norm(
    edge_index: ShardedEdgeIndex, edge_weight: Any = None, num_nodes: Any = None,
    improved: bool = False, add_self_loops: bool = True, flow: str = "source_to_target",
    dtype: Any = None,
) -> tuple[ShardedEdgeIndex, Tensor]:  # fmt: skip
    """Weights D^-1/2 w D^-1/2 of the edges, lazily; without w there is no number an edge."""
    if flow not in ("source_to_target", "target_to_source"):
        raise ValueError(f"flow: got {flow!r}, expected 'source_to_target' or 'target_to_source'")
    if add_self_loops:
        fill = 2.0 if improved else 1.0
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, fill, num_nodes)
    row, col = edge_index.end(0), edge_index.end(1)
    at = col if flow == "source_to_target" else row
    check_rows(at, "num_nodes", num_nodes)
    if edge_weight is None:
        kind = Degrees("in" if at.side == "v" else "out", -0.5, 0.0)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        factor: Any = degree_factor(as_stored(at.graph.scope().relation, "gcn_norm"), dtype, kind)
        factor = padded(factor, num_nodes)
        return edge_index, take(factor, 0, row) * take(factor, 0, col)
    degrees = reduce_at(at, edge_weight, 0, "sum", num_nodes)
    factor = degrees.pow(-0.5).masked_fill(degrees == 0, 0.0)
    return edge_index, take(factor, 0, row) * edge_weight * take(factor, 0, col)


def softmax(
    src: Tensor, index: EdgeEnd, ptr: Any = None, num_nodes: Any = None, dim: int = 0
) -> Tensor:
    return softmax_at(index, src, dim)


def remove_self_loops(edge_index: ShardedEdgeIndex, edge_attr: Any = None) -> tuple[Any, Any]:
    graph = edge_index.graph
    mask = EdgeMask(graph, graph.are_no_loops(), "others")
    attr = None if edge_attr is None else _masked(edge_attr, mask)
    return ShardedEdgeIndex(graph.drop_loops(), edge_index.order), attr


def add_self_loops(
    edge_index: ShardedEdgeIndex, edge_attr: Any = None, fill_value: Any = None,
    num_nodes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    _check_count(edge_index, num_nodes)
    loops = None if edge_attr is None else _loop_rows(edge_index, edge_attr, fill_value)
    grown = edge_index.graph.add_loops()
    if loops is not None:
        edge_attr = grown.edge_columns(torch.cat([eager(edge_attr), loops]))
    return ShardedEdgeIndex(grown, edge_index.order), edge_attr


def _check_count(edge_index: ShardedEdgeIndex, count: Any) -> None:
    count = min(count) if isinstance(count, (tuple, list)) else count
    check_rows(edge_index.end(1), "num_nodes", count)


def _loop_rows(edge_index: ShardedEdgeIndex, edge_attr: Tensor, fill: Any) -> Tensor:
    """[num_dst, ...] values of the loops."""
    end = edge_index.end(1)
    size = (end.num_rows, *edge_attr.shape[1:])
    if fill is None:
        fill = 1.0
    if isinstance(fill, str):
        if fill not in OPS:
            raise NotSupportedError(f"fill_value: got {fill!r}, expected one of {', '.join(OPS)}")
        return reduce_at(end, edge_attr, 0, OPS[fill], None)
    if isinstance(fill, Tensor):
        fill = fill.to(edge_attr.device, edge_attr.dtype)
        return (fill if fill.dim() == edge_attr.dim() else fill.unsqueeze(0)).expand(size)
    return torch.full(size, fill, dtype=edge_attr.dtype, device=edge_attr.device)


def add_remaining_self_loops(
    edge_index: ShardedEdgeIndex, edge_attr: Any = None, fill_value: Any = None,
    num_nodes: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    graph = edge_index.graph
    _check_count(edge_index, num_nodes)
    if edge_attr is None:
        return ShardedEdgeIndex(graph.drop_loops().add_loops(), edge_index.order), None
    loops = _loop_rows(edge_index, edge_attr, fill_value).clone()
    others = EdgeMask(graph, graph.are_no_loops(), "others")
    mask = EdgeMask(graph, ~others.chosen, "loops")
    index = edge_index.end(0)[mask]
    loops[index] = _masked(edge_attr, mask)
    rest = _masked(edge_attr, others)
    grown = graph.drop_loops().add_loops()
    return ShardedEdgeIndex(grown, edge_index.order), grown.edge_columns(
        torch.cat([eager(rest), loops])
    )


def trim_to_layer(
    layer: int, num_sampled_nodes_per_hop: Any, num_sampled_edges_per_hop: Any, x: Any,
    edge_index: Any, edge_attr: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    if layer <= 0:
        return x, edge_index, edge_attr
    last = num_sampled_nodes_per_hop
    if not isinstance(edge_index, dict):
        index, attr = _trim_edges(edge_index, edge_attr)
        return x.narrow(0, 0, len(x) - last[-layer]), index, attr
    rows = {kind: one.narrow(0, 0, len(one) - last[kind][-layer]) for kind, one in x.items()}
    given = edge_attr or {}
    left = {etype: _trim_edges(index, given.get(etype)) for etype, index in edge_index.items()}
    attrs = None if edge_attr is None else {etype: left[etype][1] for etype in edge_attr}
    return rows, {etype: index for etype, (index, _) in left.items()}, attrs


def _trim_edges(index: ShardedEdgeIndex, attr: Any) -> tuple[ShardedEdgeIndex, Any]:
    inner, kept = index.graph.trimmed()
    if attr is not None:
        attr = inner.edge_columns(eager(attr).index_select(0, kept))
    return ShardedEdgeIndex(inner, index.order), attr


# By module and name: whose argument says that it is ours, and what stands in.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils._scatter", "scatter"): (1, "index", scatter),
    ("torch_geometric.utils._softmax", "softmax"): (1, "index", softmax),
    ("torch_geometric.utils.loop", "remove_self_loops"): (0, "edge_index", remove_self_loops),
    ("torch_geometric.utils.loop", "add_self_loops"): (0, "edge_index", add_self_loops),
    ("torch_geometric.utils.loop", "add_remaining_self_loops"): (
        0, "edge_index", add_remaining_self_loops,
    ),
    ("torch_geometric.utils._trim_to_layer", "trim_to_layer"): (4, "edge_index", trim_to_layer),
    ("torch_geometric.utils._degree", "degree"): (0, "index", degree),
    ("torch_geometric.nn.conv.gcn_conv", "gcn_norm"): (0, "edge_index", gcn_norm),
    ("torch_geometric.nn.aggr", "Aggregation.assert_sorted_index"): (1, "index", refuse_dense),
    **{
        ("torch_geometric.nn.aggr", f"{name}.forward"): (2, "index", function)
        for name, function in AGGREGATIONS.items()
    },
}  # fmt: skip
# By module and name: what is made of the original.
WRAPPED: dict[tuple[str, str], Callable[[Callable], Callable]] = {
    ("torch_geometric.nn.models.label_prop", "LabelPropagation.forward"): _of_all_classes,
}
BY_COLUMN: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils._one_hot", "one_hot"): (0, "index", one_hot),
    ("torch_geometric.utils._scatter", "scatter"): (1, "index", scatter_by_column),
}
