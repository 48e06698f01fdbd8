"""How a model is called with a graph that holds all its columns."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sar import registry
from sar.models.calling import GRAPHS, NAMES_OF_EDGES, NAMES_OF_ROWS, Call, read_call


def front_end_of(model: Any) -> str:
    """Whose graphs ``model``, a module or a function that makes one, is called with."""
    try:
        return read_call(model).front_end
    except ValueError:
        return GRAPHS if registry.is_installed(GRAPHS) else "sar"


def call_on(
    model: nn.Module,
    given: Any,
    front_end: str,
    features: str | None = None,
    said: Call | None = None,
) -> Any:
    """What ``model`` gives for a graph of a front end that holds all columns: called with the graph
    alone where its ``forward`` needs nothing else, else as ``said``, or as :func:`read_call` says.

    Raises ``ValueError`` where nodes have no column ``features``, by default the front end's usual
    one or the only matrix.
    """
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = inspect.signature(model.forward).parameters.values()
    needed = [p.name for p in taken if p.kind in places and p.default is p.empty]
    if said is None and len(needed) == 1 and needed[0] not in NAMES_OF_EDGES:
        return model(given)
    called, front = said or read_call(model, None, front_end), registry.front_end(front_end)
    if said is None and called.has("graph"):  # no name says what it is
        called = replace(called, places=(*front.PLACES, *called.places[2:]))
    asks = any(map(called.has, NAMES_OF_ROWS))
    found = columns_by_type(front, given, features) if asks else {}
    is_one = len(front.node_columns(given)) == front.num_relations(given) == 1
    return called(model, given, next(iter(found.values()), None) if is_one else found)


def columns_by_type(front: Any, given: Any, features: str | None) -> dict[str, Tensor]:
    """The features of the types that have any, see :func:`call_on`."""
    columns = front.node_columns(given)
    rows = {ntype: _features(frame, features, front.FEATURES) for ntype, frame in columns.items()}
    found = {ntype: one for ntype, one in rows.items() if one is not None}
    if not found:
        known = ", ".join(sorted({name for frame in columns.values() for name in frame.keys()}))
        got = features or front.FEATURES
        raise ValueError(f"features: got {got!r}, expected one of the columns {known}")
    return found


def _features(frame: Any, said: str | None, usual: str) -> Any:
    """The column of that name, or the usual one, or the only matrix of numbers; or ``None``."""
    columns = {name: frame[name] for name in frame.keys()}
    if said is not None or usual in columns:
        return columns.get(usual if said is None else said)
    matrices = [one for one in columns.values() if one.dim() == 2 and one.is_floating_point()]
    return matrices[0] if len(matrices) == 1 else None
