"""Maximum and minimum over edges, block by block, with a tie-break that no cut can change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.csc import Csc
from sar.kernels.device import KERNELS, implements
from sar.kernels.jit import (
    array,
    flat,
    in_parallel,
    inlined,
    kernel,
    prefetch_row,
    rows_in_parallel,
)

_NO_EDGE = torch.iinfo(torch.int32).max
_COMPILED = (torch.float32, torch.float64)


class ExtremeReducer:
    """Running max or min per row and feature, and the edge it came from.

    Ties go to the smallest edge position; NaN wins over every number, as in ``torch.amax``. The
    result is the same for any order and any split of the edges into blocks.

    Attributes:
        value: [num_rows, width] the extreme so far; where ``edge`` is ``NO_EDGE``, less than all.
        edge: int32 [num_rows, width] position of the edge it came from.
    """

    NO_EDGE = _NO_EDGE

    def __init__(self, largest: bool, num_rows: int, like: Tensor) -> None:
        width = like.shape[1]
        self.largest = largest
        self.value = like.new_full((num_rows, width), -math.inf if largest else math.inf)
        self.edge = torch.full((num_rows, width), _NO_EDGE, dtype=torch.int32, device=like.device)

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        """Take a block of edges: rows int32 [e], positions int32 [e], values [e, width]."""
        if values.numel() == 0:
            return
        run = KERNELS.get(("extremes", values.device.type, values.dtype))
        if run:
            run(self, row, position, values)
            return
        rows, segment = torch.unique(row.long(), return_inverse=True)
        width, which = values.shape[1], torch.arange(len(rows), device=rows.device)
        # The extreme so far competes as one more edge of each row.
        values = torch.cat([values, self.value.index_select(0, rows)])
        edges = torch.cat(
            [position.unsqueeze(1).expand(-1, width), self.edge.index_select(0, rows)]
        )
        slot = torch.cat([segment, which]).unsqueeze(1).expand_as(values)
        best = self._scatter(values, slot, len(rows))
        rival = best.gather(0, slot)
        wins = (values == rival) | (torch.isnan(values) & torch.isnan(rival))
        found = edges.new_full(best.shape, _NO_EDGE)
        found.scatter_reduce_(0, slot, edges.masked_fill(~wins, _NO_EDGE), "amin")
        self.value.index_copy_(0, rows, best)
        self.edge.index_copy_(0, rows, found)

    def add_shard(self, csc: Csc, x: Tensor) -> None:
        """Take the edges of ``csc``, with order, out of rows of ``x``: contiguous [*, width], that
        there is a kernel ``extremes`` for."""
        ends, extremes = csc.arrays, (array(self.value), array(self.edge))
        rows, sign = array(x), array(x).dtype.type(self.largest * 2 - 1)
        in_parallel(
            lambda _, first, last: _extremes_of_rows(first, last, *ends, rows, *extremes, sign),
            *csc.ids,
        )

    def result(self) -> Tensor:
        """The extremes [num_rows, width]; 0 where a row has no edge."""
        return self.value.masked_fill_(self.edge == _NO_EDGE, 0)

    def _scatter(self, values: Tensor, slot: Tensor, num_rows: int) -> Tensor:
        best = values.new_zeros((num_rows, values.shape[1]))
        how = "amax" if self.largest else "amin"
        best.scatter_reduce_(0, slot, values, how, include_self=False)
        nans = torch.isnan(values)
        if bool(nans.any()):  # not every backend's scatter carries them
            seen = torch.zeros_like(best, dtype=torch.int32)
            seen.scatter_reduce_(0, slot, nans.int(), "amax")
            best.masked_fill_(seen.bool(), float("nan"))
        return best


# The loops over whole shards below are filed with it: who brings another device brings them, too.
@implements("extremes", "cpu", *_COMPILED)
def _add_compiled(found: ExtremeReducer, row: Tensor, position: Tensor, values: Tensor) -> None:
    values = values if values.stride(1) == 1 else values.contiguous()
    rows = flat(values), np.uint64(values.stride(0))
    ends, sign = (array(row), array(position)), array(values).dtype.type(found.largest * 2 - 1)
    extremes = array(found.value), array(found.edge)
    rows_in_parallel(
        lambda _, first, last: _keep_extremes(first, last, *ends, *rows, *extremes, sign),
        values.shape[1],
        values.numel(),
    )


def winners_only(edge: Tensor, grad: Tensor, row: Tensor, position: Tensor) -> Tensor:
    """Gradients [e, width] of a block of edges: of the numbers that they won, else 0. ``edge`` is
    that of :class:`ExtremeReducer`, ``grad`` [num_rows, width] the gradient of its result."""
    run = KERNELS.get(("winners_only", grad.device.type, grad.dtype))
    if run and len(row):
        return run(edge, grad, row, position)
    won = edge.index_select(0, row) == position.unsqueeze(1)
    return grad.index_select(0, row).masked_fill_(~won, 0)


@implements("winners_only", "cpu", *_COMPILED)
def _winners_compiled(edge: Tensor, grad: Tensor, row: Tensor, position: Tensor) -> Tensor:
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    out = grad.new_empty((len(row), grad.shape[1]))
    rows = flat(grad), np.uint64(grad.stride(0)), array(out)
    rows_in_parallel(
        lambda _, first, last: _winners(
            first, last, array(row), array(position), array(edge), *rows
        ),
        len(row),
        out.numel(),
    )
    return out


def add_to_winners(target: Tensor, csc: Csc, edge: Tensor, grad: Tensor) -> None:
    """target[source] += the numbers of ``grad`` that the edges of ``csc``, with order, won.

    ``target`` [*, width] is contiguous, of the rows that the edges start in; there must be a kernel
    ``extremes`` for ``grad`` [num_rows, width].
    """
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows = flat(grad), np.uint64(grad.stride(0)), array(edge), array(target)
    for ids in csc.ids:
        array(ids)  # who follows what is read is told
    rows_in_parallel(
        lambda _, first, last: _add_to_winners(first, last, *csc.arrays, *rows),
        target.shape[1],
        csc.num_edges * target.shape[1],
    )


@inlined
def _keep(value: Any, edge: Any, i: Any, d: Any, new: Any, p: Any, sign: Any) -> None:
    """Compare one number of edge p with the extreme so far."""
    old, winner = value[i, d], edge[i, d]
    better = (sign * new > sign * old) | ((new != new) & (old == old))
    tied = (new == old) | ((new != new) & (old != old))
    wins = better | (tied & (p < winner))
    value[i, d] = new if wins else old
    edge[i, d] = p if wins else winner


@kernel
def _extremes_of_rows(
    first: int, last: int, rows: Any, indptr: Any, indices: Any, order: Any, x: Any, value: Any,
    edge: Any, sign: Any,
) -> None:  # fmt: skip
    width = np.uint64(x.shape[1])
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        for e in range(indptr[segment], indptr[segment + 1]):
            prefetch_row(x, indices, e, 0, width)
            j, p = indices[e], order[e]
            for d in range(width):
                _keep(value, edge, i, d, x[j, d], p, sign)


@kernel
def _add_to_winners(
    first: int, last: int, rows: Any, indptr: Any, indices: Any, order: Any, grad: Any,
    stride: Any, edge: Any, target: Any,
) -> None:  # fmt: skip
    """Columns [first, last) of all edges; other columns are another thread's."""
    low, width, zero = np.uint64(first), np.uint64(last - first), grad.dtype.type(0)
    for segment in range(len(indptr) - 1):
        i = rows[segment] if len(rows) else segment
        start = np.uint64(i) * stride + low
        for e in range(indptr[segment], indptr[segment + 1]):
            prefetch_row(target, indices, e, low, width)
            j, p = indices[e], order[e]
            for d in range(width):
                target[j, low + d] += grad[start + d] if edge[i, low + d] == p else zero


@kernel
def _keep_extremes(
    first: int, last: int, row: Any, position: Any, values: Any, stride: Any, value: Any,
    edge: Any, sign: Any,
) -> None:  # fmt: skip
    """Columns [first, last) of all edges; other columns are another thread's."""
    low, width = np.uint64(first), np.uint64(last - first)
    for e in range(len(row)):
        i, p = row[e], position[e]
        start = np.uint64(e) * stride + low
        for d in range(width):
            _keep(value, edge, i, low + d, values[start + d], p, sign)


@kernel
def _winners(
    first: int, last: int, row: Any, position: Any, edge: Any, grad: Any, stride: Any, out: Any
) -> None:
    width, zero = np.uint64(out.shape[1]), grad.dtype.type(0)
    for e in range(first, last):
        i, p = row[e], position[e]
        start = np.uint64(i) * stride
        for d in range(width):
            out[e, d] = grad[start + d] if edge[i, d] == p else zero
