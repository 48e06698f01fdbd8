"""Relu in place, remembered for backward by a bit for each number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from sar.kernels import has
from sar.kernels.nonzero import mask, rectify
from sar.ops.saving import compute_once, is_innermost

_RELUS = (F.relu, torch.relu, Tensor.relu)


def is_relu(function: Any) -> bool:
    return function in _RELUS or type(function) is nn.ReLU


def relu(x: Tensor) -> Tensor:
    """``torch.relu``, whose zeros get no gradient from other ranks under ``Policy(zeros="skip")``.

    Takes a bit a number until backward, in place of the result.

    Args:
        x: any shape, floating point.

    Returns:
        max(x, 0), which may be written into.
    """
    return rectified(x.clone())


def rectified(x: Tensor) -> Tensor:
    """max(x, 0) in place of ``x``, which nobody else may read or have saved. Neither is saved here,
    so that whoever reads the result may write over it."""
    return _Rectify.apply(x) if x.requires_grad and torch.is_grad_enabled() else x.relu_()


class _Rectify(Function):
    """y = max(x, 0), where x was.

    ======  ==========  ======================================================
    tensor  shape       owner and lifetime
    ======  ==========  ======================================================
    x       any         this rank; not saved. Becomes y
    marks   1 / number  this rank; noted: which numbers of y are not zero. A bit where there is a
                        kernel, else a bool
    dy      any         this rank; not written into
    ======  ==========  ======================================================

    dx = dy where marked, else 0. A repeated forward pass (:mod:`sar.ops.saving`) that saves
    nothing behind it ends before x is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.drops_zeros = True  # see sar.stream.zeros
        ctx.mark_dirty(x)
        ctx.by_bits = x.is_contiguous() and has("rectify", x.device, x.dtype)
        marks = rectify(x) if ctx.by_bits else ~(x.relu_() <= 0)
        ctx.marks = compute_once(lambda: marks) if is_innermost() else marks
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        if not ctx.by_bits:
            return dy * ctx.marks
        if torch.is_grad_enabled():  # this pass is differentiated, too
            kept = torch.ones(dy.shape, dtype=dy.dtype)
            mask(kept, ctx.marks)
            return dy * kept
        dx = dy.clone(memory_format=torch.contiguous_format)
        mask(dx, ctx.marks)
        return dx
