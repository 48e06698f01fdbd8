"""What stands before the ``forward`` of DGL's layers: fused layers on sharded graphs, and names in
their errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

from sar.errors import NotSupportedError
from sar.frontends.dgl.counts import Counts
from sar.frontends.dgl.edge_arguments import edge_check
from sar.graph.rows import Call, current
from sar.kernels.jit import untraced
from sar.layers import FusedLayer, choose
from sar.layers.choice import class_reason
from sar.nn.drift import check_call


def fused(entry: FusedLayer) -> Callable[[Callable], Callable]:
    """What makes of the ``forward`` of a class of the table one that may run its fused layer."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        bind, changed = inspect.signature(original).bind, class_reason(entry, original)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            graph = args[1] if len(args) > 1 else kwargs.get("graph")
            if not isinstance(graph, Counts):
                return original(*args, **kwargs)
            bound = bind(*args, **kwargs)
            bound.apply_defaults()
            layer, graph, *_ = bound.args
            choice = choose(entry, changed, layer, graph, bound.arguments)
            if choice.run is None:
                return original(*args, **kwargs)
            return choice.run(layer, graph, bound.arguments)

        return forward

    return replace


def named(forward: Callable) -> Callable:
    """``forward`` of a layer, of which dropout inside knows what it was called with.

    Its ``NotSupportedError`` begins with the layer's class; its parameters are compared over the
    ranks now and then.

    Of layers inside one another the innermost is named. The error is of the same class and comes
    from the one that was raised.
    """
    check_edges = edge_check(forward)

    @untraced
    @wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph: Any = args[0] if args else kwargs.get("graph", kwargs.get("g"))
        is_sharded = isinstance(graph, Counts)
        if is_sharded:
            check_call(self, graph.group, is_layer=True)
            check_edges(self, graph, args, kwargs)
            rows = args[1] if len(args) > 1 else kwargs.get("feat")
            current.stack.append(Call(self, [graph], rows))
        try:
            return forward(self, *args, **kwargs)
        except NotSupportedError as error:
            if error.layer is not None:
                raise
            raise error.of_layer(type(self).__name__) from error
        finally:
            if is_sharded:
                current.stack.pop()

    return call
