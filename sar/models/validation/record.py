"""What a model does, noted module by module: inputs, outputs and their gradients, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    values: Values = field(default_factory=list)
    grads: Values = field(default_factory=list)
    blind: set[int] = field(default_factory=set)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.module, self.number


@dataclass
class Run:
    """What one rank, or the whole graph's process, has done.

    Attributes:
        events: calls of modules, and the results of the call, of all steps.
        parameters: gradients by (step, name). rows: names of those that are rows of nodes.
        inputs: gradients of columns of nodes by (step, type, name).
        buffers: at the end, by name.
        error: what it ended with. open: modules whose forward runs, or has raised that.
    """

    events: list[Event] = field(default_factory=list)
    parameters: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    inputs: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    open: list[str] = field(default_factory=lambda: [CALL])

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.error = error
            raise


class Recorder:
    """Notes the calls of a model's modules in ``run``, while it is entered.

    Args:
        skipped: modules that get no hooks, as fused layers would not be fused.
        aliased: give modules views of their inputs, so that gradients of inputs are those that
            flow through this call alone, and results views as well.
    """

    def __init__(self, run: Run, model: nn.Module, skipped: set[nn.Module], aliased: bool) -> None:
        self._run, self._model, self._skipped, self._aliased = run, model, skipped, aliased
        self._numbers: Counter[tuple[str, str]] = Counter()
        self.hears = False  # gradients

    @contextmanager
    def noting(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if module not in self._skipped:
                    enter, leave = partial(self._enter, name), partial(self._leave, name)
                    before = module.register_forward_pre_hook(enter, with_kwargs=True)
                    hooks.callback(before.remove)
                    hooks.callback(module.register_forward_hook(leave).remove)
            yield

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_function():  # on rows of a block, as often as it takes
            return None
        noted = self.note("in", name, (args, kwargs))
        self._run.open.append(name)
        return noted if self._aliased else None

    def _leave(self, name: str, _: nn.Module, args: Any, output: Any) -> Any:
        stack = self._run.open
        if in_function() or name not in stack:
            return None
        while stack[-1] != name:  # modules that raised what their caller caught
            stack.pop()
        noted = self.note("out", name, output)
        stack.pop()
        return noted if self._aliased else None

    def note(self, kind: str, module: str, nest: Any) -> Any:
        """Note the tensors of ``nest``; returns it, with views in place of tensors if asked to."""
        around = [one for one in self._run.open if kind == "in" or one != module]
        event = Event(kind, module, self._numbers[kind, module], [CALL, *around][-1])
        self._numbers[kind, module] += 1
        self._run.events.append(event)
        return mapped(nest, partial(self._noted, event))

    def _noted(self, event: Event, leaf: Any) -> Any:
        place = len(event.values)
        event.values.append(value_of(leaf))
        event.grads.append(None)
        if isinstance(leaf, EdgeRows):
            event.blind.add(place)
        if not isinstance(leaf, Tensor) or not leaf.requires_grad or not is_plain(leaf):
            return leaf
        if self._aliased:
            leaf = leaf.view_as(leaf)

        def add(grad: Tensor) -> None:
            if self.hears:
                before, grad = event.grads[place], grad.detach().clone()
                event.grads[place] = grad if before is None else before + grad

        leaf.register_hook(add)
        return leaf


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
