"""Keywords that the original spells with an underscore in front."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NAMES = ("rank", "world_size", "comm_device")


def with_old_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function``, which is also called with ``_rank``, ``_world_size`` and ``_comm_device``."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _R:
        for name in _NAMES:
            if f"_{name}" in kwargs:
                if name in kwargs:
                    raise TypeError(f"{name}: got it twice, as {name} and as _{name}")
                kwargs[name] = kwargs.pop(f"_{name}")
        return function(*args, **kwargs)

    return call
