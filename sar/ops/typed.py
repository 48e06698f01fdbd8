"""Rows times the matrix of their type, and scores of typed edges: one step with one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import without_modes
from sar.kernels import has
from sar.kernels.sddmm import triple_grads, triples
from sar.ops.saving import first_order


def typed_product(a: Tensor, b: Tensor, lengths: Sequence[int]) -> Tensor:
    """c_e = a_e B_t for the rows e of each type t: [n, D']. ``a`` [n, D] has rows of a type after
    each other, types ascending, ``lengths`` of each; ``b`` [T, D, D'] a matrix for each type."""
    return _TypedProduct.apply(a, b, lengths)


def _segments(lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(type, its rows) of the types that have rows."""
    start = 0
    for kind, length in enumerate(lengths):
        if length:
            yield kind, slice(start, start + length)
        start += length


class _TypedProduct(Function):
    """c_e = a_e B_t(e).

    =======  ==============  ==================================================
    tensor   shape           owner and lifetime
    =======  ==============  ==================================================
    a        [n, D]          this rank, one block; saved (an input)
    B        [T, D, D']      every rank; saved (an input)
    c        [n, D']         this rank, one block; not saved
    =======  ==============  ==================================================

    Backward: da_e = dc_e B_t^T, dB_t = sum over the rows of t of a_e^T dc_e. Left to autograd, a
    product per type would make a gradient of the size of all matrices for each type.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, lengths: Sequence[int]) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.lengths = lengths
        out = a.new_empty((len(a), b.shape[2]))
        with without_modes():  # modes that record have seen the call
            for kind, rows in _segments(lengths):
                torch.mm(a[rows], b[kind], out=out[rows])
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        wants_a, wants_b, _ = ctx.needs_input_grad
        da = torch.empty_like(a) if wants_a else None
        db = torch.zeros_like(b) if wants_b else None
        for kind, rows in _segments(ctx.lengths):
            if da is not None:
                torch.mm(dout[rows], b[kind].T, out=da[rows])
            if db is not None:
                torch.mm(a[rows].T, dout[rows], out=db[kind])
        return da, db, None


def triple_product(x: Tensor, w: Tensor, y: Tensor, kinds: Tensor) -> Tensor:
    """s_e = sum_d x_ed w_t(e)d y_ed: [e]. ``x, y`` [e, D] are rows of both ends, ``w`` [T, D] has a
    row for each type, ``kinds`` int64 [e] are the types t, from 0 to T - 1."""
    # Torch functions, so that parameters are seen and replaced: Note [Captured tensors].
    rows = [tensor.contiguous() for tensor in (x, w, y)]
    if _fits(rows, kinds):
        return _TripleProduct.apply(*rows, kinds)
    return (x * w.index_select(0, kinds) * y).sum(1)


def _fits(rows: list[Tensor], kinds: Tensor) -> bool:
    """Whether there is a kernel for these: one dtype and device, equal shapes, types in range."""
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
