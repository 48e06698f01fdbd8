"""Linear layers of what an activation made, which is made again in backward instead of kept.

Note [Made again]. Activations such as elu save what they read, and the linear layer behind one
saves what it made: two tensors of the size of a layer's rows, of which one gives the other in one
pass. Where DGL's code applies an ``nn.Linear`` to the result of such an activation of torch, only
what the activation saved is kept. The numbers are those of torch, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar.ops.saving import saves_as_is

Make = Callable[[Tensor], Tensor]


def remade_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """rows @ weight^T + bias without saving ``rows``, by Note [Made again]; ``None``: not here.

    Args:
        rows: [n, width_in].
        weight: [width, width_in].
        bias: [width] or none.
    """
    find = _MAKERS.get(type(rows.grad_fn).__name__)
    if find is None or not torch.is_grad_enabled() or not saves_as_is():
        return None
    if rows._base is not None or rows._version:
        return None
    try:
        source: Tensor = rows.grad_fn._saved_self  # type: ignore[union-attr]
    except RuntimeError:  # written into since
        return None
    return _RemadeLinear.apply(rows, weight, bias, source, find(rows.grad_fn))


def _elu(node: Any) -> Make:
    constants = node._saved_alpha, node._saved_scale, node._saved_input_scale
    return lambda x: torch.ops.aten.elu(x, *constants)


_MAKERS: dict[str, Callable[[Any], Make]] = {
    "EluBackward0": _elu,  # and selu
    "CeluBackward0": lambda node: partial(F.celu, alpha=node._saved_alpha),
    "GeluBackward0": lambda node: partial(F.gelu, approximate=node._saved_approximate),
    "LeakyReluBackward0": lambda node: partial(
        F.leaky_relu, negative_slope=node._saved_negative_slope
    ),
    "SiluBackward0": lambda node: F.silu,
    "SoftplusBackward0": lambda node: partial(
        F.softplus, beta=node._saved_beta, threshold=node._saved_threshold
    ),
}


class _RemadeLinear(Function):
    """out = x @ W^T + b with x = f(z).

    ======  ==================  =============================================================
    tensor  shape               owner and lifetime
    ======  ==================  =============================================================
    x       [n, width_in]       this rank; not saved
    z       [n, width_in]       this rank; saved, as f does
    W       [width, width_in]   replicated; saved (a parameter)
    b       [width] or none     replicated
    ======  ==================  =============================================================

    With D = dout and x made again: dW = D^T @ x; db = the sum of the rows of D; dx = D @ W, written
    where x was made.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, source: Tensor, make: Make
    ) -> Tensor:
        ctx.save_for_backward(source, weight)
        ctx.make = make
        return F.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        asks_rows, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        source, weight = ctx.saved_tensors
        rows = ctx.make(source) if asks_weight else None
        dweight = None if rows is None else dout.t() @ rows
        drows = None
        if asks_rows:
            place = None if torch.is_grad_enabled() else rows
            drows = torch.mm(dout, weight, out=place) if place is not None else dout @ weight
        return drows, dweight, dout.sum(0) if asks_bias else None, None, None
