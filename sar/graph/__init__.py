"""The sharded graph, its blocks, and how they are made from partition files."""

from sar.graph.build import construct_full_graph, load_dgl_partition_data, load_partition_data
from sar.graph.mfg import construct_mfgs
from sar.graph.sharded import ShardedGraph

__all__ = [
    "ShardedGraph",
    "construct_full_graph",
    "construct_mfgs",
    "load_dgl_partition_data",
    "load_partition_data",
]
