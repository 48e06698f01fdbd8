"""What binds layers to the fused functions of :mod:`sar.layers`, and which code computes a call.

A front end has an :class:`Adapter` for each class of its library that one of them can compute.
:func:`standing`, before the ``forward`` of such a class, asks it at each call, as most of what
decides can change. The choice changes nothing of what ranks exchange, so that each makes its own.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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
from sar.graph.view import GraphArgument, GraphView, graphs_among
from sar.kernels.jit import untraced
from sar.nn.drift import check_call
from sar.nn.history import due_call

Arguments = Mapping[str, Any]  # arguments of the layer's forward behind the layer, by their names
Run = Callable[..., Tensor]

OPTIONS = "sar_options"  # of a module: what optimize() was asked for


@dataclass(frozen=True)
class LayerOptions:
    """What :func:`sar.optimize` was asked for.

    Attributes:
        donate: the layer may write over its input in backward.
        strict: it is an error where the layer is not fused.
    """

    donate: bool = False
    strict: bool = False


def options_of(layer: nn.Module) -> LayerOptions:
    """What the user asked of a layer by :func:`sar.optimize`."""
    found: LayerOptions = layer.__dict__.get(OPTIONS, _NO_OPTIONS)
    return found


_NO_OPTIONS = LayerOptions()


@dataclass(frozen=True)
class Adapter:
    """Binds calls of a foreign class to a fused function.

    What is exchanged with other ranks is what the class' own code would exchange on such a graph,
    so that ranks which choose differently meet. The exception is what ``agree`` finds.

    Attributes:
        bind: of a layer, a graph and inputs: what computes this call, without arguments; or, in a
            few plain words, why its own code does. Looks at no other rank, and is called at each
            call: a few comparisons. What hooks, modes and autocast forbid is asked elsewhere.
        code: names of methods that make up the class' own code, each with the
            :func:`fingerprint` of its sources that were read. A class that inherits ``forward``
            and replaces another of them has code of its own.
        agree: of a layer, a graph, inputs and whether this rank's call is fused: what the ranks
            have to agree on before either way; collective, and called on every rank. What ``bind``
            returned gets it as its argument.
        reduces: of a layer: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``, which its own code
            computes of the very source rows that it is given, if it is given nothing else; ``None``
            where it first makes others of them. Looks at nothing that may differ between ranks.
    """

    bind: Callable[[Any, Any, Arguments], Run | str]
    code: Mapping[str, tuple[str, ...]]
    agree: Callable[[Any, Any, Arguments, bool], Any] | None = None
    reduces: Callable[[Any], str | None] | None = None
    _changed: dict[Any, str | None] = field(default_factory=dict, compare=False, repr=False)

    def changed(self, kind: type, forward: Callable[..., Any]) -> str | None:
        """Why ``kind`` with this ``forward`` is not the class that this stands for; or ``None``."""
        if (kind, forward) not in self._changed:
            self._changed[kind, forward] = self._compared(kind, forward)
        return self._changed[kind, forward]

    def _compared(self, kind: type, forward: Callable[..., Any]) -> str | None:
        for name, known in self.code.items():
            method = forward if name == "forward" else getattr(kind, name, None)
            if fingerprint(method) not in known:
                return f"the code of {kind.__name__}.{name} is not that of a known version"
        return None


def fingerprint(method: Any) -> str:
    """16 hexadecimal digits of the source of a function; nothing where there is no source."""
    try:
        source = inspect.getsource(method)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# -- the choice ----------------------------------------------------------------------------------


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
    check: Callable[[Any, Any, Any], None] | None = None,
) -> Callable[..., Any]:
    """``forward`` of a class of layers, as it runs on sharded graphs; on others it is as it was.

    There parameters are compared over the ranks now and then, what is given of edges has as many
    rows as there are on every rank, dropout inside knows what the layer was called with, and the
    adapter may run a fused function. A ``NotSupportedError`` begins with the layer's class, of
    layers inside one another the innermost; it comes from the one that was raised, of its class.

    Args:
        adapter: that of the class, if it has one.
        graph, rows: places, behind the layer, of what says the edges, or of a dictionary of such,
            and of the rows of sources, or a pair of both ends'.
        columns: names of parameters given of edges. A call without any exchanges nothing.
        check: called with the layer, what says the edges and the rows, on sharded graphs or not.
    """
    names = list(inspect.signature(forward).parameters)[1:]
    graph_name, rows_name = names[graph], names[rows] if rows < len(names) else ""
    bind = inspect.signature(forward).bind
    of_edges = [(place, name) for place, name in enumerate(names) if name in columns]

    @untraced
    @wraps(forward)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        said = args[graph] if len(args) > graph else kwargs.get(graph_name)
        x = args[rows] if len(args) > rows else kwargs.get(rows_name)
        if check is not None:
            check(layer, said, x)
        if not (views := _graphs_said(said)):
            return forward(layer, *args, **kwargs)
        view = views[0]
        if number := due_call(layer, view.group, is_layer=True):
            check_call(layer, view.group, number)
        given = {n: args[p] if len(args) > p else kwargs.get(n) for p, n in of_edges}
        given = {name: value for name, value in given.items() if value is not None}
        if given and len(views) == len(view.canonical_etypes) == 1:
            _agree_columns(type(layer).__name__, given, view.num_edges(), view.group)
        current.stack.append(Call(layer, views, x))
        try:
            fused = None
            if adapter is not None:
                bound = bind(layer, *args, **kwargs)
                bound.apply_defaults()
                fused = choose(adapter, forward, layer, view, bound.arguments)
            return forward(layer, *args, **kwargs) if fused is None else fused()
        except NotSupportedError as error:
            if error.layer is not None:
                raise
            raise error.of_layer(type(layer).__name__) from error
        finally:
            current.stack.pop()

    return call


def _graphs_said(said: Any) -> list[GraphView]:
    """The graph that an argument of a layer is, or names, or those in a dictionary."""
    if isinstance(said, GraphArgument):
        return [said if isinstance(said, GraphView) else said.sharded_graph]
    return graphs_among(said) if isinstance(said, dict) else []


def _agree_columns(layer: str, given: dict[str, Any], num_edges: int, group: Group) -> None:
    """Raise ``ValueError`` on every rank where a column has another number of rows; collective."""
    with group.agreed(f"{layer}: {', '.join(given)}"):
        for name, value in given.items():
            if isinstance(value, Tensor) and [*map(int, value.shape[:1])] != [num_edges]:
                raise ValueError(
                    f"{name}: got shape {tuple(value.shape)}, expected {num_edges} rows, one for "
                    "each edge of this rank's graph"
                )


# -- reasons that several adapters have ----------------------------------------------------------

DTYPES = (torch.float32, torch.float64)
_LINEAR, _PRODUCT = nn.Linear.forward, F.linear


def inputs_reason(
    graph: Any, x: Any, *weights: Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> str | None:
    """Why a graph is not one relation between rows of one kind that travel alone, or ``x`` not its
    plain source rows [num_src, width] of one of ``dtypes``, that of all ``weights``."""
    if graph.sole_relation is None:
        return "the graph has several kinds of rows or edges, or they are reversed or unordered"
    if graph.sharing is not None:
        return "other modules of the layer read the same rows, which travel once for all"
    num_rows = graph.sole_relation.num_src
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
    """Whether backward may write over ``x``: the user asked for it, and an operation with a
    gradient made it, in memory of its own."""
    asked = layer.__dict__.get(OPTIONS, _NO_OPTIONS).donate
    return asked and x.requires_grad and not x.is_leaf and not is_view(x)
