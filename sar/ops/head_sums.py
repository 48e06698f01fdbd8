"""Scores of rows, a number a head: the product that they are the sums of is not made.

Note [Head sums]. Attention layers write ``(rows * vector).sum(-1)``, which makes a tensor of the
size of the rows to read it once; fresh memory is dear. Where the code of DGL's layers multiplies
rows by a parameter, the product waits until it is used (as in Note [Linear sums]), and if that is
the sum over the last axis, one pass over the rows gives it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from sar.kernels.attention import add_projected_grads, head_sums
from sar.ops.arriving import linear_of
from sar.ops.first_order import first_order
from sar.ops.reuse import is_plain

PRODUCTS = {torch.Tensor.mul, torch.Tensor.__mul__}
_DTYPES = (torch.float32, torch.float64)


@dataclass
class Product:
    """rows * vector, which ``out`` [n, H, D] is to hold."""

    out: Tensor
    rows: Tensor
    vector: Tensor
    is_done: bool = False
    is_added: bool = False  # up, without being computed

    @classmethod
    def of(cls, rows: Tensor, vector: Tensor) -> Product:
        return cls(rows.new_empty(rows.shape), rows, vector)

    def compute(self) -> None:
        """Fill ``out``, unless it is."""
        if not self.is_done:
            _Product.apply(self.out, self.rows, self.vector)
            self.is_done = True

    def sums(self) -> Tensor:
        """[n, H] sums of the last axis."""
        self.is_added = True
        return HeadSums.apply(self.rows, self.vector)


def can_wait(rows: Any, vector: Any) -> bool:
    """Whether it is a matrix for each of some rows, times a parameter like one of them."""
    return (
        type(rows) is Tensor
        and type(vector) is Parameter
        and rows.dim() == 3
        and tuple(vector.shape) in (tuple(rows.shape[1:]), (1, *rows.shape[1:]))
        and rows.dtype in _DTYPES
        and rows.device.type == "cpu"
        and (vector.dtype, vector.device) == (rows.dtype, rows.device)
        and all(is_plain(t) and t.is_contiguous() for t in (rows, vector))
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_autocast_enabled(rows.device.type)
    )


def is_sum_of_last(args: tuple, kwargs: dict) -> bool:
    """Whether a sum, called like that, is over the last of three axes and drops it."""
    return args[1:] in ((-1,), (2,)) and not kwargs or len(args) == 1 and kwargs in _LAST


_LAST = ({"dim": -1}, {"dim": 2})


class HeadSums(Function):
    """s_h = <a_h, row_h>.

    ======  ===============  ============================================
    tensor  shape            owner and lifetime
    ======  ===============  ============================================
    row     [n, H, D]        this rank; saved (an input), unless it is x W^T + b of an x without
                             gradient that is no wider: then x is, and copies of W and b
    a       [1, H, D], H, D  replicated; saved (a parameter)
    s       [n, H]           this rank; not saved
    ======  ===============  ============================================

    Backward with g = ds: drow_h = g_h a_h; da_h = the sum of g_h row_h.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vector: Tensor) -> Tensor:
        linear = linear_of(rows)
        if linear is not None and linear.rows.shape[1] > vector.numel():
            linear = None
        ctx.save_for_backward(rows if linear is None else linear.rows, vector)
        ctx.weights = None if linear is None else linear.weights()
        ctx.set_materialize_grads(False)
        return head_sums(rows.detach(), vector.detach())

    @staticmethod
    @first_order
    def backward(ctx: Any, dsums: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if dsums is None:  # who read the scores has passed their gradient on
            return None, None
        rows, vector = ctx.saved_tensors
        if ctx.weights is not None:
            rows = F.linear(rows, *ctx.weights).view(len(rows), *vector.shape[-2:])
        drows = torch.zeros_like(rows)
        drows_flat, rows_flat = (part.view(len(rows), vector.numel()) for part in (drows, rows))
        grads, vectors = [dsums.contiguous()], [vector.view(-1)]
        (dvector,) = add_projected_grads(drows_flat, rows_flat, grads, vectors)
        return drows, dvector.to(vector.dtype).view_as(vector)


class _Product(Function):
    """out = rows * a, where ``out`` was; drows = dout * a, da = the sum of dout * rows."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, rows: Tensor, vector: Tensor) -> Tensor:
        ctx.save_for_backward(rows, vector)
        ctx.mark_dirty(out)
        return torch.mul(rows, vector, out=out)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor, Tensor]:
        rows, vector = ctx.saved_tensors
        return None, dout * vector, (dout * rows).sum(0).view_as(vector)
