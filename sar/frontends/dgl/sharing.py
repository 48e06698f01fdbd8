"""``HeteroGraphConv``, whose modules share the source rows that several of them read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from sar.edges import AnyRelation
from sar.frontends.dgl.counts import Counts
from sar.models.known import reduction_of
from sar.models.sharing import Reads, shared_rows
from sar.partition.book import EType


def sharing(forward: Callable) -> Callable:
    """``HeteroGraphConv.forward`` that shares rows, on our graphs."""

    @wraps(forward)
    def call(self: Any, g: Any, inputs: Any, mod_args: Any = None, mod_kwargs: Any = None) -> Any:
        given = inputs if isinstance(inputs, tuple) and inputs else (inputs,)
        if not isinstance(g, Counts) or not isinstance(given[0], Mapping):
            return forward(self, g, inputs, mod_args, mod_kwargs)
        check_modules(self, g.canonical_etypes, given[0])
        if g.group.size == 1:
            return forward(self, g, inputs, mod_args, mod_kwargs)
        with shared_rows(
            g._store, _reads(self, g, given, {*(mod_args or ()), *(mod_kwargs or ())})
        ):
            return forward(self, g, inputs, mod_args, mod_kwargs)

    return call


def _reads(layer: Any, graph: Counts, given: Sequence, more: set) -> dict[AnyRelation, Reads]:
    """Rows and reduction of each relation whose module runs; none if it gets ``more`` arguments."""
    found = {}
    for etype in graph.canonical_etypes:
        if etype[0] in given[0] and etype[2] in given[-1]:
            module = layer.mod_dict.get(etype, layer.mod_dict.get(etype[1]))
            op = None if etype[1] in more else reduction_of(module)
            found[graph._store.relations[etype]] = Reads(given[0][etype[0]], op)
    return found


def check_modules(layer: Any, etypes: list[EType], sources: Mapping) -> None:
    """Raise ``ValueError`` with both sides where a ``HeteroGraphConv`` lacks a relation's module.

    DGL's ``KeyError`` has the relation alone. Like DGL, relations whose source type has no input
    are passed over, and modules that the graph has no relation for do not matter.
    """
    modules = layer.mod_dict
    for etype in etypes:
        if etype[0] in sources and etype not in modules and etype[1] not in modules:
            raise ValueError(
                f"{type(layer).__name__}: got modules for {sorted(map(str, modules))}, "
                f"none for {etype}; the graph has {etypes}"
            )
