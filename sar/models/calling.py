"""How a model is called: with a graph and rows, or with rows and an edge index, and edge columns.

It is read from the signature of ``forward`` once, or said; a front end then fills in the arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sar import registry
from sar.graph import GraphView
from sar.models.edge_columns import (
    argument_of,
    assign,
    getters_of,
    stored_name,
    usual_names,
)

GRAPHS = "dgl"  # the front end whose graphs layers of this library take, too
NAMES_OF_EDGES = ("edge_index", "edge_index_dict")
NAMES_OF_ROWS = ("x", "x_dict")
_GRAPH = ("graph", "x")
_DATA = ("data",)
_KNOWN = (*NAMES_OF_EDGES, *_GRAPH, *_DATA, "x_dict", "batch")


@dataclass(frozen=True)
class Call:
    """The arguments of a model.

    Attributes:
        places: by place: ``graph``, ``x`` (the features; by node type where there are several),
            ``edge_index``, with ``_dict`` behind it where there are several types, ``batch`` (the
            graph of each node), or the name of a column of edges. Or ``data`` alone, an object that
            holds all of these.
        named: columns of edges by the keyword that they go to, or by their name in ``data``.
        read: columns of edges that it reads from the graph itself, and from blocks.
        front_end: whose kind of graph and of mini-batches it is, see :mod:`sar.registry`.
    """

    places: tuple[str, ...] = _GRAPH
    named: tuple[tuple[str, str], ...] = ()
    front_end: str = "sar"
    read: tuple[str, ...] = ()

    @property
    def columns(self) -> list[str]:
        """The columns of edges that the model gets or reads."""
        found = [*self.places, *(column for _, column in self.named), *self.read]
        return list(dict.fromkeys(name for name in found if name not in _KNOWN))

    @property
    def takes_data(self) -> bool:
        """Whether the model gets one object that holds everything."""
        return self.places == _DATA

    def stored_name(self, column: str, known: Collection[str]) -> str | None:
        """Which of the ``known`` columns that partitions hold the model calls ``column``."""
        return stored_name(column, known, usual_names(self.front_end))

    def has(self, name: str) -> bool:
        """Whether the model gets this."""
        return name in self.places or any(name == column for _, column in self.named)

    def arguments(self, given: Any, features: Any) -> tuple[list[Any], dict[str, Any]]:
        """What the model is called with.

        Args:
            given: a graph, or what a front end makes of a mini-batch.
            features: rows [n, F], or a dictionary of them by node type.
        """
        front_end, columns = registry.front_end(self.front_end), [one for _, one in self.named]
        if self.takes_data:
            names = ["x", "edge_index", "batch"]
            found = front_end.arguments([*names, *columns], given, features)
            held = dict(zip([*names, *(name for name, _ in self.named)], found, strict=True))
            return [front_end.hold(given, held)], {}
        found = front_end.arguments([*self.places, *columns], given, features)
        count = len(self.places)
        keywords = [keyword for keyword, _ in self.named]
        return found[:count], dict(zip(keywords, found[count:], strict=True))

    def __call__(self, model: nn.Module, given: Any, features: Any) -> Any:
        args, named = self.arguments(given, features)
        try:
            return model(*args, **named)
        except KeyError as error:
            known = features if isinstance(features, dict) else getattr(given, "ntypes", ())
            lacking = [ntype for ntype in getattr(given, "ntypes", ()) if ntype not in known]
            if error.args[:1] not in [(ntype,) for ntype in lacking]:
                raise
            raise ValueError(
                f"model: asked for rows of node type {error.args[0]!r}, which has no features; "
                "expected features of all node types, or a model that learns rows"
            ) from error

    def __str__(self) -> str:
        words = [*self.places, *(f"{keyword}={column}" for keyword, column in self.named)]
        read = f", which reads {', '.join(self.read)}" if self.read else ""
        return f"({', '.join(words)}){read}"


def read_call(
    model: Any,
    text: str | None = None,
    front_end: str | None = None,
    edge_features: Sequence[str] = (),
) -> Call:
    """How ``model``, a module or its class, is called.

    Args:
        text: says it, such as ``"x,edge_index"`` or ``"graph,x,edge_weight=weight"``, the keyword
            before the column of edges; by default the parameters of ``forward`` do: the first two
            are the graph and the features whatever they are called, unless one is ``edge_index``,
            and others that have no default are columns of edges by these names. One that needs
            ``data`` or ``batch`` alone gets PyG's data with ``x``, ``edge_index`` and ``batch``.
        front_end: by default the one of PyG where there is an ``edge_index``; else that of DGL
            where it is installed, and the library's own where not.
        edge_features: columns of edges that it gets, in place of those that ``forward`` needs by
            their names: a column goes to the parameter of its name, or of the name that the
            library has for it, such as ``edge_weight`` for ``"weight"``; others to the parameters
            that have no default, in order, or to the only one of such a name.
            ``"edge_weight=price"`` says it. A model that gets the graph, and has no such parameter,
            reads them from its ``edata``; ``data`` has them by the library's names.

    Raises ``ValueError`` where it cannot be told.
    """
    places, named = _said(text) if text else (_read(model), _needed_keywords(model))
    by_edges = any(name in (*NAMES_OF_EDGES, *_DATA) for name in (*places, *dict(named)))
    if front_end is None and by_edges:
        front_end = "pyg"
    elif front_end is None:
        front_end = "dgl" if registry.is_installed("dgl") else "sar"
    if places == _DATA and not hasattr(registry.front_end(front_end), "hold"):
        raise ValueError(f"front_end: got {front_end!r}, which has no data; expected 'pyg'")
    if not edge_features:
        return Call(places, named, front_end)
    if text:
        raise ValueError(f"edge_features: got {', '.join(edge_features)}, and call names some")
    if places == _DATA:
        return Call(places, _held_names(edge_features, usual_names(front_end)), front_end)
    takes = [one for one in _parameters(model)[0 if by_edges else 2 :] if one.name not in _KNOWN]
    found, read = assign(takes, edge_features, usual_names(front_end), not by_edges)
    if read:
        return Call(places, named, front_end, read)
    first = next((i for i, name in enumerate(places) if name not in _KNOWN), len(places))
    behind = {name: name for name in places[first:] if name in _KNOWN}  # by keyword, too
    return Call(places[:first], tuple((found | behind).items()), front_end)


def _held_names(columns: Sequence[str], usual: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Columns of edges by their names in an object that holds all."""
    theirs = {stored: name for name, stored in usual.items()}
    pairs = [word.rpartition("=")[::2] for word in columns]
    return tuple((name or theirs.get(column, column), column) for name, column in pairs)


