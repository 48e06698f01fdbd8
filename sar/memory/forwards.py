"""Replacements of modules' forward passes, and the arguments of a recomputed layer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from sar._private import frees_graph, tree_flatten, tree_unflatten


class Forward:
    """A replacement of a module's forward; hooks of the module run outside of it."""

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
    """Make ``forward`` the module's forward; it holds what stood there."""
    forward.inner = module.__dict__.get("forward")
    module.forward = forward  # type: ignore


def reset(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`replace`."""
    for module in modules:
        while isinstance(forward := module.__dict__.get("forward"), Forward):
            del module.__dict__["forward"]
            if forward.inner is not None:
                module.forward = forward.inner


class LayerInputs:
    """The arguments of a layer's forward pass, dropped when backward has taken them."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.first: tuple[tuple, dict[str, Any]] | None = (args, kwargs)
        leaves, self.spec = tree_flatten((args, kwargs))
        self.tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        start = torch.empty(0, requires_grad=True)
        # In torch 2.11 saved tensors are freed with the result of their node.
        self.saved: Any = _Saved.apply(start, *(leaves[i] for i in self.tensors))

    def take(self) -> tuple[tuple, dict[str, Any]]:
        """The arguments, for the forward pass and then each backward pass; dropped with the last.
        Raises ``RuntimeError`` after a backward pass that did not keep the graph."""
        if self.first is not None:
            given, self.first = self.first, None
            return given
        if self.saved is None:
            raise RuntimeError(
                "backward: a recomputed layer has let its inputs go in a backward pass before; "
                "expected retain_graph=True there"
            )
        leaves = list(self.others)
        for i, tensor in zip(self.tensors, self.saved.grad_fn.saved_tensors, strict=True):
            leaves[i] = tensor
        if frees_graph():
            self.saved = None
        return tree_unflatten(leaves, self.spec)


class _Saved(Function):
    """An empty result of tensors, which autograd saves, watches and passes through hooks."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return start.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return dout, *(None for _ in ctx.needs_input_grad[1:])
