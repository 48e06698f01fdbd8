"""One rank's part of a graph: rows, relations and blocks of layers.

A front end is a subclass of :class:`GraphView` with a library's names; see docs/extending.md.
"""

from sar.graph.build import load_partition_data
from sar.graph.view import GraphArgument, GraphView, Scope, graph_of, graphs_among

__all__ = ["GraphArgument", "GraphView", "Scope", "graph_of", "graphs_among", "load_partition_data"]
