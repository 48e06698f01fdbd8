"""Products of rows sampled at the edges of a :class:`Csc`: d_e = s_i <x_j, y_i>, e = (j -> i)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.csc import Csc
from sar.kernels.jit import array, in_parallel, kernel, prefetch_row
from sar.kernels.registry import implements


@kernel
def _edge_dots(
    first: Any, last: Any, rows: Any, indptr: Any, indices: Any, order: Any,
    x: Any, y: Any, scale: Any, out: Any,
) -> None:  # fmt: skip
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


# Whoever has rows of bfloat16 widens them before.
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
    in_parallel(lambda _, first, last: _edge_dots(first, last, *arrays), csc.indptr)
