"""Rows times the matrix of their type, types side by side, as one step with one gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import without_modes
from sar.ops.first_order import first_order


def typed_product(a: Tensor, b: Tensor, lengths: Sequence[int]) -> Tensor:
    """c_e = a_e B_t for the rows e of each type t.

    Args:
        a: [n, D] rows; those of a type follow each other, types ascending.
        b: [T, D, D'] a matrix for each type.
        lengths: rows of each type, n together.

    Returns:
        [n, D'].
    """
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
