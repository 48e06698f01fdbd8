"""Tensors that a message function uses besides its arguments: how they are found and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor


class Recording(Protocol):
    """Notes, while it is entered, which tensors functions use; may be entered several times."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: Any) -> Any: ...

    def tensors(self) -> list[Tensor]:
        """The tensors found, those known before first, in the order in which they were used."""


class Captures(Protocol):
    """Finds the tensors that a function captures, and replaces them by aliases."""

    def record(self, known: Iterable[Tensor] = ()) -> Recording:
        """Entered around calls of the function in forward; ``known`` are found already."""

    def replace(
        self, captures: Sequence[Tensor], aliases: Sequence[Tensor]
    ) -> AbstractContextManager:
        """Entered around a call in backward, which then uses the aliases instead."""


class _Nothing(nullcontext):
    def tensors(self) -> list[Tensor]:
        return []


class NoCaptures:
    """Captures of a function that uses its arguments alone; ``ValueError`` for any tensor."""

    def record(self, known: Iterable[Tensor] = ()) -> Recording:
        self._refuse(known)
        return _Nothing()

    def replace(
        self, captures: Sequence[Tensor], aliases: Sequence[Tensor]
    ) -> AbstractContextManager:
        self._refuse(captures)
        return nullcontext()

    @staticmethod
    def _refuse(tensors: Iterable[Tensor]) -> None:
        if count := len(list(tensors)):  # their gradients would be missing
            raise ValueError(f"captures: got {count} tensors and nobody who replaces them")


def leaves_of(outputs: list[Tensor]) -> Iterator[Tensor]:
    """Leaf tensors that the autograd graph of ``outputs`` ends in."""
    todo = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def detached_leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    """An alias without history that collects its own gradient when ``needs_grad``."""
    alias = tensor.detach()
    if needs_grad and (alias.is_floating_point() or alias.is_complex()):
        alias.requires_grad_(True)
    return alias
