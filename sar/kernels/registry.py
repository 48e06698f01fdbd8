"""Which implementation an operation has: by its name, the device and the type of the numbers.

An implementation is filed where it is written, by :func:`implements`. What computes an operation
looks it up in :data:`KERNELS`, once a call, and does it in torch's own operators where there is
none. What has no such second form asks :func:`has` before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])
KERNELS: dict[tuple[str, str, torch.dtype], Callable[..., Any]] = {}


def implements(operation: str, device: str, *dtypes: torch.dtype) -> Callable[[F], F]:
    """Decorator of what computes ``operation`` on a type of device, for numbers of ``dtypes``."""

    def file(function: F) -> F:
        for dtype in dtypes:
            KERNELS[operation, device, dtype] = function
        has.cache_clear()
        return function

    return file


@cache
def has(operation: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an implementation is filed."""
    return (operation, device.type, dtype) in KERNELS
