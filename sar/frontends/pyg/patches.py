"""Every function of PyG, and every layer's forward, that is replaced, with its undo.

What stands in takes sharded edges and sends all else to the original. Modules hold functions under
names of their own, so that each module which has the original gets what stands in.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import update_wrapper, wraps
from importlib import import_module
from threading import Lock
from types import FunctionType
from typing import Any

from torch import nn

from sar.frontends.pyg import dropping, groups, hetero, mistakes
from sar.frontends.pyg.groups import NodeGroups
from sar.frontends.pyg.index import EdgeEnd, EdgeMask, ShardedEdgeIndex
from sar.frontends.pyg.joined import PieceRows, ShiftedEnd
from sar.frontends.pyg.layers import LAYERS, agree_on_rows, edges_place
from sar.frontends.pyg.undistributed import refusals
from sar.frontends.pyg.utilities import BY_COLUMN, REPLACED, WRAPPED
from sar.models.choice import standing
from sar.tracing.lazy import EdgeTensor


def install() -> None:
    """Put all replacements in place, once."""
    with _lock:
        if _undo or "torch_geometric" not in sys.modules:
            return
        for holder, name, wrap in mistakes.patches():
            original = vars(holder).get(name)
            if original is None:  # a version that has not got it
                continue
            if isinstance(holder, type):
                _put(holder, name, original, wrap(original))
            else:
                _sweep(original, wrap(original))
        for types, table in (
            (_EDGES, REPLACED | hetero.REPLACED | dropping.REPLACED),
            ((NodeGroups,), groups.REPLACED),
            ((EdgeTensor,), BY_COLUMN),
        ):
            for (module, name), (place, argument, function) in table.items():
                _replace(import_module(module), name, place, argument, function, types)
        for kind, name, method in refusals():
            _put(kind, name, getattr(kind, name), method)
        for (module, name), wrap in (hetero.WRAPPED | WRAPPED).items():
            *kinds, name = name.split(".")
            holder = getattr(import_module(module), *kinds) if kinds else import_module(module)
            _put(holder, name, vars(holder)[name], wrap(vars(holder)[name]))
        _stand_before_layers()


def uninstall() -> None:
    """Put back all originals that nobody else has replaced."""
    with _lock:
        for holder, name, original, replacement in reversed(_undo):
            if vars(holder).get(name) is not replacement:
                continue
            if original is None:
                delattr(holder, name)
            else:
                setattr(holder, name, original)
        _undo.clear()


_EDGES = (ShardedEdgeIndex, EdgeEnd, EdgeMask, ShiftedEnd, PieceRows)
_lock = Lock()
_undo: list[tuple[Any, str, Any, Any]] = []


def _replace(
    module: Any,
    name: str,
    place: int,
    argument: str,
    function: Callable,
    kinds: tuple[type, ...],
) -> None:
    """Put one replacement in place: of a function everywhere, of a method in its class."""
    *owners, last = name.split(".")
    holder = module
    for owner in owners:
        holder = getattr(holder, owner, None)
    if holder is None:  # a class that this version has not
        return
    original = getattr(holder, last)
    replacement = _for_ours(kinds, original, place, argument, function)
    if owners:
        _put(holder, last, original, replacement)
    else:
        _sweep(original, replacement)


def _sweep(original: Any, replacement: Any) -> None:
    replacement = _as_written(original, replacement)
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                _put(module, name, original, replacement)


def _put(holder: Any, name: str, original: Any, replacement: Any) -> None:
    replacement = _as_written(original, replacement)
    setattr(holder, name, replacement)
    _undo.append((holder, name, original, replacement))


def _as_written(original: Any, replacement: Any) -> Any:
    """A replacement in the original's module: TorchScript compiles the source of the original, and
    looks its names up where the function that it is given is from."""
    scope = getattr(original, "__globals__", _TORCHS)
    if scope is _TORCHS or scope is getattr(replacement, "__globals__", None):
        return replacement

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    made = FunctionType(call.__code__, scope, original.__name__, None, call.__closure__)
    return update_wrapper(made, replacement)


_TORCHS = vars(nn.functional)  # which TorchScript knows by their names


def _for_ours(
    kinds: tuple[type, ...], original: Callable, place: int, argument: str, function: Callable
) -> Callable:
    """The original, but ``function`` where an argument, or one in a dictionary, is of ``kinds``."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get(argument)
        among = given.values() if isinstance(given, dict) else [given]
        chosen = function if any(isinstance(one, kinds) for one in among) else original
        return chosen(*args, **kwargs)

    return call


# -- layers --------------------------------------------------------------------------------------


def _stand_before_layers() -> None:
    """Put the choice of code before each layer that takes edges: PyG's, and those of users."""
    convs = import_module("torch_geometric.nn.conv")
    base = convs.MessagePassing
    kinds = [one for one in vars(convs).values() if isinstance(one, type)]
    for kind in dict.fromkeys([*kinds, *LAYERS.adapters(), *_below(base)]):
        if issubclass(kind, nn.Module):
            _stand_before(kind)

    def defined(kind: type, **given: Any) -> None:
        super(base, kind).__init_subclass__(**given)
        _stand_before(kind)

    _put(base, "__init_subclass__", None, classmethod(defined))


def _below(kind: type) -> list[type]:
    found: list[type] = kind.__subclasses__()
    return [*found, *(one for sub in found for one in _below(sub))]


def _stand_before(kind: type) -> None:
    forward = vars(kind).get("forward")
    if not isinstance(forward, FunctionType) or (place := edges_place(forward)) is None:
        return
    names = list(inspect.signature(forward).parameters)[1:]
    rows = next((names.index(name) for name in ("x", "x_dict") if name in names), len(names))
    adapter = LAYERS.adapters().get(kind)
    call = standing(
        forward, adapter, graph=place, rows=rows, columns=_OF_EDGES, check=agree_on_rows
    )
    _put(kind, "forward", forward, call)


_OF_EDGES = {"edge_attr", "edge_type", "edge_weight"}
