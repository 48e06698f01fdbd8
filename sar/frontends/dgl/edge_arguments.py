"""What a layer of DGL's is given of its edges has as many rows as there are, on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sar.frontends.dgl.counts import Counts

_NAMES = {
    "distances", "edge_feat", "edge_feats", "edge_weight", "efeat", "efeats", "etype", "etypes",
    "pseudo",
}  # fmt: skip


def edge_check(forward: Callable[..., Any]) -> Callable[..., None]:
    """A collective check of the arguments of a layer's ``forward``, behind the layer itself.

    Nothing is exchanged in a call that has no such argument. DGL's own check is an assertion, or
    comes when a rank has begun what others wait for.
    """
    parameters = list(inspect.signature(forward).parameters)[1:]
    places = [(place, name) for place, name in enumerate(parameters) if name in _NAMES]

    def check(layer: Any, graph: Counts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {name: args[place] for place, name in places if place < len(args)}
        given |= {name: kwargs[name] for _, name in places if name in kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        if given and len(graph.canonical_etypes) == 1:
            what = f"{type(layer).__name__}: {', '.join(given)}"
            graph.group.agree(_error(given, graph.num_edges()), what)

    return check


def _error(given: dict[str, Any], num_edges: int) -> ValueError | None:
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape[:1] != (num_edges,):
            return ValueError(
                f"{name}: got shape {tuple(value.shape)}, expected {num_edges} rows, one for each "
                "edge of this rank's graph"
            )
    return None
