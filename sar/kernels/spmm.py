"""Sums of rows: gathered over the edges of a :class:`Csc`, out_i = s_i sum_e w_e t_j x_j, or added
into rows by their index.

Rows of float32 and float64 on the CPU are summed by a compiled loop, on CUDA by a product with a
sparse matrix, all others by torch's ``embedding_bag``, block by block. Loop and blocks take the
edges of a segment in the same order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sar.kernels.csc import Csc
from sar.kernels.device import DEVICE_CHUNK_BYTES, KERNELS, implements, is_host
from sar.kernels.jit import (
    LINE,
    array,
    flat,
    in_parallel,
    inlined,
    kernel,
    prefetch_byte,
    prefetch_row,
    wide_dtype,
)

# A block's result is scaled and added while it is in cache, and stays below the size from which
# the allocator maps fresh pages for it.
_BLOCK_BYTES = 256 << 10
_FEW_ADDED = 1 << 13  # numbers; torch adds fewer before a compiled loop has begun
_ROWS_AHEAD = 8  # rows between asking for one and adding into it
_NONE = {dtype: torch.empty(0, dtype=dtype).numpy() for dtype in (torch.float32, torch.float64)}


@dataclass(frozen=True)
class Factors:
    """Factors of a message, besides 1.

    Attributes:
        edge: [*] per edge, addressed by ``csc.order``; the dtype of the gathered rows.
        row: [csc.num_rows] per result row, wide dtype.
        gathered: [*] per gathered row, addressed by ``csc.indices``; the dtype of those rows.
    """

    edge: Tensor | None = None
    row: Tensor | None = None
    gathered: Tensor | None = None


NO_FACTORS = Factors()


def spmm(csc: Csc, x: Tensor, factors: Factors = NO_FACTORS, out: Tensor | None = None) -> Tensor:
    """[csc.num_rows, width] in the wide dtype of ``x``; rows without edges are 0.

    Args:
        x: [*, width] contiguous floating point rows that ``csc.indices`` address.
        out: memory for the result.
    """
    if out is None:
        out = x.new_empty((csc.num_rows, x.shape[1]), dtype=wide_dtype(x.dtype))
    if csc.rows is not None:
        out.zero_()
    _reduce(out, csc, x, factors, csc.rows, add=False)
    return out


def spmm_add(out: Tensor, csc: Csc, x: Tensor, factors: Factors = NO_FACTORS) -> None:
    """Add the sums to ``out`` ([csc.num_rows, width], wide dtype) in place."""
    _reduce(out, csc, x, factors, csc.rows, add=True)


def spmm_into(out: Tensor, csc: Csc, x: Tensor, factors: Factors = NO_FACTORS) -> None:
    """Overwrite ``out`` ([csc.num_segments, width]) with one sum per segment."""
    if factors.row is not None and csc.rows is not None:
        factors = replace(factors, row=factors.row.index_select(0, csc.rows))
    _reduce(out, csc, x, factors, None, add=False)


def _reduce(
    out: Tensor, csc: Csc, x: Tensor, factors: Factors, rows: Tensor | None, add: bool
) -> None:
    """Add sums to rows ``rows`` of ``out`` (``None``: 0, 1, ..), or write over these."""
    run = KERNELS.get(("sum", x.device.type, x.dtype), _reduce_by_blocks)
    run(out, csc, x, factors, rows, add)


def _reduce_by_blocks(
    out: Tensor, csc: Csc, x: Tensor, factors: Factors, rows: Tensor | None, add: bool
) -> None:
    for start, stop in _row_blocks(csc, x):
        sums = _scaled_sum(csc, x, factors, rows, start, stop)
        if rows is None:
            _write_sums(out[start:stop], sums, None, add)
        else:
            _write_sums(out, sums, rows[start:stop], add)


@implements("sum", "cpu", *_NONE)
def _reduce_compiled(
    out: Tensor, csc: Csc, x: Tensor, factors: Factors, rows: Tensor | None, add: bool
) -> None:
    if not out.is_contiguous():
        _reduce_by_blocks(out, csc, x, factors, rows, add)
        return
    none, ends = _NONE[x.dtype], csc.arrays
    if rows is None and len(ends.rows):  # a row of the result for each segment
        ends = ends._replace(rows=ends.rows[:0])
    edge = none if factors.edge is None else array(factors.edge)
    gathered = none if factors.gathered is None else array(factors.gathered)
    scale = none if factors.row is None else array(factors.row)
    arrays = array(x), edge, gathered, scale, array(out)

    def part(_: int, first: int, last: int) -> None:
        sums = np.empty(x.shape[1], none.dtype)
        _sum_rows(first, last, *ends, *arrays, sums, add)

    in_parallel(part, *csc.ids)


@inlined
def _factor(edge: Any, order: Any, gathered: Any, e: int, j: int, one: Any) -> Any:
    factor = one
    if len(edge):
        factor = edge[order[e]] if len(order) else edge[e]
    if len(gathered):
        factor *= gathered[j]
    return factor


@inlined
def _sum_few(
    low: Any, high: Any, i: Any, indices: Any, order: Any, x: Any, edge: Any, gathered: Any,
    factor: Any, out: Any, add: Any,
) -> None:  # fmt: skip
    """Sum a segment of up to two edges straight into row i: half of those of a remote shard."""
    width, one = np.uint64(x.shape[1]), x.dtype.type(1)
    if high - low == 2:
        prefetch_row(x, indices, low, 0, width)
        prefetch_row(x, indices, low + 1, 0, width)
        j0, j1 = indices[low], indices[low + 1]
        a0 = _factor(edge, order, gathered, low, j0, one)
        a1 = _factor(edge, order, gathered, low + 1, j1, one)
        for d in range(width):
            few = factor * (a0 * x[j0, d] + a1 * x[j1, d])
            out[i, d] = out[i, d] + few if add else few
    elif high - low == 1:
        prefetch_row(x, indices, low, 0, width)
        j = indices[low]
        a = _factor(edge, order, gathered, low, j, one)
        for d in range(width):
            few = factor * (a * x[j, d])
            out[i, d] = out[i, d] + few if add else few
    elif not add:
        for d in range(width):
            out[i, d] = 0


@kernel
def _sum_rows(
    first: Any, last: Any, rows: Any, indptr: Any, indices: Any, order: Any,
    x: Any, edge: Any, gathered: Any, scale: Any, out: Any, sums: Any, add: Any,
) -> None:  # fmt: skip
    """Sum segments, four edges a pass; ``sums`` [width] keeps a segment's sum."""
    width, one = np.uint64(x.shape[1]), x.dtype.type(1)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        low, high = indptr[segment], indptr[segment + 1]
        factor = scale[i] if len(scale) else one
        if high - low <= 2:
            _sum_few(low, high, i, indices, order, x, edge, gathered, factor, out, add)
            continue
        fours = high - (high - low) % 4
        for d in range(width):
            sums[d] = 0
        for e in range(low, fours, 4):
            for later in range(4):
                prefetch_row(x, indices, e + later, 0, width)
            j0, j1, j2, j3 = indices[e], indices[e + 1], indices[e + 2], indices[e + 3]
            a0 = _factor(edge, order, gathered, e, j0, one)
            a1 = _factor(edge, order, gathered, e + 1, j1, one)
            a2 = _factor(edge, order, gathered, e + 2, j2, one)
            a3 = _factor(edge, order, gathered, e + 3, j3, one)
            for d in range(width):
                sums[d] += a0 * x[j0, d] + a1 * x[j1, d] + a2 * x[j2, d] + a3 * x[j3, d]
        for e in range(fours, high):
            prefetch_row(x, indices, e, 0, width)
            j = indices[e]
            a = _factor(edge, order, gathered, e, j, one)
            for d in range(width):
                sums[d] += a * x[j, d]
        if add:
            for d in range(width):
                out[i, d] += factor * sums[d]
        else:
            for d in range(width):
                out[i, d] = factor * sums[d]


