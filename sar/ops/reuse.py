"""Results that are written where what they are made of was, when nobody can see the difference.

Note [Temporaries]. In ``self.fc_self(h) + h_neigh`` the first term is gone after the addition, and
yet there are three tensors of its size for a moment, which is when a layer needs most memory. A
tensor may be written into when nothing but this expression refers to it, which the interpreter's
count of references tells, and when the operation that made it did not save it for backward.
The same goes for ``relu(self.fc(h))``. Where the count cannot be read, or is larger for any
reason, the result is a tensor of its own.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

ADDS = {torch.Tensor.add, torch.Tensor.__add__}
# Linear layers save what they read, not their result; ours may have written into it themselves.
_OURS = {"_ValuedBackward"}
_MAKERS = {"AddmmBackward0", "MmBackward0", *_OURS}


def is_temporary(terms: tuple) -> bool:
    """Whether nobody but the sum of two ``terms``, as a torch function mode gets them, has the
    first, which a linear layer made; both are alike. See Note [Temporaries]."""
    return _fits(*terms) and references(terms[0]) == _references_of_a_temporary()


def is_temporary_of(func: Any, args: tuple) -> bool:
    """The same of the first argument of a torch function, such as relu, as a mode gets it."""
    return _fits(args[0], args[0]) and references(args[0]) == _references_in(func)


def is_plain(x: Tensor) -> bool:
    """Whether it lies in memory of its own as it seems to."""
    return x.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_made_here(x: Tensor) -> bool:
    """Whether torch or this library computed it: a function of somebody's own may have returned
    memory that others have, such as an array's, which no count of references tells."""
    node: Any = x.grad_fn
    of_python = isinstance(node, BackwardCFunction)
    return not of_python or node._forward_cls.__module__.startswith("sar.")


def references(x: Tensor) -> tuple[int, ...]:
    """To a tensor, the interpreter's and torch's own, and to its memory; nothing if unknown."""
    count = getattr(sys, "getrefcount", None)
    shared = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or shared is None:
        return ()
    owners: Any = x
    return count(x), owners._use_count(), shared(x.untyped_storage()._cdata)


def _fits(a: Any, b: Any) -> bool:
    return (
        type(a) is Tensor
        and type(b) is Tensor
        and (maker := type(a.grad_fn).__name__) in _MAKERS
        and is_made_here(a)  # by no function of somebody's own that has the name of ours
        and torch.is_grad_enabled()
        and is_plain(a)
        and a._base is None
        and (a._version == 0 or maker in _OURS)
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    )


class _Count(TorchFunctionMode):
    """Notes the references to the first argument of the first of some functions."""

    def __init__(self, functions: set[Any]) -> None:
        super().__init__()
        self.functions = functions
        self.found: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.functions and not self.found:
            self.found = references(args[0])
        return func(*args, **(kwargs or {}))


@cache
def _references_of_a_temporary() -> tuple[int, ...] | None:
    """What :func:`references` says where nobody else has the tensor; ``None``: it cannot tell."""
    one = torch.ones(1, 1)
    with _Count(ADDS) as temporary:
        torch.mm(one, one) + one
    with _Count(ADDS) as named:
        held = torch.mm(one, one)
        held + one
    return temporary.found if temporary.found < named.found else None


@cache
def _references_in(func: Any) -> tuple[int, ...] | None:
    one = torch.ones(1, 1)
    with _Count({func}) as temporary:
        func(torch.mm(one, one))
    with _Count({func}) as named:
        held = torch.mm(one, one)
        func(held)
    return temporary.found if temporary.found < named.found else None
