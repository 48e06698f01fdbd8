"""One rank's part of a graph as data: columns, relations and blocks of layers."""

from sar.graph.view import GraphView, Scope

__all__ = ["GraphView", "Scope"]
