"""Sums of gathered rows over the edges of a :class:`Csc`: out_i = s_i sum_e w_e t_j x_j."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.kernels.csc import Csc

# A block's result is scaled and added while it is in cache, and stays below the size from which
# the allocator maps fresh pages for it.
_BLOCK_BYTES = 256 << 10


@dataclass(frozen=True)
class Factors:
    """What multiplies a message besides 1.

    Attributes:
        edge: [*] per edge, addressed by ``csc.order``; the dtype of the gathered rows.
        row: [csc.num_rows] per result row, wide dtype.
        gathered: [*] per gathered row, addressed by ``csc.indices``; the dtype of those rows.
    """

    edge: Tensor | None = None
    row: Tensor | None = None
    gathered: Tensor | None = None


NO_FACTORS = Factors()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of ``dtype`` are accumulated in across blocks and rounds."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def spmm(csc: Csc, x: Tensor, factors: Factors = NO_FACTORS) -> Tensor:
    """[csc.num_rows, width] in the wide dtype of ``x``; rows without edges are 0.

    Args:
        x: [*, width] contiguous floating point rows that ``csc.indices`` address.
    """
    wide = wide_dtype(x.dtype)
    if csc.rows is not None:
        out = x.new_zeros((csc.num_rows, x.shape[1]), dtype=wide)
        spmm_add(out, csc, x, factors)
        return out
    if factors.row is None and wide == x.dtype:
        return _segment_sum(csc, x, factors, 0, csc.num_segments)
    out = x.new_empty((csc.num_rows, x.shape[1]), dtype=wide)
    for start, stop in _row_blocks(csc, x):
        out[start:stop] = _scaled_sum(csc, x, factors, start, stop)
    return out


def spmm_add(out: Tensor, csc: Csc, x: Tensor, factors: Factors = NO_FACTORS) -> None:
    """Add the sums to ``out`` ([csc.num_rows, width], wide dtype) in place."""
    for start, stop in _row_blocks(csc, x):
        sums = _scaled_sum(csc, x, factors, start, stop)
        if csc.rows is None:
            out[start:stop].add_(sums)
        else:  # int64 indices add twice as fast as int32
            out.index_add_(0, csc.rows[start:stop].long(), sums)


def spmm_into(out: Tensor, csc: Csc, x: Tensor, factors: Factors = NO_FACTORS) -> None:
    """Overwrite ``out`` ([csc.num_segments, width]) with one sum per segment."""
    for start, stop in _row_blocks(csc, x):
        out[start:stop].copy_(_scaled_sum(csc, x, factors, start, stop))


def _row_blocks(csc: Csc, x: Tensor) -> Iterator[tuple[int, int]]:
    row_bytes = max(1, x.shape[1] * wide_dtype(x.dtype).itemsize)
    step, segments = max(16, _BLOCK_BYTES // row_bytes), csc.num_segments
    for start in range(0, segments, step):
        yield start, min(start + step, segments)


def _scaled_sum(csc: Csc, x: Tensor, factors: Factors, start: int, stop: int) -> Tensor:
    """[stop - start, width] sums of segments [start, stop) with the rows' factors, wide dtype."""
    sums = _segment_sum(csc, x, factors, start, stop)
    if sums.dtype != wide_dtype(x.dtype):
        sums = sums.to(wide_dtype(x.dtype))
    if factors.row is None:
        return sums
    span = slice(start, stop)
    scale = factors.row[span] if csc.rows is None else factors.row.index_select(0, csc.rows[span])
    return sums.mul_(scale.unsqueeze(1))


def _segment_sum(csc: Csc, x: Tensor, factors: Factors, start: int, stop: int) -> Tensor:
    """[stop - start, width] sums of segments [start, stop), in the dtype of ``x``."""
    whole = start == 0 and stop == csc.num_segments  # reading bounds costs microseconds
    low, high = (0, csc.num_edges) if whole else (int(csc.indptr[start]), int(csc.indptr[stop]))
    if low == high or x.shape[1] == 0:
        return x.new_zeros((stop - start, x.shape[1]))
    offsets = csc.indptr if whole else csc.indptr[start : stop + 1]
    if low:
        offsets = offsets - low
    return F.embedding_bag(
        csc.indices if whole else csc.indices[low:high],
        x,
        offsets,
        mode="sum",
        include_last_offset=True,
        per_sample_weights=_edge_weights(csc, factors, low, high),
    )


def _edge_weights(csc: Csc, factors: Factors, low: int, high: int) -> Tensor | None:
    weights = None
    if factors.edge is not None:
        span = slice(low, high)
        edge, order = factors.edge, csc.order
        weights = edge[span] if order is None else edge.index_select(0, order[span])
    if factors.gathered is not None:
        scale = factors.gathered.index_select(0, csc.indices[low:high])
        weights = scale if weights is None else weights * scale
    return weights
