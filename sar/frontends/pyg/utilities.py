"""PyG's utilities on sharded edges, by the name and module of the function each stands in for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.frontends.pyg.functions import _masked
from sar.frontends.pyg.index import EdgeEnd, EdgeMask, ShardedEdgeIndex
from sar.frontends.pyg.reducing import OPS, reduce_at, softmax_at
from sar.tracing.edge_rows import eager


def scatter(
    src: Tensor, index: EdgeEnd, dim: int = 0, dim_size: Any = None, reduce: str = "sum"
) -> Tensor:
    return reduce_at(index, src, dim, OPS[reduce], dim_size)


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
    grown = edge_index.graph.add_loops()
    if edge_attr is not None:
        loops = _loop_rows(edge_index, edge_attr, fill_value)
        edge_attr = grown.edge_columns(torch.cat([eager(edge_attr), loops]))
    return ShardedEdgeIndex(grown, edge_index.order), edge_attr


def _loop_rows(edge_index: ShardedEdgeIndex, edge_attr: Tensor, fill: Any) -> Tensor:
    """[num_dst, ...] values of the loops."""
    end = edge_index.end(1)
    size = (end.num_rows, *edge_attr.shape[1:])
    if fill is None:
        fill = 1.0
    if isinstance(fill, str):
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
    if edge_attr is None:
        return ShardedEdgeIndex(graph.drop_loops().add_loops(), edge_index.order), None
    loops = _loop_rows(edge_index, edge_attr, fill_value).clone()
    others = EdgeMask(graph, graph.are_no_loops(), "others")
    mask = EdgeMask(graph, ~others.values, "loops")
    index = edge_index.end(0)[mask]
    loops[index] = _masked(edge_attr, mask)
    rest = _masked(edge_attr, others)
    grown = graph.drop_loops().add_loops()
    return ShardedEdgeIndex(grown, edge_index.order), grown.edge_columns(
        torch.cat([eager(rest), loops])
    )


# By module and name: whose argument says that it is ours, and what stands in.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils._scatter", "scatter"): (1, "index", scatter),
    ("torch_geometric.utils._softmax", "softmax"): (1, "index", softmax),
    ("torch_geometric.utils.loop", "remove_self_loops"): (0, "edge_index", remove_self_loops),
    ("torch_geometric.utils.loop", "add_self_loops"): (0, "edge_index", add_self_loops),
    ("torch_geometric.utils.loop", "add_remaining_self_loops"): (
        0, "edge_index", add_remaining_self_loops,
    ),
}  # fmt: skip
