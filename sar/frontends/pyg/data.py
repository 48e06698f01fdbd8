"""From partition files to PyG's data of a rank's own rows."""

from __future__ import annotations

from typing import Any

from sar.config import Policy
from sar.frontends.pyg import functions  # noqa: F401  (fills in what is known of indices)
from sar.frontends.pyg.graph import EdgeGraph
from sar.frontends.pyg.index import ShardedEdgeIndex
from sar.frontends.pyg.patches import install
from sar.graph.build import structure_of
from sar.partition.load import PartitionData

_NAMES = {"feat": "x", "label": "y"}


def construct_full_graph(partition_data: PartitionData, policy: Policy | None = None) -> Any:
    """PyG's ``Data``, or ``HeteroData`` where there are several types, of this rank's rows."""
    from torch_geometric.data import Data, HeteroData

    install()
    graph = EdgeGraph(structure_of(partition_data, policy), None, policy)
    is_one = graph.is_homogeneous
    data = Data() if is_one else HeteroData()
    for ntype in graph.ntypes:
        store = data if is_one else data[ntype]
        store.num_nodes = graph.num_nodes(ntype)
        for key in partition_data.node_features:
            kind, _, name = key.rpartition("/")
            if kind == ntype:
                store[_NAMES.get(name, name)] = partition_data.node_features[key].to(graph.device)
    for etype in graph.canonical_etypes:
        store = data if is_one else data[etype]
        part = graph if is_one else EdgeGraph(graph._store, [etype], policy)
        part.whole = graph
        store.edge_index = ShardedEdgeIndex(part)
        for key in partition_data.edge_features:
            kind, _, name = key.rpartition("/")
            if kind == ":".join(etype):
                values = partition_data.edge_features[key].to(graph.device)
                store["edge_attr" if name == "feat" else name] = part.edge_columns(values, name)
    return data
