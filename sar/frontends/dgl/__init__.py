"""The graph that DGL's layers see, its blocks, and how they are made from partition files."""

from sar.frontends.dgl.build import construct_full_graph, construct_mfgs
from sar.frontends.dgl.front_end import LAYERS
from sar.frontends.dgl.patches import install
from sar.frontends.dgl.sharded import ShardedGraph

__all__ = [
    "LAYERS",
    "ShardedGraph",
    "construct_full_graph",
    "construct_mfgs",
    "install",
]
