"""Products of three rows summed over their columns, s_e = sum_d x_ed w_t(e)d y_ed."""

# Compiled functions have no annotations: numba compiles them for the types they are called with.
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sar.kernels.jit import array, kernel
from sar.kernels.registry import implements


@kernel
def _triples(x, w, y, kinds, out):
    width = np.uint64(x.shape[1])
    for e in range(len(out)):
        t, total = kinds[e], out.dtype.type(0)
        for d in range(width):
            total += x[e, d] * w[t, d] * y[e, d]
        out[e] = total


@kernel
def _triple_grads(x, w, y, kinds, dout, dx, dw, dy):
    width = np.uint64(x.shape[1])
    for e in range(len(dout)):
        t, g = kinds[e], dout[e]
        for d in range(width):
            a, b, c = x[e, d], g * w[t, d], y[e, d]
            dx[e, d] = b * c
            dy[e, d] = b * a
            dw[t, d] += g * a * c


@implements("triples", "cpu", torch.float32, torch.float64)
def triples(x: Tensor, w: Tensor, y: Tensor, kinds: Tensor) -> Tensor:
    """[e] sums of rows x and y [e, D] and row ``kinds`` [e] of w [T, D]; contiguous, one dtype."""
    out = x.new_empty(len(x))
    _triples(*map(array, (x, w, y, kinds, out)))
    return out


def triple_grads(
    x: Tensor, w: Tensor, y: Tensor, kinds: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and y from that of the sums [e]."""
    dx, dw, dy = torch.empty_like(x), torch.zeros_like(w), torch.empty_like(y)
    _triple_grads(*map(array, (x, w, y, kinds, dout, dx, dw, dy)))
    return dx, dw, dy
