"""What front ends say of their libraries' layers, and which layers have adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sar import registry
from sar.memory.forwards import Forward
from sar.models.choice import Adapter


class Layers:
    """What a front end says of its library's layers, by default that there are none.

    Its module, which :mod:`sar.registry` names, has one as ``LAYERS``.

    Attributes:
        keys_functions: ``F.dropout`` draws as the modules of :func:`sar.convert_dropout` do.
    """

    keys_functions = False

    def adapters(self) -> Mapping[type, Adapter]:
        """By class, for those that are imported."""
        return {}

    def is_own(self, module: nn.Module) -> bool:
        """Whether the library made the module's class."""
        return False

    def takes_graph(self, module: nn.Module) -> bool:
        """Whether a module of the library is a layer, which is called with a graph."""
        return False

    def converted(self, module: nn.Module) -> nn.Module:
        """What :func:`sar.prepare` puts in place of a module, or the module: norms of the library
        get the statistics of all ranks' rows."""
        return module

    def drop_nothing(self, module: nn.Module) -> None:
        """Let a module of the library drop nothing, where it holds a probability."""

    def width(self, module: nn.Module) -> int | None:
        """Columns of the source rows that a layer reads, where it knows."""
        return None

    def arguments(
        self, model: nn.Module, graph: Any, inputs: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """What ``model`` is called with for a graph as the library's users have it and ``inputs``
        beside it; ``None`` where it is none of the library's."""
        return None


def known_layers() -> list[Layers]:
    """The layers of the front ends that are in use."""
    return [front_end.LAYERS for front_end in registry.imported()]


def arguments_of(model: nn.Module, graph: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """What ``model`` is called with: the graph and ``inputs``, where no library says otherwise."""
    found = (layers.arguments(model, graph, inputs) for layers in known_layers())
    return next((one for one in found if one is not None), (graph, *inputs))


def adapted(kind: type) -> tuple[type, Adapter] | None:
    """The class of an adapter, and it, for ``kind`` or the first of its bases that has one."""
    for layers in known_layers():
        known = layers.adapters()
        for base in kind.__mro__:
            if base in known:
                return base, known[base]
    return None


def own_forward(layer: nn.Module) -> str | None:
    """Why a layer runs code of its own in place of the ``forward`` of its adapter's class."""
    inner = layer.__dict__.get("forward")
    while isinstance(inner, Forward):
        inner = inner.inner  # what set_activations() put there
    owner = next(base for base in type(layer).__mro__ if "forward" in base.__dict__)
    found = adapted(type(layer))
    if inner is None and found is not None and owner is found[0]:
        return None
    return f"{type(layer).__name__} has a forward of its own"


def reduction_of(module: Any) -> str | None:
    """The reduction that a module does of the very rows it is given, if known: see ``Adapter``."""
    found = adapted(type(module))
    if found is None or found[1].reduces is None or own_forward(module) is not None:
        return None
    return found[1].reduces(module)


def parts_of_fused(model: nn.Module) -> set[nn.Module]:
    """Modules inside of layers with adapters: hooks on them would keep these from being fused."""
    found: set[nn.Module] = set()
    for layer in model.modules():
        if adapted(type(layer)) is not None and own_forward(layer) is None:
            found |= {part for part in layer.modules() if part is not layer}
    return found
