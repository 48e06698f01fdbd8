"""What a layer has to know about its own passes: are saved tensors simply kept, is backward to be
differentiated?

A layer that is recomputed runs its forward pass again in backward. Results that are small, or
that a rank has to get from the others, are noted the first time and taken from the notes then:
they neither travel nor count twice.

Note [Saved first]
A repeated forward pass ends when its last tensor is saved. An operation that saves what it reads
before it computes its value takes no memory for the value then: :func:`valued`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from sar._private import innermost_saving_hooks, version_of
from sar.comm import Group
from sar.errors import NotSupportedError

T = TypeVar("T")


class Notes:
    """Results of one forward pass in the order in which they came."""

    def __init__(self) -> None:
        self.results: list[object] = []
        self.next: int | None = None  # of a repetition: which result comes next


class _State(threading.local):
    notes: Notes | None = None
    hooked: bool = False
    hooks: object = None  # of saved tensors, when the forward pass began
    see: Callable[[Tensor], None] | None = None  # gets what is saved and changes nothing


_state = _State()


@contextmanager
def hooked(notes: Notes | None = None, *, again: bool = False) -> Iterator[None]:
    """Around a forward pass whose saved tensors pass through hooks, which copy or recompute them.

    Args:
        notes: where :func:`compute_once` notes its results, or, with ``again``, finds them.
    """
    before = _state.notes, _state.hooked, _state.hooks
    _state.notes, _state.hooked, _state.hooks = notes, True, innermost_saving_hooks()
    if notes is not None:
        notes.next = 0 if again else None
    try:
        yield
    finally:
        _state.notes, _state.hooked, _state.hooks = before


@contextmanager
def looked_on(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Around a forward pass: ``see`` gets each tensor that is saved, and what runs is what runs
    without it. No backward pass may follow."""

    def look(saved: Tensor) -> Tensor:
        see(saved)
        return saved

    before = _state.hooks, _state.see
    with saved_tensors_hooks(look, lambda saved: saved):
        _state.hooks, _state.see = innermost_saving_hooks(), see
        try:
            yield
        finally:
            _state.hooks, _state.see = before


def onlooker() -> Callable[[Tensor], None] | None:
    """What wants to see each tensor that is saved: for hooks, which hide them from it."""
    return _state.see


def is_innermost() -> bool:
    """Whether nobody inside of the forward pass has hooks of saved tensors, as to repeat a part."""
    return _state.hooks == innermost_saving_hooks()


def is_recomputed() -> bool:
    """Whether this forward pass notes what it does, or repeats it by its notes, and no part of it
    does so by itself."""
    return _state.notes is not None and is_innermost()


def owns_saved() -> bool:
    """Whether nobody but the operation that saves them gets to see its own saved tensors."""
    repeated_or_kept = _state.notes is not None or not _state.hooked
    return repeated_or_kept and _state.hooks == innermost_saving_hooks()


def repeats() -> bool:
    """Whether this forward pass is computed again, for a backward pass that follows."""
    return _state.notes is not None and _state.notes.next is not None


def compute_once(compute: Callable[[], T]) -> T:
    """What ``compute`` returns; in a repeated forward pass, what it returned the first time."""
    notes = _state.notes
    if notes is None:
        return compute()
    if notes.next is None:
        notes.results.append(compute())
        return notes.results[-1]  # type: ignore[return-value]
    notes.next += 1
    return notes.results[notes.next - 1]  # type: ignore[return-value]


def spares_memory() -> bool:
    """Whether memory counts more than time: saved tensors are moved away or computed again.

    Then attention has one round of rows in flight, not two, and no buffers stay between layers.
    """
    return _state.hooked


def valued(saved: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What ``compute`` returns, with the gradient of ``saved``, which a function returned instead.

    The function has saved what its backward pass reads, by Note [Saved first].
    """
    return _Valued.apply(saved, compute)


class _Valued(Function):
    """The value of an operation whose backward pass is elsewhere; dsaved = dvalue."""

    @staticmethod
    def forward(ctx: Any, saved: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    @staticmethod
    def backward(ctx: Any, dvalue: Tensor) -> tuple[Tensor, None]:
        return dvalue, None


class Writes:
    """What is written into a result from now on, known without keeping its memory alive.

    A backward pass that reads the result saves ``result.data``: autograd frees it like any saved
    tensor, but does not guard it. Its guard raises an error where the caller wrote, and here the
    result is computed again instead.
    """

    def __init__(self, result: Tensor) -> None:
        self._counter = result.detach()  # one count for both
        self._counter.data = result.new_empty(0)  # nothing is held, but it still counts
        self._version = version_of(self._counter)

    @property
    def happened(self) -> bool:
        """Whether anybody wrote."""
        return version_of(self._counter) != self._version


def any_rank(group: Group, happened: bool) -> bool:
    """Whether it happened on any rank, which may differ; collective."""
    if group.size == 1:
        return happened
    return bool(group.all_reduce(torch.tensor(int(happened)), "max"))


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``backward`` of a function that streams: gradients of gradients raise at once.

    Torch's ``once_differentiable`` raises when the second backward pass comes by, but
    ``torch.autograd.grad`` with named inputs never goes there: what is missing would be left out
    of the result without a word.

    Raises:
        NotSupportedError: in a backward pass with ``create_graph=True``.
    """

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotSupportedError(
                "create_graph: got True, expected False: gradients that streamed over the edges of "
                "a sharded graph cannot be differentiated again"
            )
        return backward(ctx, *grads)

    return checked
