"""One rank's part of a graph as data: columns, relations and blocks of layers.

A front end is a subclass of :class:`GraphView` with a library's names; see docs/extending.md.
"""

from sar.graph.view import GraphView, Scope

__all__ = ["GraphView", "Scope"]
