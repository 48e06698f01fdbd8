"""Which code computes a layer that has an adapter, and why: the one place that decides.

Most of what decides can change between two calls and is looked at in each: a few comparisons. The
choice changes nothing of what ranks exchange, so that each makes its own; see
:class:`sar.models.adapter.Adapter` for the exception.

It is made where :func:`standing` stands before the ``forward`` of another library's layers.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sar._private import is_view, looked_into
from sar.comm import Group
from sar.errors import NotSupportedError
from sar.graph.rows import Call, current
from sar.graph.view import GraphArgument
from sar.kernels.jit import untraced
from sar.models.adapter import NO_OPTIONS, OPTIONS, Adapter, Arguments, Run, options_of
from sar.nn.drift import check_call


def choose(
    adapter: Adapter, forward: Callable[..., Any], layer: nn.Module, graph: Any, inputs: Arguments
) -> Run | None:
    """What computes ``layer`` as a whole; ``None``: its own ``forward``.

    Collective where the adapter has something to agree on. Warns once per layer and reason where
    the user's doing keeps it from being fused.

    Raises:
        NotSupportedError: ``sar.optimize(strict=True)`` asked for a fused layer, and it is not.
    """
    caused = adapter.changed(type(layer), forward) or looked_into(layer)
    run = caused or adapter.bind(layer, graph, inputs)
    if not isinstance(run, str):
        if adapter.agree is not None:
            return partial(run, adapter.agree(layer, graph, inputs, True))
        return run
    graph.group.meter.tell("plain", run)
    if options_of(layer).strict:
        raise NotSupportedError(f"not fused, as strict=True asks: {run}")  # of a named layer
    if adapter.agree is not None:
        adapter.agree(layer, graph, inputs, False)
    if caused:
        warn_once(layer, run)
    return None


_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_lock = threading.Lock()  # ranks may be threads


def warn_once(layer: nn.Module, reason: str) -> None:
    """Say that a layer is not fused, the first time that it is for this reason."""
    with _lock:
        told = _warned.setdefault(layer, set())
        if reason in told:
            return
        told.add(reason)
    name = type(layer).__name__
    warnings.warn(f"{name}: its own code runs, not the fused layer: {reason}", stacklevel=2)


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
    with group.agreed(f"{layer}: {', '.join(given)}"):
        for name, value in given.items():
            if isinstance(value, Tensor) and value.shape[:1] != (num_edges,):
                raise ValueError(
                    f"{name}: got shape {tuple(value.shape)}, expected {num_edges} rows, one for "
                    "each edge of this rank's graph"
                )


# -- reasons that several adapters have ----------------------------------------------------------

DTYPES = (torch.float32, torch.float64)
_LINEAR, _PRODUCT = nn.Linear.forward, F.linear


def graph_reason(graph: Any) -> str | None:
    """Why a graph is not one relation between rows of one kind that travel alone."""
    if graph.sole_relation is None:
        return "the graph has several kinds of rows or edges, or they are reversed or unordered"
    if graph.sharing is not None:
        return "other modules of the layer read the same rows, which travel once for all"
    return None


def rows_reason(
    x: Any, num_rows: int, *weights: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> str | None:
    """Why ``x`` is not plain [num_rows, width] of one of ``dtypes``, that of all ``weights``."""
    if type(x) is not Tensor or x.layout != torch.strided:
        return f"rows are a {type(x).__name__}, not a plain tensor"
    if x.dim() != 2 or len(x) != num_rows:
        return f"rows have shape {tuple(x.shape)}, not [{num_rows}, width]"
    if x.dtype not in dtypes:
        return f"rows are {x.dtype}"
    for weight in weights:
        if weight.dtype != x.dtype or weight.device != x.device:
            return "rows and weights differ in dtype or device"
    return None


def linear_reason(layer: nn.Module, *names: str) -> str | None:
    """Why parts of a layer are not torch's linear layers as they came."""
    if nn.Linear.forward is not _LINEAR or F.linear is not _PRODUCT:
        return "torch's linear layer was replaced"
    for name in names:
        part = getattr(layer, name, None)
        if type(part) is not nn.Linear or "forward" in part.__dict__:
            return f"{name} is a {type(part).__name__} with code of its own"
    return None


def may_donate(layer: nn.Module, x: Tensor) -> bool:
    """Whether backward may write over the input ``x``: the user asked for it, and an operation with
    a gradient made it, in memory of its own."""
    asked = layer.__dict__.get(OPTIONS, NO_OPTIONS).donate
    return asked and x.requires_grad and not x.is_leaf and not is_view(x)
