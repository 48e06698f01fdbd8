"""Functions that drop edges, nodes or elements at random, by keys: the same ones however the graph
is cut, with a new seed at each call."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from sar._private import in_backward
from sar.comm import Group, current_group
from sar.errors import NotSupportedError
from sar.frontends.pyg.functions import _masked, as_mask, take
from sar.frontends.pyg.groups import refused
from sar.frontends.pyg.index import EdgeMask, ShardedEdgeIndex
from sar.graph.rows import Call, KeyedRows, Kind, keyed_rows, kinds_of
from sar.kernels.keyed import keyed_uniform
from sar.nn.dropout import asked_call
from sar.ops.randomness import keyed_dropout
from sar.tracing.edge_rows import eager
from sar.tracing.message_dropout import DROPOUTS, in_function


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

# -- dropout by functions ------------------------------------------------------------------------

_drawing: WeakSet[Group] = WeakSet()  # groups whose functions drew by keys


def keyed_by_call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``F.dropout`` that draws as :class:`sar.nn.Dropout` inside of a model of
    :func:`sar.convert_dropout`, or of :func:`sar.nn.dropout_rows`.

    Of rows that are no nodes nor edges, as one for each graph, all ranks have to have as many: they
    are taken for copies of the same, and get the same mask. Collective then.
    """

    @wraps(function)
    def dropout(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        is_plain = type(input) in (Tensor, nn.Parameter) and not in_function()
        if is_plain and training and 0 < p <= 1 and not is_compiling():
            if (asked := asked_call()) is not None:
                return _by_keys(input, asked, p, inplace)
            if in_backward() and (group := current_group()) in _drawing:
                group.seeds.draw(group)  # raises: a forward that is recomputed would draw others
        return function(input, p, training, inplace)

    DROPOUTS.add(dropout)
    dropout.__prepare_scriptable__ = lambda: function  # type: ignore[attr-defined]
    return dropout


def _by_keys(x: Tensor, call: Call, p: float, inplace: bool) -> Tensor:
    known, kinds = keyed_rows(call.graphs), kinds_of(call.graphs)
    group = known.group
    _drawing.add(group)
    for dim in range(x.dim()):
        rows = x.movedim(dim, 0)
        keys = _keys_if_any(known, rows, kinds)
        if keys is not None:
            break
    else:
        rows, dim, keys = x, 0, _positions(x, group)
    out = keyed_dropout(rows, keys, group.seeds.draw(group), p).movedim(0, dim)
    return x.copy_(out) if inplace else out


def _positions(x: Tensor, group: Group) -> Tensor:
    """int64 [n] numbers of rows that all ranks have copies of."""
    count = torch.tensor(len(x) if x.dim() else 1)
    if int(group.all_reduce(count.clone(), "max")) != int(group.all_reduce(count, "min")):
        raise ValueError(
            f"dropout: got {tuple(x.shape)}, expected a row for each node or edge, or as many rows "
            "on all ranks; for other rows use sar.nn.Dropout(p)(x, rows=ids)"
        )
    return torch.arange(int(count), device=x.device)


def _keys_if_any(known: KeyedRows, x: Tensor, kinds: set[Kind]) -> Tensor | None:
    """Keys of rows, on which the ranks agree at each call; ``None`` where they have others."""
    fits = [one for one in known.sets if one.kind in kinds]
    match = torch.tensor([one.count == len(x) for one in fits])
    found = known.group.all_reduce(match.int(), "min").bool().tolist()
    kept = {one.kind for one, fit in zip(fits, found) if fit}
    return known.keys(x, kept) if kept else None


# -- the table -----------------------------------------------------------------------------------

_OF_ALL = "it reads ids or labels of all nodes; call it before the graph is cut"
_REFUSED = {
    ("_negative_sampling", "negative_sampling", 0): _PAIRS, ("_homophily", "homophily", 0): _OF_ALL,
    ("_subgraph", "subgraph", 1): _OF_ALL, ("_subgraph", "bipartite_subgraph", 1): _OF_ALL,
}  # fmt: skip

# As in ``utilities``.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils.dropout", function.__name__): (0, "edge_index", function)
    for function in (dropout_edge, dropout_adj, dropout_node)
} | {
    (f"torch_geometric.utils.{module}", name): (place, "edge_index", refused(name, reason))
    for (module, name, place), reason in _REFUSED.items()
}
