"""What a model does, noted module by module: inputs, outputs and their gradients, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sar.tracing.edge_rows import EdgeRows
from sar.tracing.message_dropout import in_function

CALL = "(call)"  # what calls the model, as the outermost module
Values = list[Tensor | None]


@dataclass
class Event:
    """A module that begins (``"in"``) or ends (``"out"``) its forward.

    Attributes:
        module: its name in the model, ``""`` is the model.
        number: how often it was called before.
        inside: the module whose forward calls it.
        values: tensors among the arguments or results by place; ``None`` for what is no tensor, or
            stands for edges.
        grads: of these, once there was a backward pass. blind: places of lazy tensors of edges,
            whose gradients are not seen.
    """

    kind: str
    module: str
    number: int
    inside: str
    values: Values
    grads: Values = field(default_factory=list)
    blind: set[int] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.module, self.number


class Recorder:
    """Notes the calls of a model's modules while it is entered.

    Args:
        skipped: modules that get no hooks, as fused layers would not be fused.
        aliased: give modules views of their inputs, so that gradients of inputs are those that
            flow through this call alone, and results views as well.
    """

    def __init__(self, model: nn.Module, skipped: set[nn.Module], aliased: bool) -> None:
        self.events: list[Event] = []
        self.is_deaf = False  # to gradients
        self.open = [CALL]
        self.aliased, self._model, self._skipped = aliased, model, skipped
        self._numbers: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def noting(self) -> Iterator[None]:
        handles = []
        for name, module in self._model.named_modules():
            if module not in self._skipped:
                marks = _Marks(self, name)
                handles.append(module.register_forward_pre_hook(marks.enter, with_kwargs=True))
                handles.append(module.register_forward_hook(marks.leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def note(self, kind: str, module: str, nest: Any) -> Any:
        """Note the tensors of ``nest``; returns it, with views in place of tensors if asked to."""
        number = self._numbers[kind, module]
        self._numbers[kind, module] += 1
        around = [one for one in self.open if one != module] if kind == "out" else self.open
        event = Event(kind, module, number, [CALL, *around][-1], [])
        self.events.append(event)
        return mapped(nest, lambda leaf: self._noted(event, leaf))

    def _noted(self, event: Event, leaf: Any) -> Any:
        place = len(event.values)
        event.values.append(value_of(leaf))
        event.grads.append(None)
        if isinstance(leaf, EdgeRows):
            event.blind.add(place)
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not is_plain(leaf):
            return leaf
        if self.aliased:
            leaf = leaf.view_as(leaf)

        def add(grad: Tensor) -> None:
            if self.is_deaf:
                return
            before = event.grads[place]
            grad = grad.detach().clone()
            event.grads[place] = grad if before is None else before + grad

        leaf.register_hook(add)
        return leaf


class _Marks:
    """Hooks of one module."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_function():  # on rows of a block, as often as it takes
            return None
        noted = self._recorder.note("in", self._name, (args, kwargs))
        self._recorder.open.append(self._name)
        return noted if self._recorder.aliased else None

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        stack = self._recorder.open
        if in_function() or self._name not in stack:
            return None
        while stack[-1] != self._name:  # modules that raised what their caller caught
            stack.pop()
        noted = self._recorder.note("out", self._name, output)
        stack.pop()
        return noted if self._recorder.aliased else None


def is_plain(leaf: Any) -> bool:
    """Whether a tensor is no stand-in for edges."""
    return not isinstance(leaf, EdgeRows) and not hasattr(leaf, "is_structure")


def value_of(leaf: Any) -> Tensor | None:
    """A copy of a tensor; that of a lazy one of edges is computed, by all ranks."""
    if not isinstance(leaf, Tensor) or hasattr(leaf, "is_structure"):
        return None
    if isinstance(leaf, EdgeRows):
        with torch.no_grad():
            leaf = leaf.materialize()  # type: ignore[attr-defined]
    return leaf.detach().clone() if leaf.layout == torch.strided else None


def mapped(nest: Any, function: Any) -> Any:
    """The same nest of tuples, lists and dictionaries with ``function`` of each leaf, dictionaries
    in the order of their keys' names."""
    if isinstance(nest, dict):
        made = {key: mapped(nest[key], function) for key in sorted(nest, key=str)}
        try:
            return type(nest)((key, made[key]) for key in nest)
        except TypeError:  # a dictionary of another constructor
            return made
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(mapped(one, function) for one in nest))
    if type(nest) in (list, tuple):
        return type(nest)(mapped(one, function) for one in nest)
    return function(nest)


def leaves_of(nest: Any) -> list[Any]:
    """The leaves in the order of :func:`mapped`."""
    found: list[Any] = []
    mapped(nest, found.append)
    return found
