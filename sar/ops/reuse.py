"""Sums that are written where one of their terms was, when nobody can see the difference.

Note [Temporaries]. In ``self.fc_self(h) + h_neigh`` the first term is gone after the addition, and
yet there are three tensors of its size for a moment, which is when a layer needs most memory. A
tensor may be written into when nothing but this expression refers to it, which the interpreter's
count of references tells, and when the operation that made it did not save it for backward.
Where the count cannot be read, or is larger for any reason, the sum is a tensor of its own.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ADDS = {torch.Tensor.add, torch.Tensor.__add__}
_MAKERS = {"AddmmBackward0", "MmBackward0"}  # linear layers save what they read, not their result


class ReuseTemporaries(TorchFunctionMode):
    """Inside, ``linear(x) + y`` takes the memory of ``linear(x)``; see Note [Temporaries]."""

    def __init__(self) -> None:
        super().__init__()
        self._temporary = _references_of_a_temporary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADDS and len(args) == 2 and not kwargs and _fits(*args):
            if _references(args) == self._temporary:
                return args[0].add_(args[1])
        return func(*args, **(kwargs or {}))


def _fits(a: Any, b: Any) -> bool:
    return (
        type(a) is Tensor
        and type(b) is Tensor
        and type(a.grad_fn).__name__ in _MAKERS
        and torch.is_grad_enabled()
        and a.layout == torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(a)
        and a._base is None
        and a._version == 0
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    )


def _references(args: tuple) -> tuple[int, ...]:
    """To the first argument: the interpreter's and torch's own; tensors that share its memory."""
    count = getattr(sys, "getrefcount", None)
    shared = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or shared is None:
        return ()
    storage = args[0].untyped_storage()._cdata
    return count(args[0]), args[0]._use_count(), shared(storage)


class _Count(TorchFunctionMode):
    found: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADDS and len(args) == 2 and not kwargs:
            self.found = _references(args)
        return func(*args, **(kwargs or {}))


@cache
def _references_of_a_temporary() -> tuple[int, ...] | None:
    """What :func:`_references` says where nobody else has the tensor; ``None``: it cannot tell."""
    one = torch.ones(1, 1)
    with _Count() as temporary:
        torch.mm(one, one) + one
    with _Count() as named:
        held = torch.mm(one, one)
        held + one
    return temporary.found if temporary.found < named.found else None
