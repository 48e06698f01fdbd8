"""PyG's functions and layers of several types of nodes and edges, on sharded edge indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from threading import local
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.comm import Group
from sar.config import Policy
from sar.edges import AnyRelation
from sar.errors import NotSupportedError
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.frontends.pyg.joined import join, rows_by_source, shift_index
from sar.frontends.pyg.reducing import OPS
from sar.graph.view import graphs_among
from sar.models.known import reduction_of
from sar.models.sharing import Reads, SharedRows, stream_of
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
    return joined, rows_by_source(indices, joined, torch.cat(values))


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


# -- one stream for relations that read the same rows --------------------------------------------


def _hetero_conv(forward: Callable) -> Callable:
    """``HeteroConv.forward`` whose modules share rows that several of them sum."""

    @wraps(forward)
    def call(layer: Any, *args_dict: Any, **kwargs_dict: Any) -> Any:
        found = dict(_reads_of_modules(layer, [*args_dict, *kwargs_dict.values()]))
        pairs = [(id(read.rows), stream_of(read.op)) for read in found.values() if read.op]
        if len(pairs) == len(set(pairs)):  # nobody reads what another does
            return forward(layer, *args_dict, **kwargs_dict)
        graph = next(iter(found))
        reads = {g.scope().relation: read for g, read in found.items() if g._store is graph._store}
        with _sharing(graph, reads, graph._store):
            return forward(layer, *args_dict, **kwargs_dict)

    return call


def _reads_of_modules(layer: Any, dicts: list) -> Iterator[tuple[EdgeGraph, Reads]]:
    """Edges as they were loaded, rows and reduction of each relation whose module gets no more."""
    for etype, module in layer.convs.items():
        of_edges = [one[etype] for one in dicts if etype in one]
        rows = [one[etype[0]] for one in dicts if etype[0] in one]
        if len(of_edges) == 1 and isinstance(of_edges[0], ShardedEdgeIndex) and len(rows) == 1:
            graph = of_edges[0].piece
            if graph.origin is None and of_edges[0].shifts is None and graph.group.size > 1:
                yield graph, Reads(rows[0], reduction_of(module))


def _rgcn(forward: Callable) -> Callable:
    """``RGCNConv.forward`` whose relations share rows."""

    @wraps(forward)
    def call(layer: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        if not isinstance(edge_index, ShardedEdgeIndex):
            return forward(layer, x, edge_index, edge_type)
        _refuse_numbering(x)
        _refuse_segments()
        layer._use_segment_matmul_heuristic_output = False  # else it counts edges of each type
        graph, reads = edge_index.graph, {}
        if graph.group.size > 1:
            reads = dict(_reads_of_types(layer, x, edge_index, edge_type))
        with _sharing(graph, reads, graph.filters):
            return forward(layer, x, edge_index, edge_type)

    return call


def _fast_rgcn(forward: Callable) -> Callable:
    @wraps(forward)
    def call(layer: Any, x: Any, edge_index: Any, edge_type: Any = None) -> Any:
        if isinstance(edge_index, ShardedEdgeIndex):
            _refuse_numbering(x)
            if not (x[0] if isinstance(x, tuple) else x).is_floating_point():
                raise NotSupportedError(
                    "x: got whole numbers, in place of which it takes the places of nodes among "
                    "all; expected rows of floating point, or RGCNConv"
                )
        return forward(layer, x, edge_index, edge_type)

    return call


def _refuse_numbering(x: Any) -> None:
    """Raise where a layer would number all nodes, as it is given no rows."""
    if x is None or isinstance(x, tuple) and x[0] is None:
        raise NotSupportedError(
            "x: got None, which stands for the numbers of all nodes; expected those of this rank, "
            "data.n_id"
        )


def _reads_of_types(
    layer: Any, x: Any, edge_index: ShardedEdgeIndex, edge_type: Any
) -> Iterator[tuple[AnyRelation, Reads]]:
    rows = x[0] if isinstance(x, tuple) else x
    op = OPS.get(layer.aggr) if isinstance(layer.aggr, str) else None
    is_own = type(layer).message is not import_module(_RGCN).RGCNConv.message
    if not isinstance(rows, Tensor) or not isinstance(edge_type, Tensor):
        return
    if is_own or op is None or layer.flow != "source_to_target":
        return
    for i in range(layer.num_relations):
        index: Any = edge_index[:, edge_type == i]
        yield index.graph.scope().relation, Reads(rows, op)


class _Groups:
    """Relations that share rows, some at a time: all their sums at once are in memory."""

    def __init__(self, joins: Any, reads: Mapping[Any, Reads]) -> None:
        self._of: dict[Any, SharedRows] = {}
        for first in range(0, len(reads), _TOGETHER):
            some = list(reads)[first : first + _TOGETHER]
            shared = SharedRows(joins, {relation: reads[relation] for relation in some})
            self._of |= dict.fromkeys(some, shared)

    def reduce(self, relation: Any, x: Tensor, op: str, policy: Policy) -> Tensor | None:
        shared = self._of.get(relation)
        return None if shared is None else shared.reduce(relation, x, op, policy)


_TOGETHER = 8


@contextmanager
def _sharing(graph: EdgeGraph, reads: Mapping[Any, Reads], joins: Any) -> Iterator[None]:
    """While a layer runs, let relations share the rows that several of them reduce."""
    store = graph.origin or graph._store
    before, store.sharing = store.sharing, _Groups(joins, reads)
    try:
        yield
    finally:
        store.sharing = before


def _refuse_segments() -> None:
    """Raise where PyG may sort edges by their type, on some of the ranks."""
    import torch_geometric.backend
    import torch_geometric.typing

    if (
        torch_geometric.typing.WITH_SEGMM
        and torch_geometric.backend.use_segment_matmul is not False
    ):
        raise NotSupportedError(
            "RGCNConv: got pyg_lib, which sorts edges; expected "
            "torch_geometric.backend.use_segment_matmul = False"
        )


_RGCN = "torch_geometric.nn.conv.rgcn_conv"
# By module and name: what is made of the original.
WRAPPED: dict[tuple[str, str], Callable[[Callable], Callable]] = {
    ("torch_geometric.nn.conv.han_conv", "HANConv.forward"): _on_ranks,
    ("torch_geometric.nn.conv.han_conv", "group"): _semantic,
    ("torch_geometric.nn.conv.hetero_conv", "HeteroConv.forward"): _hetero_conv,
    (_RGCN, "RGCNConv.forward"): _rgcn,
    (_RGCN, "FastRGCNConv.forward"): _fast_rgcn,
}

# By module and name: whose argument says that it is ours, and what stands in.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils.hetero", "construct_bipartite_edge_index"): (
        0, "edge_index_dict", construct_bipartite_edge_index,
    ),
}  # fmt: skip
