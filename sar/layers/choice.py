"""Which code computes a layer of the table at a call, and why: the one place that decides.

A class is compared with what its fused layer stands for when the front end puts itself before its
``forward``; what a graph is like, is known by the graph. The rest can change between two calls and
is looked at in each: a few comparisons. The choice changes nothing of what ranks exchange, so that
each makes its own; see :class:`sar.layers.entry.FusedLayer` for the exception.
"""

from __future__ import annotations

import hashlib
import inspect
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sar._private import (
    DEVICE_MODES,
    function_modes,
    has_global_hooks,
    hooked_one,
    in_forward_mode,
    is_view,
)
from sar.errors import NotSupportedError
from sar.layers.entry import NO_OPTIONS, OPTIONS, FusedLayer, Inputs, Run, options_of
from sar.ops.saving import is_innermost, once, takes_notes

_HARMLESS = ("sar.", DEVICE_MODES)  # modes that change no result of a layer


@dataclass(frozen=True)
class Choice:
    """What computes a layer.

    Attributes:
        implementation: ``"fused"``, ``"fused, recomputed"``, or ``"plain"``: the layer's own code.
        reason: why it is plain.
        run: the fused one.
    """

    implementation: str
    reason: str | None = None
    run: Run | None = None


def fingerprint(forward: Callable[..., Any]) -> str:
    """16 hexadecimal digits of the source of a function; nothing where there is no source."""
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def class_reason(entry: FusedLayer, forward: Callable[..., Any]) -> str | None:
    """Why ``forward`` is not what ``entry`` stands for."""
    if fingerprint(forward) in entry.fingerprints:
        return None
    return f"the code of {entry.name}.forward is not that of a known version"


def choose(
    entry: FusedLayer, changed: str | None, layer: nn.Module, graph: Any, inputs: Inputs
) -> Choice:
    """What computes ``layer``; collective where it is recomputed in a way of its own, or where its
    entry has something to agree on.

    Warns once per layer and reason where the user's doing keeps it from being fused.

    Args:
        changed: what :func:`class_reason` says.

    Raises:
        NotSupportedError: ``sar.optimize(strict=True)`` asked for a fused layer, and it is not.
    """
    caused = changed or call_reason(layer)
    reason = caused or entry.why_not(layer, graph, inputs)
    run, implementation = entry.run, "fused"
    if entry.run_recomputed is not None and takes_notes() and is_innermost():
        if _all_recompute(entry, reason, layer, graph, inputs):
            run, implementation = entry.run_recomputed, "fused, recomputed"
    meter = graph.group.meter
    if meter.told is not None:
        meter.tell("plain" if reason else implementation, reason)
    if reason is not None and options_of(layer).strict:
        raise NotSupportedError(f"not fused, as strict=True asks: {reason}")  # of a named layer
    if entry.agree is not None:
        run = partial(run, agreed=entry.agree(layer, graph, inputs, reason is None))
    if reason is None:
        return Choice(implementation, None, run)
    if caused:
        warn_once(layer, reason)
    return Choice("plain", reason)


def _all_recompute(
    entry: FusedLayer, reason: str | None, layer: nn.Module, graph: Any, inputs: Inputs
) -> bool:
    """Whether all ranks can; collective, but for what is the same on all of them."""
    if graph.is_block or entry.why_not_recomputed is None:
        return False

    def agree() -> bool:
        fits = reason is None and entry.why_not_recomputed(layer, graph, inputs) is None  # type: ignore[misc]
        if graph.group.size == 1:
            return fits
        return bool(graph.group.all_reduce(torch.tensor(int(fits)), "min"))

    return once(agree)


def call_reason(layer: nn.Module) -> str | None:
    """Why somebody could see, now, that a layer is computed as a whole, or would compute another.

    Hooks of the layer itself run outside of it.
    """
    if has_global_hooks():
        return "torch has global hooks of modules, which look into it"
    parts = layer.modules()
    next(parts)  # the layer
    part = hooked_one(parts)
    if part is not None:
        return f"{type(part).__name__} in it has a hook"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    for mode in function_modes():
        if not type(mode).__module__.startswith(_HARMLESS):
            return f"the mode {type(mode).__name__} looks at torch functions"
    if in_forward_mode():
        return "forward mode gradients are computed"
    return None


def own_forward(layer: nn.Module, entry: FusedLayer | None) -> str | None:
    """Why a layer runs code of its own in place of the ``forward`` of its class of the table."""
    name, inner = type(layer).__name__, layer.__dict__.get("forward")
    while inner is not None and type(inner).__module__.startswith("sar."):
        inner = inner.inner  # what set_activations() put there
    owner = next(base for base in type(layer).__mro__ if "forward" in base.__dict__)
    known = None if entry is None else (entry.module, entry.name)
    if inner is None and (owner.__module__, owner.__name__) == known:
        return None
    return f"{name} has a forward of its own"


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


# -- reasons that several fused layers have ------------------------------------------------------

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