def _row_blocks(csc: Csc, x: Tensor) -> Iterator[tuple[int, int]]:
    row_bytes = max(1, x.shape[1] * wide_dtype(x.dtype).itemsize)
    block_bytes = _BLOCK_BYTES if is_host(x.device) else DEVICE_CHUNK_BYTES
    step, segments = max(16, block_bytes // row_bytes), csc.num_segments
    for start in range(0, segments, step):
        yield start, min(start + step, segments)


def _scaled_sum(
    csc: Csc, x: Tensor, factors: Factors, rows: Tensor | None, start: int, stop: int
) -> Tensor:
    """Sums [stop - start, width] of segments [start, stop), times the rows' factors, wide dtype."""
    sums = _segment_sum(csc, x, factors, start, stop)
    if sums.dtype != wide_dtype(x.dtype):
        sums = sums.to(wide_dtype(x.dtype))
    if factors.row is None:
        return sums
    span = slice(start, stop)
    scale = factors.row[span] if rows is None else factors.row.index_select(0, rows[span])
    return sums.mul_(scale.unsqueeze(1))


def _segment_sum(csc: Csc, x: Tensor, factors: Factors, start: int, stop: int) -> Tensor:
    """Sums [stop - start, width] of segments [start, stop), in the dtype of ``x``."""
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
        per_sample_weights=edge_weights(csc, factors, low, high),
    )


