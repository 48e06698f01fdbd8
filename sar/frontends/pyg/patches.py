"""Every function of PyG that is replaced, with its undo.

What stands in takes sharded edges and sends all else to the original. Modules hold functions under
names of their own, so that each module which has the original gets what stands in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from threading import Lock
from typing import Any

from sar.frontends.pyg.index import Symbol
from sar.frontends.pyg.undistributed import refusals
from sar.frontends.pyg.utilities import REPLACED


def install() -> None:
    """Put all replacements in place, once."""
    with _lock:
        if _undo or "torch_geometric" not in sys.modules:
            return
        for (module, name), (place, argument, function) in REPLACED.items():
            original = getattr(import_module(module), name)
            _sweep(original, _for_symbols(original, place, argument, function))
        for kind, forward in refusals():
            _undo.append((kind, "forward", kind.forward, forward))
            kind.forward = forward


def uninstall() -> None:
    """Put back all originals that nobody else has replaced."""
    with _lock:
        for holder, name, original, replacement in reversed(_undo):
            if vars(holder).get(name) is replacement:
                setattr(holder, name, original)
        _undo.clear()


_lock = Lock()
_undo: list[tuple[Any, str, Any, Any]] = []


def _sweep(original: Any, replacement: Any) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                setattr(module, name, replacement)
                _undo.append((module, name, original, replacement))


def _for_symbols(original: Callable, place: int, argument: str, function: Callable) -> Callable:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[place] if len(args) > place else kwargs.get(argument)
        chosen = function if isinstance(given, Symbol) else original
        return chosen(*args, **kwargs)

    return call
