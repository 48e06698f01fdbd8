"""What binds layers of other libraries to the fused functions of :mod:`sar.layers`.

Those functions know tensors and a relation. A front end has an :class:`Adapter` for each class of
its library that one of them can compute, and says in its :class:`Layers` what else is asked of it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sar import registry
from sar.memory.forwards import Forward

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


NO_OPTIONS = LayerOptions()


def options_of(layer: nn.Module) -> LayerOptions:
    """What the user asked of a layer."""
    found: LayerOptions = layer.__dict__.get(OPTIONS, NO_OPTIONS)
    return found


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
        """Why ``kind`` with this ``forward`` is not what this stands for; ``None``: it is."""
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


class Layers:
    """What a front end says of its library's layers, by default that there are none.

    Its module, which :mod:`sar.registry` names, has one as ``LAYERS``.
    """

    def adapters(self) -> Mapping[type, Adapter]:
        """By class, for those that are imported."""
        return {}

    def is_own(self, module: nn.Module) -> bool:
        """Whether the library made the module's class."""
        return False

    def takes_graph(self, module: nn.Module) -> bool:
        """Whether a module of the library is a layer, which is called with a graph."""
        return False

    def width(self, module: nn.Module) -> int | None:
        """Columns of the source rows that a layer reads, where it knows."""
        return None


def known_layers() -> list[Layers]:
    """Those of the front ends that are in use."""
    return [front_end.LAYERS for front_end in registry.imported()]


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
    """What a module reduces of the very rows that it is given, and nothing else; ``None`` where
    that is not known. See :class:`Adapter`."""
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
