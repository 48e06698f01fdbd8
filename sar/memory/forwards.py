"""What stands before the forward passes of modules, and how it gets there and away."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn


class Forward:
    """Stands before a module's own forward; hooks of the module run outside of it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inner: Any = None  # another replacement, ours or somebody's

    @property
    def own(self) -> Callable:
        """The module's own forward, as its class has it now."""
        if self.inner is not None:
            return self.inner
        return partial(type(self.module).forward, self.module)


def replace(module: nn.Module, forward: Forward) -> None:
    """Put ``forward`` before what the module does now."""
    forward.inner = module.__dict__.get("forward")
    module.forward = forward  # type: ignore


def reset(modules: Iterable[nn.Module]) -> None:
    """Take away what :func:`replace` has put there."""
    for module in modules:
        while isinstance(forward := module.__dict__.get("forward"), Forward):
            del module.__dict__["forward"]
            if forward.inner is not None:
                module.forward = forward.inner
