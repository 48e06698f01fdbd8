"""Whose code calls the library, and who looks at what it computes."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.nn import Linear, Module
from torch.nn.modules import module as torch_module

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def layer_of_dgl() -> Any:
    """The layer of ``dgl.nn`` whose code calls the library; ``None``: somebody else does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and module_of(frame).startswith(("sar.", "contextlib")):
        frame = frame.f_back
    if frame is None or not module_of(frame).startswith("dgl.nn."):
        return None
    return frame.f_locals.get("self")


def is_linear(part: Any) -> bool:
    """Whether it is a linear layer of torch with torch's code, not somebody's own."""
    return type(part) is Linear and "forward" not in part.__dict__


def module_of(frame: FrameType) -> str:
    """The name of the module whose code runs there."""
    name: str = frame.f_globals.get("__name__", "")
    return name


def has_hooks(layer: Module) -> bool:
    """Whether anybody looks at what goes into the parts of a layer, or comes out of them."""
    hooks = [getattr(torch_module, f"_global_{kind}", ()) for kind in _HOOKS]
    for part in layer.modules():
        if part is not layer:
            hooks += [getattr(part, f"_{kind}", ()) for kind in _HOOKS]
    return any(map(len, hooks))
