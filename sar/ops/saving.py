"""Questions of an operation about its pass: are saved tensors kept, moved or recomputed?

A layer that is recomputed runs its forward pass again in backward. Results that are small, or
come from other ranks, are noted the first time and taken from the notes then: they neither travel
nor count twice.

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
    :func:`compute_once` adds its results to ``notes``, or, with ``again``, takes them from
    there."""
    before = _state.notes, _state.hooked, _state.hooks
    _state.notes, _state.hooked, _state.hooks = notes, True, innermost_saving_hooks()
    if notes is not None:
        notes.next = 0 if again else None
    try:
        yield
    finally:
        _state.notes, _state.hooked, _state.hooks = before


@contextmanager
def observed(see: Callable[[Tensor], None]) -> Iterator[None]:
    """Around a forward pass, which runs as without it: ``see`` gets each tensor that is saved. No
    backward pass may follow."""

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
    """The ``see`` of :func:`observed`, for hooks that would hide saved tensors from it."""
    return _state.see


def is_innermost() -> bool:
    """Whether no code inside of this forward pass has set hooks of saved tensors of its own."""
    return _state.hooks == innermost_saving_hooks()


def is_recomputed() -> bool:
    """Whether this forward pass notes or repeats its results, and no inner part does so itself."""
    return _state.notes is not None and is_innermost()


def owns_saved() -> bool:
    """Whether an operation's saved tensors are seen by itself alone."""
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
    """Whether memory counts more than time, as saved tensors are moved away or computed again:
    attention has one round of rows in flight, not two, and no buffers stay between layers."""
    return _state.hooked


def valued(saved: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """The value of ``compute``, with the gradient of ``saved``, which a function returned instead.
    The function has saved what its backward pass reads, by Note [Saved first]."""
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
    """Tells whether a result was written into, without keeping its memory alive.

    A backward pass that reads the result saves ``result.data``: autograd frees it like any saved
    tensor, but does not guard it. Its guard would raise an error where the caller wrote; here the
    result is computed again instead.
    """

    def __init__(self, result: Tensor) -> None:
        self._counter = result.detach()  # one count for both
        self._counter.data = result.new_empty(0)  # nothing is held, but it still counts
        self._version = version_of(self._counter)

    @property
    def happened(self) -> bool:
        return version_of(self._counter) != self._version


def any_rank(group: Group, happened: bool) -> bool:
    """Whether it happened on any rank; collective."""
    if group.size == 1:
        return happened
    return bool(group.all_reduce(torch.tensor(int(happened)), "max"))


def anybody_wrote(group: Group, happened: bool) -> bool:
    """:func:`any_rank`; with a table without a collective, as it tells ranks that differ."""
    return any_rank(group, happened) if group.table is None else happened


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
