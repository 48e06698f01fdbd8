"""Which code computes a layer that has an adapter, and why: the one place that decides.

Most of what decides can change between two calls and is looked at in each: a few comparisons. The
choice changes nothing of what ranks exchange, so that each makes its own; see
:class:`sar.models.adapter.Adapter` for the exception.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sar._private import is_view, looked_into
from sar.errors import NotSupportedError
from sar.models.adapter import NO_OPTIONS, OPTIONS, Adapter, Arguments, Run, options_of


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
