"""PyG's front end as :mod:`sar.registry` offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from sar.frontends.pyg import functions  # noqa: F401  (fills in what is known of indices)
from sar.frontends.pyg.batches import pyg_data
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.frontends.pyg.patches import install
from sar.graph import GraphView
from sar.models.known import Layers
from sar.partition.book import EType

__all__ = ["BLOCKS", "COLUMNS", "LAYERS", "arguments", "batch_maker", "install", "read_batch"]
BLOCKS = None
COLUMNS = {"edge_attr": "feat", "edge_weight": "weight", "edge_time": "time"}
LAYERS = Layers()


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    return pyg_data


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    data = batch.to(device)
    stores = {ntype: data[ntype] for ntype in getattr(data, "node_types", ())} or {input_type: data}
    features = {ntype: store[name] for ntype, store in stores.items() if name in store}
    return data, features, stores[input_type].input_id


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    """As of a model of PyG's: dictionaries by type where there are several, whatever its parameters
    are called, as those of ``to_hetero`` are ``x`` and ``edge_index``."""
    if isinstance(given, GraphView) and given.is_homogeneous and "x_dict" in names:
        raise ValueError(
            f"call: got ({', '.join(names)}) and a graph of one node type and one relation, "
            "expected (x, edge_index)"
        )
    read = _of_graph if isinstance(given, GraphView) else _of_batch
    return [features if name in ("x", "x_dict") else read(given, name) for name in names]


_INDICES: WeakKeyDictionary[GraphView, dict[EType, ShardedEdgeIndex]] = WeakKeyDictionary()


def _of_graph(graph: GraphView, name: str) -> Any:
    """The edge index of a graph or a lazy column of its edges, by relation where it has several."""
    if graph not in _INDICES:
        parts = {e: EdgeGraph(graph._store, [e], graph._policy) for e in graph.canonical_etypes}
        _INDICES[graph] = {etype: ShardedEdgeIndex(part) for etype, part in parts.items()}
    found: Mapping[EType, Any] = _INDICES[graph]
    if name.removesuffix("_dict") != "edge_index":
        found = _columns(graph, name.removesuffix("_dict"), _INDICES[graph])
    return next(iter(found.values())) if graph.is_homogeneous else found


def _columns(
    graph: GraphView, name: str, indices: Mapping[EType, ShardedEdgeIndex]
) -> dict[EType, Tensor]:
    """Lazy columns of the relations that have one of this name."""
    found: dict[EType, Tensor] = {}
    for etype, index in indices.items():
        try:
            values = graph._over(graph._store, [etype]).edge_column(name)
        except KeyError:
            if len(indices) == 1:
                raise
            continue
        found[etype] = index.graph.edge_columns(values, name)
    return found


def _of_batch(data: Any, name: str) -> Any:
    """The edge index or a column of a mini-batch, by relation where it has several."""
    base = name.removesuffix("_dict")
    for one in (base, COLUMNS.get(base, base)):
        if hasattr(data, "edge_types"):
            if found := data.collect(one, allow_empty=True):
                return found
        elif one in data:
            return data[one]
    raise KeyError(f"no column {name!r} in {data}")
