"""PyG's functions that drop edges or nodes at random, by keys: the same ones however the graph is
cut, with a new seed at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.pyg.functions import _masked, as_mask, take
from sar.frontends.pyg.groups import refused
from sar.frontends.pyg.index import EdgeMask, ShardedEdgeIndex
from sar.graph.rows import keyed_rows
from sar.kernels.keyed import keyed_uniform
from sar.tracing.edge_rows import eager


def dropout_edge(
    edge_index: ShardedEdgeIndex, p: float = 0.5, force_undirected: bool = False,
    training: bool = True,
) -> tuple[ShardedEdgeIndex, EdgeMask]:  # fmt: skip
    """The edges that are kept, each with probability 1 - p, and a mask of them; collective."""
    _check(p, force_undirected, "dropout_edge")
    graph, relation = edge_index.graph, edge_index.graph.scope().relation
    if not training or p == 0:
        ones = torch.ones(relation.num_edges, dtype=torch.bool, device=graph.device)
        return edge_index, EdgeMask(graph, ones, "all")
    kept = EdgeMask(graph, _uniform(relation.keys, graph.group) >= p)
    return _kept(edge_index, kept), kept


def dropout_adj(
    edge_index: ShardedEdgeIndex, edge_attr: Any = None, p: float = 0.5,
    force_undirected: bool = False, num_nodes: int | None = None, training: bool = True,
) -> tuple[ShardedEdgeIndex, Any]:  # fmt: skip
    """The edges that are kept, and their rows of ``edge_attr``; collective."""
    _check(p, force_undirected, "dropout_adj")
    if not training or p == 0:
        return edge_index, edge_attr
    index, kept = dropout_edge(edge_index, p)
    return index, None if edge_attr is None else _masked(edge_attr, kept)


def dropout_node(
    edge_index: ShardedEdgeIndex, p: float = 0.5, num_nodes: int | None = None,
    training: bool = True, relabel_nodes: bool = False,
) -> tuple[ShardedEdgeIndex, EdgeMask, Tensor]:  # fmt: skip
    """The edges between nodes that are kept, a mask of them, and bool [num_nodes] nodes that are;
    collective."""
    _check(p, False, "dropout_node")
    row, col = edge_index
    graph, count = edge_index.graph, row.num_rows
    if relabel_nodes or row.graph.canonical_etypes[0][0] != row.graph.canonical_etypes[0][2]:
        raise NotSupportedError(
            "dropout_node: got relabel_nodes=True, or edges between two types, expected all nodes "
            "of one type to stay: the rows of a sharded graph are its nodes"
        )
    kept = torch.ones(count, dtype=torch.bool, device=graph.device)
    if not training or p == 0:
        return *dropout_edge(edge_index, training=False), kept
    keys = keyed_rows([graph]).keys(kept, set(graph.srctypes))
    kept = _uniform(keys, graph.group) > p
    ends = take(kept.float(), 0, row) * take(kept.float(), 0, col)
    mask = as_mask(graph, eager(ends) > 0)
    return _kept(edge_index, mask), mask, kept


def _kept(edge_index: ShardedEdgeIndex, mask: EdgeMask) -> ShardedEdgeIndex:
    return edge_index[:, mask]  # type: ignore[return-value]


def _uniform(keys: Tensor, group: Any) -> Tensor:
    """float64 [n] numbers in [0, 1), by the run's next seed."""
    return keyed_uniform(keys, 1, group.seeds.draw(group)).view(-1)


def _check(p: float, force_undirected: bool, name: str) -> None:
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: got p={p}, expected a probability from 0 to 1")
    if force_undirected:
        raise NotSupportedError(
            f"{name}: got force_undirected=True, expected False: both directions of an edge may "
            "lie on different ranks"
        )


_PAIRS = "it draws pairs of all nodes that have no edge; use sar.nn.NegativeSampler"

# As in ``utilities``.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils.dropout", function.__name__): (0, "edge_index", function)
    for function in (dropout_edge, dropout_adj, dropout_node)
} | {
    ("torch_geometric.utils._negative_sampling", "negative_sampling"): (
        0, "edge_index", refused("negative_sampling", _PAIRS),
    )
}  # fmt: skip
