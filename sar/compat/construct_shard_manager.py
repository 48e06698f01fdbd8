"""Making graphs, under the original's names."""

from sar.compat.dist_graph import convert_dist_graph
from sar.frontends.dgl import construct_full_graph, construct_mfgs

__all__ = ["construct_full_graph", "construct_mfgs", "convert_dist_graph"]
