"""The original's graph classes; here a whole graph, a block and one relation are one class."""

from sar.frontends.dgl import ShardedGraph

GraphShardManager = ShardedGraph
HeteroGraphShardManager = ShardedGraph

__all__ = ["GraphShardManager", "HeteroGraphShardManager"]
