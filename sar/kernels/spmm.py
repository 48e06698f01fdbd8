"""Sums of gathered rows over the edges of a :class:`Csc`: out[i] = sum_e w_e x[indices_e]."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.kernels.csc import Csc

_BLOCK_BYTES = 1 << 20  # a block's result is added while it is still in cache


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are accumulated in across blocks and rounds."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def spmm(csc: Csc, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """[csc.num_rows, width] in the wide dtype of ``x``; rows without edges are 0.

    Args:
        x: [*, width] contiguous floating point rows that ``csc.indices`` address.
        weight: [*] per edge, addressed by ``csc.order``; same dtype as ``x``.
    """
    if csc.rows is None:
        return _segment_sum(csc, x, weight, 0, csc.num_segments).to(wide_dtype(x.dtype))
    out = x.new_zeros((csc.num_rows, x.shape[1]), dtype=wide_dtype(x.dtype))
    spmm_add(out, csc, x, weight)
    return out


def spmm_add(out: Tensor, csc: Csc, x: Tensor, weight: Tensor | None = None) -> None:
    """Add the sums to ``out`` ([csc.num_rows, width], wide dtype) in place."""
    for start, stop in _row_blocks(csc, x):
        sums = _segment_sum(csc, x, weight, start, stop).to(out.dtype)
        if csc.rows is None:
            out[start:stop].add_(sums)
        else:
            out.index_add_(0, csc.rows[start:stop], sums)


def spmm_into(out: Tensor, csc: Csc, x: Tensor, weight: Tensor | None = None) -> None:
    """Overwrite ``out`` ([csc.num_segments, width]) with one sum per segment."""
    for start, stop in _row_blocks(csc, x):
        out[start:stop].copy_(_segment_sum(csc, x, weight, start, stop))


def _row_blocks(csc: Csc, x: Tensor) -> Iterator[tuple[int, int]]:
    row_bytes = max(1, x.shape[1] * x.element_size())
    step = max(64, _BLOCK_BYTES // row_bytes)
    for start in range(0, csc.num_segments, step):
        yield start, min(start + step, csc.num_segments)


def _segment_sum(csc: Csc, x: Tensor, weight: Tensor | None, start: int, stop: int) -> Tensor:
    """[stop - start, width] sums of segments [start, stop), in the dtype of ``x``."""
    low, high = int(csc.indptr[start]), int(csc.indptr[stop])
    if low == high or x.shape[1] == 0:
        return x.new_zeros((stop - start, x.shape[1]))
    offsets = csc.indptr[start : stop + 1]
    if low:
        offsets = offsets - low
    if weight is not None:
        edge = slice(low, high)
        weight = weight[edge] if csc.order is None else weight.index_select(0, csc.order[edge])
    return F.embedding_bag(
        csc.indices[low:high],
        x,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=weight,
    )
