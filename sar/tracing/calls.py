"""Torch's functions as programs name them: one name for a function, a method and an operator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodWrapperType, WrapperDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions

# Names with other spellings; all others in the table below are spelled as they are named.
_SPELLINGS = {
    "add": ("add", "__add__", "__radd__"),
    "sub": ("sub", "subtract", "__sub__"),
    "mul": ("mul", "multiply", "__mul__", "__rmul__"),
    "div": ("div", "divide", "true_divide", "__truediv__"),
    "neg": ("neg", "negative", "__neg__"),
    "matmul": ("matmul", "__matmul__", "__rmatmul__"),
    "index": ("__getitem__",),
}

# Linear in their tensors together, without a number that is added.
SHAPED = {
    "view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "movedim", "t", "expand",
    "flatten", "unflatten", "contiguous", "clone", "index", "unbind", "chunk", "split", "select",
    "narrow", "tile", "repeat", "cat", "stack", "sum", "mean", "neg",
}  # fmt: skip
PRODUCTS = {"mul", "matmul", "bmm", "einsum", "linear"}
ARITHMETIC = {"add", "sub", "mul", "div", "sum", "unsqueeze"}
COPY_UNLESS_DENSE = {"contiguous", "flatten", "ravel", "reshape", "reshape_as"}
_OTHERS = {
    "leaky_relu", "softmax", "where", "max", "min", "amax", "amin", "any", "all", "var", "std",
}  # fmt: skip


def _named() -> dict[Callable, str]:
    names = {*SHAPED, *PRODUCTS, *ARITHMETIC, *COPY_UNLESS_DENSE, *_OTHERS, *_SPELLINGS}
    return {
        getattr(owner, spelling): name
        for name in names
        for spelling in _SPELLINGS.get(name, (name,))
        for owner in (torch, Tensor, F)
        if hasattr(owner, spelling)
    }


_NAMED = _named()


def name_of(function: Callable) -> str:
    """The name of a function in programs; empty where they do not know it."""
    return _NAMED.get(function, "")


def is_read(function: Callable) -> bool:
    """Whether a torch function reads an attribute."""
    return isinstance(function, MethodWrapperType) and function == function.__self__.__get__  # type: ignore[attr-defined]


def on_copy(function: Callable, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The result of a function that writes into its first argument, of which it gets a copy."""
    x = x.clone()
    function(x, *args, **kwargs)
    return x


def filled(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``x`` [e, ...] after ``x[mask] = value``, for one value and a mask of rows or elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError("it writes several values")
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), value, x).to(x.dtype)


@cache
def _known() -> frozenset[Callable]:
    torchs = get_overridable_functions().values()
    return frozenset([on_copy, filled, *(one for several in torchs for one in several)])


_COMPILED = {type(torch.add), type(Tensor.add), type(Tensor.__add__)}


def is_known(function: Callable) -> bool:
    """Whether arguments and torch's state alone decide what a function does: torch's, or ours."""
    if isinstance(function, (FunctionType, WrapperDescriptorType)):  # the latter: indexing
        return function in _known()
    return type(function) in _COMPILED
