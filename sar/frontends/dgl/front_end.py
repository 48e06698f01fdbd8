"""DGL's front end as :mod:`sar.registry` offers it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sar.frontends.dgl.adapters import LAYERS
from sar.frontends.dgl.batches import dgl_blocks, dgl_subgraph
from sar.frontends.dgl.build import construct_full_graph
from sar.frontends.dgl.patches import install
from sar.models import calling
from sar.partition.arrays import ORIG_ID, GraphArrays
from sar.partition.require import require_dgl

__all__ = [
    "BLOCKS", "COLUMNS", "FEATURES", "LABELS", "LAYERS", "PLACES", "arguments", "batch_maker",
    "install", "is_graph", "node_columns", "num_relations", "rank_graph", "read_batch",
    "whole_graph",
]  # fmt: skip
FEATURES, LABELS = "feat", "label"  # of nodes
PLACES = ("graph", "x")
BLOCKS = "DGL's blocks"
COLUMNS = {"edge_weight": "weight", "eweight": "weight", "etype": "type", "etypes": "type"}
COLUMNS |= dict.fromkeys(("efeat", "efeats", "edge_feat", "edge_feats", "edge_attr"), "feat")


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    return dgl_blocks if subgraph_type == "directional" else dgl_subgraph


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    blocks = [block.to(device) for block in batch[-1]]
    first, last = blocks[0], blocks[-1]
    found = {t: first.srcnodes[t].data for t in first.srctypes}
    features = {ntype: columns[name] for ntype, columns in found.items() if name in columns}
    return blocks, features, last.dstnodes[input_type].data["input_id"]


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    return calling.arguments(names, given, features, COLUMNS, _edge_columns)


def _edge_columns(block: Any) -> dict[Any, Any]:
    return {etype: block.edges[etype].data for etype in block.canonical_etypes}


def is_graph(source: Any) -> bool:
    return hasattr(source, "canonical_etypes")


def whole_graph(graph: GraphArrays) -> Any:
    require_dgl("a graph of DGL's")
    import dgl

    made = dgl.heterograph(graph.edges, num_nodes_dict=graph.num_nodes)
    for ntype, columns in graph.node_data.items():
        made.nodes[ntype].data.update({k: x for k, x in columns.items() if k != ORIG_ID})
    for etype, columns in graph.edge_data.items():
        made.edges[etype].data.update(columns)
    return made


rank_graph = construct_full_graph


def node_columns(given: Any) -> dict[str, Any]:
    return {ntype: given.nodes[ntype].data for ntype in given.ntypes}


def num_relations(given: Any) -> int:
    return len(given.canonical_etypes)