def edge_weights(csc: Csc, factors: Factors, low: int, high: int) -> Tensor | None:
    """The factors of the rows of edges [low, high), in the order of ``csc``; ``None`` is 1."""
    weights = None
    if factors.edge is not None:
        span = slice(low, high)
        edge, order = factors.edge, csc.order
        weights = edge[span] if order is None else edge.index_select(0, order[span])
    if factors.gathered is not None:
        scale = factors.gathered.index_select(0, csc.indices[low:high])
        weights = scale if weights is None else weights * scale
    return weights


@implements("sum", "cuda", torch.float32, torch.float64)
def sum_by_matrix(
    out: Tensor, csc: Csc, x: Tensor, factors: Factors, rows: Tensor | None, add: bool
) -> None:
    """:func:`_reduce` by a product with a sparse matrix.

    On CUDA that is cuSPARSE: a sum over 32 M edges of rows of 128 numbers takes a seventeenth of
    the time of ``embedding_bag`` in blocks. It runs on the processor as well, where tests compare
    it. Where the rows are all, and nothing multiplies what is added, no other tensor of rows is
    made.
    """
    if not csc.num_edges or not x.shape[1]:
        _write_sums(out, x.new_zeros(()).expand(csc.num_segments, x.shape[1]), rows, add)
        return
    matrix, scale = _matrix(csc, x, factors), factors.row
    if rows is None and out.is_contiguous() and not (add and scale is not None):
        torch.addmm(out, matrix, x, beta=int(add), out=out)  # beta 0: what is there is not read
        if scale is not None:
            out.mul_(scale.unsqueeze(1))
        return
    sums = torch.sparse.mm(matrix, x)
    if scale is not None:
        sums.mul_((scale if rows is None else scale.index_select(0, rows)).unsqueeze(1))
    _write_sums(out, sums, rows, add)


def _matrix(csc: Csc, x: Tensor, factors: Factors) -> Tensor:
    """The sparse matrix [segments, rows of x] of edge weights; a view of the edges' own arrays."""
    _quiet_beta_warning()
    weights = edge_weights(csc, factors, 0, csc.num_edges)
    if weights is None:
        weights = x.new_ones(csc.num_edges)
    size = csc.num_segments, x.shape[0]
    return torch.sparse_csr_tensor(csc.indptr, csc.indices, weights, size, check_invariants=False)


def _write_sums(out: Tensor, sums: Tensor, rows: Tensor | None, add: bool) -> None:
    if rows is None:
        out.add_(sums) if add else out.copy_(sums)
    elif add:  # int64 indices add twice as fast as int32
        out.index_add_(0, rows.long(), sums)
    else:
        out.index_copy_(0, rows.long(), sums)


@cache
def _quiet_beta_warning() -> None:
    """Torch warns once a process that such matrices are in beta: not the user of a layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ends = torch.zeros(2, dtype=torch.int32)
        torch.sparse_csr_tensor(ends, ends[:0], torch.zeros(0), (1, 1))


def add_rows(target: Tensor, idx: Tensor, rows: Tensor) -> None:
    """target[idx] += rows, an index as often as it comes.

    Torch's ``index_add_`` takes half as long again, and six times as long where one of the two is
    some columns of a wider tensor.

    Args:
        target: [R, width] floating point.
        idx: integer [n] of rows in [0, R), which is not checked.
        rows: [n, width] of the dtype of ``target``.
    """
    run = KERNELS.get(("add_rows", rows.device.type, rows.dtype))
    if run and rows.numel() >= _FEW_ADDED and target.stride(1) == rows.stride(1) == 1:
        run(target, idx, rows)
    else:  # int64 indices add twice as fast as int32
        target.index_add_(0, idx.long(), rows)


@implements("add_rows", "cpu", torch.float32, torch.float64)
def _add_compiled(target: Tensor, idx: Tensor, rows: Tensor) -> None:
    strides = np.uint64(target.stride(0)), np.uint64(rows.stride(0))
    _add(flat(target), array(idx), flat(rows), *strides, np.uint64(rows.shape[1]))


@kernel
def _add(target: Any, idx: Any, rows: Any, target_stride: Any, stride: Any, width: Any) -> None:
    for n in range(len(idx)):
        if n + _ROWS_AHEAD < len(idx):
            start = np.uint64(idx[n + _ROWS_AHEAD]) * target_stride * target.itemsize
            for byte in range(start, start + width * target.itemsize, LINE):
                prefetch_byte(target, byte)
        to, low = np.uint64(idx[n]) * target_stride, np.uint64(n) * stride
        for d in range(width):
            target[to + d] += rows[low + d]
