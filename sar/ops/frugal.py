"""Torch functions of layers that are computed again, with fewer tensors at their worst moment.

Sums are written where a term was (Note [Temporaries]); gradients of relu and elu are written where
their inputs were (Note [Overwritten]), and their values are not computed again (Note [Saved
first]). The results are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from sar.kernels import relu
from sar.ops.overwrite import is_last_gradient, may_overwrite
from sar.ops.reuse import ADDS, is_made_here, is_plain, is_temporary, is_temporary_of
from sar.ops.saving import is_innermost, once, valued

_aten = torch.ops.aten


class Frugal(TorchFunctionMode):
    """Inside, layers take less memory; around the forward passes of a recomputed layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and len(args) == 2 and not kwargs and is_temporary(args):
            return args[0].add_(args[1])
        if _is_known_activation(func, args, kwargs):
            if _GRADIENTS[func] is _relu_gradient and _fits_bits(args[0]):
                in_place = is_temporary_of(func, args)  # before there is another reference
                return _Relu.apply(args[0], in_place)
            return _activated(func, args[0])
        if _is_relu_in_place(func, args, kwargs) and _fits_bits(args[0]):
            return _Relu.apply(args[0], True)
        return func(*args, **kwargs)


def _relu_gradient(dout: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.threshold_backward.grad_input(dout, x, 0, grad_input=out)


def _elu_gradient(dout: Tensor, x: Tensor, out: Tensor) -> Tensor:
    return _aten.elu_backward.grad_input(dout, 1, 1, 1, False, x, grad_input=out)


_GRADIENTS: dict[Any, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    F.relu: _relu_gradient,
    torch.relu: _relu_gradient,
    Tensor.relu: _relu_gradient,
    F.elu: _elu_gradient,
}


def _is_known_activation(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether :func:`_activated` stands for a call of a torch function, which autograd records."""
    return (
        func in _GRADIENTS
        and len(args) == 1
        and all(name in _USUAL and _USUAL[name] == value for name, value in kwargs.items())
        and _is_recorded(args[0])
    )


_USUAL = {"inplace": False, "alpha": 1.0}


def _is_relu_in_place(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for the relu of a tensor where that is, in memory of its own."""
    by_name = func in (torch.relu_, Tensor.relu_) and not kwargs
    return (
        (by_name or (func is F.relu and kwargs == {"inplace": True}))
        and len(args) == 1
        and _is_recorded(args[0])
        and args[0].grad_fn is not None
        and args[0]._base is None
    )


def _is_recorded(x: Any) -> bool:
    """Whether autograd records what is computed of ``x``, which is as it seems to be."""
    return (
        type(x) is Tensor
        and is_plain(x)
        and is_made_here(x)
        and x.is_floating_point()
        and x.requires_grad
        and torch.is_grad_enabled()
    )


def _activated(func: Any, x: Tensor) -> Tensor:
    """``func(x)``; its gradient is written where ``x`` was, see Note [Overwritten]."""
    saved = _Activation.apply(x, _GRADIENTS[func])
    of_relu = _GRADIENTS[func] is _relu_gradient
    return valued(saved, lambda: func(x.detach()), of_relu=of_relu)


def _fits_bits(x: Tensor) -> bool:
    """Whether a bit a number can stand for ``x``, and whoever repeats this pass finds it.

    Alike on all ranks, whose repeated passes have to end at the same place.
    """
    return x.is_cpu and x.dtype in relu.DTYPES and is_innermost()


class _Relu(Function):
    """y = max(x, 0), where x was if nobody else has it or the caller wants it there.

    ======  ============  ======================================================
    tensor  shape         owner and lifetime
    ======  ============  ======================================================
    x       any           this rank; not saved. Becomes y if it is a temporary, or asked to
    bits    1 / number    this rank; noted: which numbers of y are not zero
    dy      any           this rank; becomes dx if nobody else has it
    ======  ============  ======================================================

    dx = dy where a bit is set, else 0. A repeated forward pass (Note [Repeated forward]) that saves
    nothing behind it ends before x is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_place: bool) -> Tensor:
        ctx.of_relu = True
        fits = in_place and x.is_contiguous()
        y = x if fits else x.clone(memory_format=torch.contiguous_format)
        bits = relu.rectify(y)
        if in_place:
            y = x if fits else x.copy_(y)
            ctx.mark_dirty(x)
        ctx.bits = once(lambda: bits)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # this pass is differentiated, too
            kept = torch.ones(dy.shape, dtype=dy.dtype)
            relu.mask(kept, ctx.bits)
            return torch.where(kept.bool(), dy, dy.new_zeros(())), None
        dx = dy if is_last_gradient(dy) else dy.clone(memory_format=torch.contiguous_format)
        relu.mask(dx, ctx.bits)
        return dx.detach(), None


class _Activation(Function):
    """x as it is, with the gradient of an activation y; see Note [Saved first].

    ======  =====  ======================================================
    tensor  shape  owner and lifetime
    ======  =====  ======================================================
    x       any    this rank; saved. Becomes dx if nobody else has it
    ======  =====  ======================================================

    dx = y'(x) * dy.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x, None)
        ctx.gradient = gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        out = x if may_overwrite(x, dy) else torch.empty_like(x)
        return ctx.gradient(dy, x, out).detach(), None
