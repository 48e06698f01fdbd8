"""What stands before the ``forward`` of another library's layers: fused functions on sharded
graphs, checks of what the ranks give, and names in errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

from torch import Tensor

from sar.comm import Group
from sar.errors import NotSupportedError
from sar.graph.rows import Call, current
from sar.graph.view import GraphArgument
from sar.kernels.jit import untraced
from sar.models.adapter import Adapter
from sar.models.choice import choose
from sar.nn.drift import check_call


def standing(
    forward: Callable[..., Any],
    adapter: Adapter | None,
    *,
    graph: int,
    rows: int,
    columns: Collection[str] = (),
) -> Callable[..., Any]:
    """``forward`` of a class of layers, as it runs on sharded graphs; on others it is as it was.

    There parameters are compared over the ranks now and then, what is given of edges has as many
    rows as there are on every rank, dropout inside knows what the layer was called with, and the
    adapter may run a fused function. A ``NotSupportedError`` begins with the layer's class: of
    layers inside one another the innermost. It is of the same class and comes from the one that was
    raised.

    Args:
        adapter: that of the class, if it has one.
        graph, rows: places, behind the layer, of what says the edges and of the rows of sources, or
            a pair of both ends'.
        columns: names of parameters that are given of edges. Nothing is exchanged in a call that
            has none.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    graph_name, rows_name = names[graph], names[rows] if rows < len(names) else ""
    run = forward if adapter is None else _choosing(forward, adapter)
    of_edges = [(place, name) for place, name in enumerate(names) if name in columns]

    @untraced
    @wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        said = args[graph] if len(args) > graph else kwargs.get(graph_name)
        if not isinstance(said, GraphArgument):
            return forward(layer, *args, **kwargs)
        view = said.sharded_graph
        check_call(layer, view.group, is_layer=True)
        given = {}
        for place, name in of_edges:
            value = args[place] if len(args) > place else kwargs.get(name)
            if value is not None:
                given[name] = value
        if given and len(view.canonical_etypes) == 1:
            _agree_columns(type(layer).__name__, given, view.num_edges(), view.group)
        x = args[rows] if len(args) > rows else kwargs.get(rows_name)
        current.stack.append(Call(layer, [view], x))
        try:
            return run(layer, *args, **kwargs)
        except NotSupportedError as error:
            if error.layer is not None:
                raise
            raise error.of_layer(type(layer).__name__) from error
        finally:
            current.stack.pop()

    return call


def _choosing(forward: Callable[..., Any], adapter: Adapter) -> Callable[..., Any]:
    """``forward``, or the fused function where ``adapter`` binds the call to it."""
    signature = inspect.signature(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        view = current.stack[-1].graphs[0]
        fused = choose(adapter, forward, bound.args[0], view, bound.arguments)
        return forward(*args, **kwargs) if fused is None else fused()

    return run


def _agree_columns(layer: str, given: dict[str, Any], num_edges: int, group: Group) -> None:
    """Raise ``ValueError`` on every rank where a column has another number of rows; collective."""
    error = None
    for name, value in given.items():
        if isinstance(value, Tensor) and value.shape[:1] != (num_edges,):
            error = error or ValueError(
                f"{name}: got shape {tuple(value.shape)}, expected {num_edges} rows, one for each "
                "edge of this rank's graph"
            )
    group.agree(error, f"{layer}: {', '.join(given)}")
