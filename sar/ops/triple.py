"""Scores of typed edges from three rows each, with all gradients in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.kernels.registry import has
from sar.kernels.triple import triple_grads, triples


def triple_product(x: Tensor, w: Tensor, y: Tensor, kinds: Tensor) -> Tensor:
    """s_e = sum_d x_ed w_t(e)d y_ed.

    Args:
        x, y: [e, D] rows of both ends.
        w: [T, D] a row for each type.
        kinds: int64 [e] types t, from 0 to T - 1.

    Returns:
        [e].
    """
    # Torch functions, so that parameters are seen and replaced: Note [Captured tensors].
    rows = [tensor.contiguous() for tensor in (x, w, y)]
    if _fits(rows, kinds):
        return _TripleProduct.apply(*rows, kinds)
    return (x * w.index_select(0, kinds) * y).sum(1)


def _fits(rows: list[Tensor], kinds: Tensor) -> bool:
    """One dtype and device that there is a kernel for, equal shapes, types in range."""
    x, w, y = rows
    return (
        has("triples", x.device, x.dtype)
        and x.dtype == w.dtype == y.dtype
        and all(tensor.device == x.device for tensor in (w, y, kinds))
        and x.dim() == 2
        and x.shape == y.shape
        and x.shape[1] == w.shape[1]
        and kinds.dtype == torch.int64
        and kinds.shape == (len(x),)
        and len(x) > 0
        and 0 <= int(kinds.min()) <= int(kinds.max()) < len(w)
    )


class _TripleProduct(Function):
    """s_e = sum_d x_ed w_t(e)d y_ed.

    =======  ===========  ==============================
    tensor   shape        owner and lifetime
    =======  ===========  ==============================
    x, y     [e, D]       this rank; saved (inputs)
    w        [T, D]       every rank; saved (an input)
    t        [e]          this rank; saved (an input)
    s        [e]          this rank; not saved
    =======  ===========  ==============================

    Backward, in one pass over x and y: dx_e = ds_e w_t y_e, dy_e = ds_e w_t x_e,
    dw_t = sum over the edges of type t of ds_e x_e y_e. Torch's operators make it where the
    gradient is to be differentiated itself.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, y: Tensor, kinds: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, y, kinds)
        return triples(x, w, y, kinds)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, w, y, kinds = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return *triple_grads(x, w, y, kinds, dout.contiguous()), None
        scaled, rows = dout.unsqueeze(1), w.index_select(0, kinds)
        dw = torch.zeros_like(w).index_add(0, kinds, scaled * x * y)
        return scaled * rows * y, dw, scaled * rows * x, None
