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


def unsupported_member(name: str) -> UnsupportedMember:
    """An error that begins with the layer whose code asked for it."""
    return UnsupportedMember(_of_layer(f"a sharded graph has no member {name!r}"))


def not_supported(problem: str) -> NotSupportedError:
    """An error that begins with the layer whose code asked for it."""
    return NotSupportedError(_of_layer(problem))


def _of_layer(problem: str) -> str:
    layer = calling_layer()
    return f"{layer}: {problem}" if layer else problem


def check_module_of(etype: tuple[str, str, str], etypes: list[tuple[str, str, str]]) -> None:
    """Name both sides when a ``HeteroGraphConv`` slices a relation that it has no module for.

    DGL would raise a ``KeyError`` with the relation's name alone. Like DGL, relations whose source
    type has no input are passed over, and modules that the graph has no relation for do not matter.
    """
    local = sys._getframe(2).f_locals
    modules = getattr(local.get("self"), "mod_dict", None)
    if modules is None or etype in modules or etype[1] in modules:
        return
    if etype[0] in local.get("src_inputs", local.get("inputs", ())):
        raise ValueError(
            f"{type(local['self']).__name__}: got modules for {sorted(map(str, modules))}, "
            f"none for {etype}; the graph has {etypes}"
        )
