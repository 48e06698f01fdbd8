"""Functions that write into an edge tensor, recorded as what they compute."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar.errors import SarError

# In-place functions, recorded as what they compute and bound to the same Python object.
_IN_PLACE = {
    Tensor.__iadd__: operator.add,
    Tensor.__isub__: operator.sub,
    Tensor.__imul__: operator.mul,
    Tensor.__itruediv__: operator.truediv,
}


class CannotRecord(SarError):
    """A function whose result is not one row per edge."""


def is_in_place(func: Callable) -> bool:
    """Whether a torch function writes into its first argument, as its name tells."""
    name = getattr(func, "__name__", "")
    return func is Tensor.__setitem__ or (name.endswith("_") and not name.endswith("__"))


def functional(func: Callable, args: Any, kwargs: dict[str, Any]) -> tuple[Callable, dict] | None:
    """What computes the values that a function writes, and its options; ``None``: it writes none.

    Raises :class:`CannotRecord`.
    """
    if kwargs.get("inplace"):
        return func, {**kwargs, "inplace": False}
    if func in _IN_PLACE:
        return _IN_PLACE[func], kwargs
    if func is Tensor.__setitem__:
        mask = args[1]
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            return _filled, kwargs
        raise CannotRecord("it writes rows")
    if not is_in_place(func):
        return None
    name = func.__name__[:-1]
    if name in _WRITES:
        return _WRITES[name], kwargs
    for where in (Tensor, torch, torch.nn.functional):
        if hasattr(where, name):
            return getattr(where, name), kwargs
    raise CannotRecord("it writes in place")


def _written(x: Tensor, value: Any) -> Tensor:
    """``x`` after all its elements were set to ``value``, which broadcasts."""
    return torch.where(torch.ones_like(x, dtype=torch.bool), value, x).to(x.dtype)


_WRITES: dict[str, Callable] = {
    "zero": torch.zeros_like,
    "fill": _written,
    "copy": _written,
}


def _filled(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """``x`` [e, ...] after ``x[mask] = value``, for one value and a mask of rows or elements."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError("it writes several values")
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - mask.dim())), value, x).to(x.dtype)
