"""Naming who asked for something that a sharded graph does not have."""

from __future__ import annotations

import sys
from types import FrameType

import torch

from sar.errors import NotSupportedError


class UnsupportedMember(NotSupportedError, AttributeError):
    """A member of DGLGraph that a sharded graph does not offer."""


def calling_layer() -> str | None:
    """Class name of the innermost module whose code is running, or ``None``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            return type(owner).__name__
        frame = frame.f_back
    return None


def not_supported(problem: str) -> NotSupportedError:
    """An error that begins with the layer whose code asked for it."""
    layer = calling_layer()
    return NotSupportedError(f"{layer}: {problem}" if layer else problem)


def called_from(module: str) -> bool:
    """True when code of ``module`` is among the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
