"""Fused layers before the ``forward`` of DGL's classes, on sharded graphs alone."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from sar.layers import FusedLayer, choose, entries
from sar.layers.choice import class_reason


def install(kind: type, guard: Callable[[], None]) -> None:
    """Put them before the classes of the table that are imported, each once.

    Args:
        kind: of graphs that are ours.
        guard: called before a fused layer runs.
    """
    for entry in entries():
        layer: Any = getattr(sys.modules.get(entry.module), entry.name, None)
        if layer is not None and not hasattr(layer.__dict__["forward"], "fused"):
            layer.forward = _before(layer.forward, entry, kind, guard)


def uninstall() -> None:
    """Give the classes their own ``forward`` back."""
    for entry in entries():
        layer: Any = getattr(sys.modules.get(entry.module), entry.name, None)
        if layer is not None and hasattr(layer.__dict__["forward"], "fused"):
            layer.forward = layer.forward.__wrapped__


def _before(
    original: Callable[..., Any], entry: FusedLayer, kind: type, guard: Callable[[], None]
) -> Callable[..., Any]:
    bind, changed = inspect.signature(original).bind, class_reason(entry, original)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        graph = args[1] if len(args) > 1 else kwargs.get("graph")
        if not isinstance(graph, kind):
            return original(*args, **kwargs)
        bound = bind(*args, **kwargs)
        bound.apply_defaults()
        layer, graph, *_ = bound.args
        choice = choose(entry, changed, layer, graph, bound.arguments)
        if choice.run is None:
            return original(*args, **kwargs)
        guard()
        return choice.run(layer, graph, bound.arguments)

    forward.fused = entry  # type: ignore[attr-defined]
    return forward
