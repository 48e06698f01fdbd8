"""Finding the tensors that a user's function reads besides its arguments.

Note [Captured tensors]
A message function may use parameters, or tensors computed from them, that no argument names. In
forward the function runs without grad under a torch-function mode that records every tensor that
asks for a gradient. In backward each is replaced by a detached alias: the gradients of all blocks
are summed per alias and handed to autograd once. Without the alias a captured ``T = f(W)`` would
be differentiated through in every block, and the second time would fail.
What the mode cannot see (inputs of a custom ``autograd.Function``) is found once by walking the
autograd graph of a probe to its leaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sar._private import tree_map


class RecordCaptures(TorchFunctionMode):
    """Collects tensors with ``requires_grad`` that torch functions take, behind ``known`` ones."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._found: dict[int, Tensor] = {id(tensor): tensor for tensor in known}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                self._found.setdefault(id(tensor), tensor)
        return func(*args, **(kwargs or {}))

    def tensors(self) -> list[Tensor]:
        return list(self._found.values())


class ReplaceCaptures(TorchFunctionMode):
    """Puts aliases in place of captured tensors wherever a torch function takes them."""

    def __init__(self, captures: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
        super().__init__()
        self._alias = {id(c): alias for c, alias in zip(captures, aliases, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(id(tensor) in self._alias for tensor in tensors_in((args, kwargs))):
            args, kwargs = tree_map(self._swap, (args, kwargs))
        return func(*args, **kwargs)

    def _swap(self, value: Any) -> Any:
        return self._alias.get(id(value), value) if isinstance(value, Tensor) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among a function's arguments; a fifth of the time of torch's ``tree_map``."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


# Finds and replaces what passes through torch functions: a sar.ops.Captures.
TORCH_CAPTURES: Any = SimpleNamespace(record=RecordCaptures, replace=ReplaceCaptures)