def _said(text: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    words = [word.strip() for word in text.strip("() ").split(",")]
    places = tuple(word for word in words if "=" not in word)
    named = [word.partition("=")[::2] for word in words[len(places) :]]
    is_whole = all(places) and all(keyword and column for keyword, column in named)
    says_edges = places == _DATA or any(name in (*NAMES_OF_EDGES, "graph") for name in places)
    if not is_whole or not says_edges:
        raise ValueError(
            f"call: got {text!r}, expected graph or edge_index, x and columns of edges, such as "
            "graph,x or x,edge_index,edge_weight=weight"
        )
    return places, tuple(named)


def _read(model: Any) -> tuple[str, ...]:
    """The places that the signature of ``forward`` says."""
    given = _parameters(model)
    places = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.VAR_POSITIONAL for p in given) and len(places) < 2:
        return _GRAPH
    names = [p.name for p in places]
    needed = [p.name for p in places if p.default is p.empty]
    if any(name in NAMES_OF_EDGES for name in names):
        return tuple(needed)
    if needed in (["data"], ["batch"]) and names[0] == needed[0]:
        return _DATA
    if len(names) < 2:
        shown = f"{getattr(model, '__name__', type(model).__name__)}.forward"
        raise ValueError(
            f"model: {shown} takes ({', '.join(names)}), expected (graph, x) or (x, edge_index); "
            "--call says what it gets"
        )
    return (*_GRAPH, *needed[2:])


def _needed_keywords(model: Any) -> tuple[tuple[str, str], ...]:
    needed = [
        p.name for p in _parameters(model) if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]
    return tuple((name, name) for name in needed)


def _parameters(model: Any) -> list[inspect.Parameter]:
    """Of ``forward``, without the model itself."""
    forward = model.forward if isinstance(model, nn.Module) else getattr(model, "forward", model)
    return [*inspect.signature(forward).parameters.values()][not isinstance(model, nn.Module) :]


Columns = Mapping[Any, Mapping[str, Any]]  # of edges, by relation and name


def arguments(
    names: Sequence[str],
    given: Any,
    features: Any,
    usual: Mapping[str, str],
    columns_of: Callable[[Any], Columns] = lambda block: block.edge_data,
) -> list[Any]:
    """Arguments for parameters of these names, of a graph or of a list of blocks.

    ``usual``: what partitions call columns that have these names. ``columns_of`` gives the columns
    of a block's edges.
    """

    def found(one: Any, name: str) -> Any:
        if name in given_too:
            return given_too[name]
        if isinstance(one, list | tuple):
            return [found(block, name) for block in one]
        if isinstance(one, GraphView):
            return argument_of(getters_of(one), name, usual)
        columns = columns_of(one).items()
        return argument_of({etype: of.__getitem__ for etype, of in columns}, name, usual)

    given_too = {"graph": given, "x": features, "x_dict": features}
    return [found(given, name) for name in names]
