"""PyG's front end as :mod:`sar.registry` offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sar.frontends.pyg import functions  # noqa: F401  (fills in what is known of indices)
from sar.frontends.pyg.batches import pyg_data
from sar.frontends.pyg.columns import edge_name, node_name
from sar.frontends.pyg.data import (
    check_library,
    construct_full_graph,
    import_data,
    is_unnamed,
)
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.groups import NodeGroups
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.frontends.pyg.layers import LAYERS
from sar.frontends.pyg.patches import install
from sar.graph import GraphView
from sar.models.edge_columns import bare, by_relation, getters_of
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.book import EType

__all__ = [
    "BLOCKS", "COLUMNS", "FEATURES", "LABELS", "LAYERS", "PLACES", "arguments", "batch_maker",
    "install", "is_graph", "node_columns", "num_relations", "rank_graph", "read_batch",
    "whole_graph",
]  # fmt: skip
FEATURES, LABELS = "x", "y"  # of nodes
PLACES = ("x", "edge_index")
BLOCKS = None
COLUMNS = {"edge_attr": "feat", "edge_weight": "weight", "edge_time": "time", "edge_type": "type"}
_OF_NODES = ("n_id", "num_nodes", "num_sampled_nodes", "batch")  # what batches have of nodes


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    return pyg_data


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    data = batch.to(device)
    stores = {ntype: data[ntype] for ntype in getattr(data, "node_types", ())} or {input_type: data}
    features = {ntype: store[name] for ntype, store in stores.items() if name in store}
    return data, features, stores[input_type].input_id


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    """As of a model of PyG's. Where there are several types, arguments are dictionaries whatever
    their names are: those of ``to_hetero`` are ``x`` and ``edge_index``."""
    read = _of_graph if isinstance(given, GraphView) else _of_batch
    return [_one(name, *read(given, name, features)) for name in names]


def hold(given: Any, values: Mapping[str, Any]) -> Any:
    """``Data`` or ``HeteroData`` with these columns, by type where there are several; a mini-batch
    gets them beside its own."""
    made, hetero = import_data()
    is_one = not isinstance(values["x"], Mapping)
    data = (made() if is_one else hetero()) if isinstance(given, GraphView) else given
    if isinstance(given, GraphView):
        for ntype in given.ntypes:
            (data if is_one else data[ntype]).num_nodes = given.num_nodes(ntype)
    for name, value in values.items():
        for kind, rows in ({"": value} if is_one else value).items():
            (data if is_one else data[kind])[name] = rows
    return data


def _one(name: str, found: Mapping[Any, Any], is_one: bool) -> Any:
    return next(iter(found.values())) if is_one and not name.endswith("_dict") else found


_INDICES: WeakKeyDictionary[GraphView, dict[EType, ShardedEdgeIndex]] = WeakKeyDictionary()


def _of_graph(graph: GraphView, name: str, features: Any) -> tuple[Mapping[Any, Any], bool]:
    """Rows, edge indices, or lazy columns of edges, by type; whether there is one type."""
    base, is_one = bare(name), graph.is_homogeneous
    if base == "x":
        return _by_type(features, graph.ntypes), is_one
    if graph not in _INDICES:
        check_library()
        install()
        parts = {e: EdgeGraph(graph._store, [e], graph._policy) for e in graph.canonical_etypes}
        _INDICES[graph] = {etype: ShardedEdgeIndex(part) for etype, part in parts.items()}
    if base == "batch":
        return {ntype: _one_graph(graph, ntype) for ntype in graph.ntypes}, is_one
    if base == "edge_index":
        return _INDICES[graph], is_one
    found = by_relation(getters_of(graph), base, COLUMNS)
    graphs = {etype: index.graph for etype, index in _INDICES[graph].items()}
    return {e: graphs[e].edge_columns(values, base) for e, values in found.items()}, is_one


def _one_graph(graph: GraphView, ntype: str) -> NodeGroups:
    count = torch.tensor([graph.num_nodes_global(ntype)], device=graph.device)
    return NodeGroups.of_one(graph.num_nodes(ntype), count, graph.group)


def _by_type(features: Any, ntypes: Sequence[str]) -> Mapping[str, Tensor]:
    return features if isinstance(features, Mapping) else {ntypes[0]: features}


def _of_batch(data: Any, name: str, features: Any) -> tuple[Mapping[Any, Any], bool]:
    """The same of a mini-batch."""
    base, ntypes = bare(name), getattr(data, "node_types", [NTYPE_HOMO])
    is_one = len(ntypes) == len(getattr(data, "edge_types", ntypes)) == 1
    if base == "x":
        return _by_type(features, ntypes), is_one
    if base == "batch" and base not in data:  # all are of one graph
        stores = dict(zip(ntypes, data.node_stores, strict=True))
        zeros = {n: torch.zeros(s.num_nodes, dtype=torch.int64) for n, s in stores.items()}
        return {n: one.to(stores[n].n_id.device) for n, one in zeros.items()}, is_one
    is_data = not hasattr(data, "edge_types")
    for stored in (base, COLUMNS.get(base, base)):
        one = (
            stored
            if base in ("edge_index", "batch")
            else edge_name(stored, _OF_NODES if is_data else None)
        )
        if hasattr(data, "edge_types"):
            found = data.collect(one, allow_empty=True)
        else:
            found = {ETYPE_HOMO: data[one]} if one in data else {}
        if found:
            return found, is_one
    raise KeyError(f"no column {name!r} in {data}")


def is_graph(source: Any) -> bool:
    return hasattr(source, "edge_index") or hasattr(source, "edge_types")


def whole_graph(graph: GraphArrays) -> Any:
    made, hetero = import_data()
    is_one = is_unnamed(list(graph.num_nodes), list(graph.edges))
    data = made() if is_one else hetero()
    for ntype, count in graph.num_nodes.items():
        store = data if is_one else data[ntype]
        store.num_nodes, store.n_id = count, torch.arange(count)
        for name, column in graph.node_data.get(ntype, {}).items():
            store[node_name(name)] = column
        if "batch" not in store:
            store.batch = torch.zeros(count, dtype=torch.int64)
    for etype, ends in graph.edges.items():
        store = data if is_one else data[etype]
        store.edge_index, store.e_id = torch.stack(ends), torch.arange(len(ends[0]))
        taken = list(store.keys()) if is_one else None
        for name, column in graph.edge_data.get(etype, {}).items():
            store[edge_name(name, taken)] = column
    return data


rank_graph = construct_full_graph


def node_columns(given: Any) -> dict[str, Any]:
    if not hasattr(given, "node_types"):
        return {NTYPE_HOMO: _OfNodes(given)}
    return {ntype: given[ntype] for ntype in given.node_types}


class _OfNodes:
    """Columns of nodes of a ``Data``, in which those of edges lie beside them."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def keys(self) -> list[str]:
        return [name for name in self._data.keys() if self._data.is_node_attr(name)]

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        self._data[name] = column


def num_relations(given: Any) -> int:
    return len(getattr(given, "edge_types", "1"))
