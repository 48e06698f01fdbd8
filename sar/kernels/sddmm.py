"""Products of rows at edges: of two, d_e = s_i <x_j, y_i> at the edges e = (j -> i) of a
:class:`Csc`, and of three, s_e = sum_d x_ed w_t(e)d y_ed."""

# Compiled functions have no annotations: numba compiles them for the types they are called with.
# mypy: allow-untyped-defs

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sar.kernels.csc import Csc
from sar.kernels.device import implements
from sar.kernels.jit import array, in_parallel, kernel, prefetch_row


@kernel
def _edge_dots(first, last, rows, indptr, indices, order, x, y, scale, out):
    width = np.uint64(x.shape[1])
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        factor = scale[i] if len(scale) else out.dtype.type(1)
        for e in range(indptr[segment], indptr[segment + 1]):
            prefetch_row(x, indices, e, 0, width)
            j, total = indices[e], out.dtype.type(0)
            for d in range(width):
                total += x[j, d] * y[i, d]
            out[order[e]] = factor * total


# Callers widen rows of bfloat16 before.
@implements("edge_dots", "cpu", torch.float32, torch.float64, torch.bfloat16)
def edge_dots(out: Tensor, csc: Csc, x: Tensor, y: Tensor, scale: Tensor | None = None) -> None:
    """Write the products of one shard's edges at their positions.

    Args:
        out: [num_edges] float32 or float64 on the CPU, of all shards.
        csc: edges by destination, with ``order``.
        x, y: [*, width] contiguous rows of the sources and the destinations, the dtype of ``out``.
        scale: [*] of each destination, the dtype of ``out``; ``None`` is 1.
    """
    if csc.order is None:
        raise ValueError("csc: got no order, expected each edge's position for its product")
    factors = out[:0] if scale is None else scale
    arrays = *csc.arrays, *map(array, (x, y, factors, out))
    in_parallel(lambda _, first, last: _edge_dots(first, last, *arrays), *csc.ids)


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
    """Sums [e] over rows x, y [e, D] and row ``kinds`` [e] of w [T, D]; contiguous, one dtype."""
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
