"""What a model does, noted module by module: inputs, outputs and their gradients, in order."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
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
    """A module that begins (``"in"``) or ends (``"out"``) its forward."""

    kind: str
    module: str  # its name in the model, "" is the model
    number: int  # how often it was called before
    step: int
    inside: str  # the module whose forward calls it
    values: Values = field(default_factory=list)  # arguments or results; None is no tensor of rows
    grads: Values = field(default_factory=list)  # of these, 0 where none flows; None: not seen

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.module, self.number


@dataclass
class Run:
    """What one rank, or the whole graph's process, has done.

    ``ends`` has what is left after a step by (step, what, name): gradients of parameters
    (``"sum"`` over the ranks) and of ``"rows"`` of nodes, at last each ``"buffer"``.
    """

    events: list[Event] = field(default_factory=list)
    ends: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    error: Exception | None = None  # what it ended with
    open: list[str] = field(default_factory=lambda: [CALL])  # whose forward runs, or has raised


class Recorder:
    """Notes the calls of a model's modules in ``run``.

    Args:
        model: gets hooks, which stay.
        skipped: modules that get none, as fused layers would not be fused.
        aliased: give modules views of their inputs, so that gradients of inputs are those that
            flow through this call alone, and results views as well.
        moves: by name of a module: what makes other inputs of its own, if they are aliased.
    """

    def __init__(
        self, run: Run, model: nn.Module, skipped: set[nn.Module], aliased: bool,
        moves: Mapping[Any, Callable[[Any], Any]],
    ) -> None:  # fmt: skip
        self._run, self._aliased, self._moves = run, aliased, moves
        self._numbers: Counter[tuple[str, str]] = Counter()
        self.step = 0
        self.hears = False  # gradients
        for name, module in model.named_modules():
            if module not in skipped:
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                module.register_forward_hook(partial(self._leave, name))

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if in_function():  # on rows of a block, as often as it takes
            return None
        given = mapped((args, kwargs), self._moves.get(name, lambda leaf: leaf))
        noted = self.note("in", name, given)
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
        value = total = None
        if isinstance(leaf, EdgeRows):  # computed by all ranks; its gradient is not seen
            with torch.no_grad():
                value = leaf.materialize().detach().clone()  # type: ignore[attr-defined]
        elif is_plain(leaf):
            value = leaf.detach().clone()
            total = torch.zeros_like(value) if value.is_floating_point() else None
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
    """Whether it is a tensor that holds its numbers, no stand-in for edges."""
    is_structure = hasattr(leaf, "is_structure")
    return isinstance(leaf, Tensor) and not is_structure and leaf.layout == torch.strided


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
