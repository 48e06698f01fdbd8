"""What a model does, noted module by module: inputs, outputs and their gradients, in order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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
        number: how often it was called before. step: of training.
        inside: the module whose forward calls it.
        values: tensors among the arguments or results by place; ``None`` for what is no tensor, or
            stands for edges.
        grads: of these, 0 where none flows; ``None`` where it is not seen, as of lazy tensors.
    """

    kind: str
    module: str
    number: int
    step: int
    inside: str
    values: Values = field(default_factory=list)
    grads: Values = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.module, self.number


@dataclass
class Run:
    """What one rank, or the whole graph's process, has done.

    Attributes:
        events: calls of modules, and the results of the call, of all steps.
        seeds: gradients that results were given, by step.
        ends: what is left after a step by (step, what, name): gradients of parameters (``"sum"``
            over the ranks) and of ``"rows"`` of nodes, at last the ``"buffer"``.
        error: what it ended with. open: modules whose forward runs, or has raised that.
    """

    events: list[Event] = field(default_factory=list)
    seeds: dict[int, list[Tensor]] = field(default_factory=dict)
    ends: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
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
    """Notes the calls of a model's modules in ``run``, while :meth:`noting` is entered.

    Args:
        skipped: modules that get no hooks, as fused layers would not be fused.
        aliased: give modules views of their inputs, so that gradients of inputs are those that
            flow through this call alone, and results views as well.
    """

    def __init__(self, run: Run, model: nn.Module, skipped: set[nn.Module], aliased: bool) -> None:
        self._run, self._model, self._skipped, self._aliased = run, model, skipped, aliased
        self._numbers: Counter[tuple[str, str]] = Counter()
        self.step = 0
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
        while stack.pop() != name:  # modules that raised what their caller caught
            pass
        noted = self.note("out", name, output)
        return noted if self._aliased else None

    def note(self, kind: str, module: str, nest: Any) -> Any:
        """Note the tensors of ``nest``; returns it, with views in place of tensors if asked to."""
        number, inside = self._numbers[kind, module], self._run.open[-1]
        event = Event(kind, module, number, self.step, inside)
        self._numbers[kind, module] += 1
        self._run.events.append(event)
        return mapped(nest, partial(self._noted, event))

    def _noted(self, event: Event, leaf: Any) -> Any:
        value = _value_of(leaf)
        total = None
        if value is not None and value.is_floating_point() and is_plain(leaf):
            total = torch.zeros_like(value)
        event.values.append(value)
        event.grads.append(total)
        if total is None or not leaf.requires_grad:
            return leaf
        leaf = leaf.view_as(leaf) if self._aliased else leaf
        leaf.register_hook(lambda grad: self._hear(total, grad))
        return leaf

    def _hear(self, total: Tensor, grad: Tensor) -> None:
        if self.hears:
            total += grad.detach()


def is_plain(leaf: Any) -> bool:
    """Whether a tensor is no stand-in for edges."""
    return not isinstance(leaf, EdgeRows) and not hasattr(leaf, "is_structure")


def _value_of(leaf: Any) -> Tensor | None:
    """A copy of a tensor; that of a lazy one of edges is computed, by all ranks."""
    if not isinstance(leaf, Tensor) or hasattr(leaf, "is_structure"):
        return None
    if isinstance(leaf, EdgeRows):
        with torch.no_grad():
            leaf = leaf.materialize()  # type: ignore[attr-defined]
    return leaf.detach().clone() if leaf.layout == torch.strided else None


def mapped(nest: Any, function: Callable[[Any], Any]) -> Any:
    """The same nest of tuples, lists and dictionaries with ``function`` of each leaf, dictionaries
    in the order of their keys' names."""
    if isinstance(nest, dict):
        made = copy.copy(nest)
        made.update({key: mapped(nest[key], function) for key in sorted(nest, key=str)})
        return made
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(mapped(one, function) for one in nest))
    if type(nest) in (list, tuple):
        return type(nest)(mapped(one, function) for one in nest)
    return function(nest)
