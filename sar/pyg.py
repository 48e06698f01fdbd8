"""PyTorch Geometric's models on a graph that is cut over many ranks.

What both libraries share (``partition_graph``, ``load_partition_data``, ``prepare``, ``explain``,
``optimize``, ``trace``) is in :mod:`sar` itself.
"""

from sar.frontends.pyg import front_end  # noqa: F401  (its layers are known from here on)
from sar.frontends.pyg.data import construct_full_graph
from sar.frontends.pyg.neighborhood import construct_neighborhood

__all__ = ["construct_full_graph", "construct_neighborhood"]
