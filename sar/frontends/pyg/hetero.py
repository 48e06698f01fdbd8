"""PyG's functions and layers of several types of nodes and edges, on sharded edge indices."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import local
from typing import Any
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.comm import Group
from sar.errors import NotSupportedError
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.frontends.pyg.joined import join, rows_of_pieces, shift_index
from sar.graph.view import graphs_among
from sar.ops.readout import sum_over_ranks
from sar.tracing.edge_rows import eager
from sar.tracing.lazy import EdgeTensor


def construct_bipartite_edge_index(
    edge_index_dict: Any, src_offset_dict: Any, dst_offset_dict: Any, edge_attr_dict: Any = None,
    num_nodes: Any = None,
) -> tuple[ShardedEdgeIndex, Any]:  # fmt: skip
    """All edges as one index, and a value [1, ...] of each relation, or columns, as a column."""
    indices = []
    for etype, start in src_offset_dict.items():
        piece = edge_index_dict[etype]
        if not isinstance(piece, ShardedEdgeIndex):
            raise NotSupportedError(f"{etype}: got a {type(piece).__name__} beside edge indices")
        shifts = torch.tensor([[start], [dst_offset_dict[etype[-1]]]])
        indices.append(shift_index(piece, shifts))
    joined = join(indices)
    if edge_attr_dict is None:
        return joined, None
    names = ["__".join(etype) for etype in src_offset_dict]
    by_name = {etype if isinstance(etype, str) else "__".join(etype): v
               for etype, v in edge_attr_dict.items()}  # fmt: skip
    values = [by_name[name] for name in names]
    if any(isinstance(value, EdgeTensor) for value in values):
        return joined, joined.graph.edge_columns(torch.cat([eager(value) for value in values]))
    if any(len(value) != 1 for value in values):
        raise NotSupportedError(
            f"edge_attr_dict: got rows {[tuple(v.shape) for v in values]}, expected one row for "
            "each relation, or lazy columns"
        )
    refs = tuple(ref(index.piece.scope().relation) for index in indices)
    return joined, rows_of_pieces(joined.graph.scope(), refs, torch.cat(values))


_calls = local()  # of each thread: the ranks of the call of a layer that is in progress


def _on_ranks(forward: Callable) -> Callable:
    """``HANConv.forward`` whose :func:`_group` knows the ranks, on sharded edge indices."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, graphs = getattr(_calls, "group", None), graphs_among((args, kwargs))
        _calls.group = graphs[0].group if graphs else None
        try:
            return forward(*args, **kwargs)
        finally:
            _calls.group = before

    return call


def _semantic(group: Callable) -> Callable:
    """HAN's attention to relations, by means over the nodes of all ranks."""

    @wraps(group)
    def call(xs: list[Tensor], q: Tensor, k_lin: Callable) -> Any:
        ranks: Group | None = getattr(_calls, "group", None)
        if ranks is None or not xs:
            return group(xs, q, k_lin)
        out = torch.stack(xs, 1)  # [n, relations, width]
        scored = torch.tanh(k_lin(out))
        rows = torch.cat([scored.flatten(1), scored.new_ones(len(scored), 1)], 1)
        *total, count = sum_over_ranks(rows, ranks).split([rows.shape[1] - 1, 1])
        if not count.item():
            return out[:, 0], None
        mean = total[0].view(scored.shape[1:]) / count.detach()
        weights = F.softmax((q * mean).sum(-1), dim=0)
        return (weights.view(1, -1, 1) * out).sum(1), weights

    return call


# By module and name: what is made of the original.
WRAPPED: dict[tuple[str, str], Callable[[Callable], Callable]] = {
    ("torch_geometric.nn.conv.han_conv", "HANConv.forward"): _on_ranks,
    ("torch_geometric.nn.conv.han_conv", "group"): _semantic,
}

# By module and name: whose argument says that it is ours, and what stands in.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils.hetero", "construct_bipartite_edge_index"): (
        0, "edge_index_dict", construct_bipartite_edge_index,
    ),
}  # fmt: skip
