"""Softmax-weighted sums over edges, scores and weights never stored: o_i = sum_e a_e v_j.

Per head h, with e = (j -> i): a_e = exp(z_e - m_i) / s_i, m_i = max_e z_e,
s_i = sum_e exp(z_e - m_i), and one of

* additive (arXiv 1710.10903): z_e = lrelu(k_j + q_i), k and q one number per head;
* mixed (arXiv 2105.14491): z_e = sum_d w_d lrelu(k_jd + q_id);
* dot (arXiv 1706.03762): z_e = c sum_d k_jd q_id.

Forward runs by destination and shard after shard: the largest score so far rescales what was
summed before. Backward of a shard is told m, 1 / s and delta_i = <do_i, o_i>, which is
sum_e a_e <do_i, v_j>, so that it needs no second pass over the edges:
dz_e = a_e (<do_i, v_j> - delta_i), dv_j = sum_e a_e do_i. Dropout multiplies a_e by a factor r_e
wherever v_j does, which delta contains already. m and s are kept apart, because m + log s would
round to the digits of m: a relative error of a_e of 1e-7 |m| in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.kernels import attention_loops as loops
from sar.kernels.csc import Csc
from sar.kernels.device import implements
from sar.kernels.jit import array, in_parallel, num_parts, rows_in_parallel


@dataclass(frozen=True)
class Scores:
    """How scores are computed.

    Attributes:
        kind: ``ADDITIVE``, ``MIXED`` or ``DOT`` of :mod:`sar.kernels.attention_loops`.
        width: width D of a head's value; keys and queries are as wide, or 1 for additive scores.
        slope: of lrelu for negative numbers; 1 is no activation.
        scale: c of dot products.
    """

    kind: int
    heads: int
    width: int
    slope: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Mask:
    """Dropout of attention weights, a function of edge and head: ``keys`` are integers [num_edges]
    by local edge position, ``seed`` is of this use of dropout, ``first`` is the first head."""

    keys: Tensor
    seed: int
    probability: float
    first: int = 0


@dataclass(frozen=True)
class Columns:
    """Columns ``offset ..`` of rows [R, stride], contiguous: packed halo rows or a whole tensor."""

    rows: Tensor
    offset: int = 0


class Normalizer(NamedTuple):
    """m and 1 / s, [n, H] each: weights are a = exp(z - largest) * inverse."""

    largest: Tensor
    inverse: Tensor


@dataclass
class Running:
    """The state of a forward pass: [n, H] largest score and sum of weights, [n, H * D] sums. The
    first shard has to have a segment for every row: it clears the sums before it adds."""

    largest: Tensor
    total: Tensor
    sums: Tensor
    begun: bool = False

    @staticmethod
    def start(num_rows: int, heads: int, width: int, like: Tensor) -> Running:
        """The state before the first edge; dtype and device of ``like``."""
        largest = like.new_full((num_rows, heads), -torch.inf)
        sums = like.new_empty((num_rows, heads * width))
        return Running(largest, torch.zeros_like(largest), sums)

    def finish(self) -> tuple[Tensor, Normalizer]:
        """out [n, H * D], and m and 1 / s, in the memory of the state. out is 0 in rows without
        edges, NaN where every score is -inf."""
        empty = self.total == 0
        self.total.masked_fill_((self.largest == -torch.inf) & ~empty, torch.nan)
        self.total.masked_fill_(empty, 1)
        rows, heads = self.total.shape
        by_head = self.sums.view(rows, heads, self.sums.shape[1] // heads)
        by_head.div_(self.total.unsqueeze(2))
        self.largest.masked_fill_(empty, 0)
        return self.sums, Normalizer(self.largest, self.total.reciprocal_())


@dataclass(frozen=True)
class Incoming:
    """Rows of destinations that backward reads: [n, H * D] do, [n, 3 H] m, 1 / s and delta.

    ``known`` is side by side, because an edge reads all of it; of additive scores [n, 4 H], queries
    first. ``offset`` is its first column; not 0 where both are one tensor that travelled.
    """

    dout: Tensor
    known: Tensor
    offset: int = 0

    @staticmethod
    def of(dout: Tensor, normalizer: Normalizer, delta: Tensor, *query: Tensor) -> Incoming:
        """Put ``delta`` [n, H], and the queries of additive scores, beside the normalizer."""
        return Incoming(dout, torch.cat([*query, *normalizer, delta], 1))


def deltas(dout: Tensor, out: Tensor, heads: int, bias: Tensor | None = None) -> Tensor:
    """delta_i = <do_i, o_i> per head, [n, H], of contiguous rows [n, H * D], out = o + ``bias``."""
    delta = _dots_of_heads(dout, out, heads)
    if bias is not None:
        delta -= head_sums(dout.view(len(dout), heads, bias.numel() // heads), bias)
    return delta


# For all of this file: who brings another device brings them all. Rows of bfloat16 are widened
# before.
@implements("attend", "cpu", torch.float32, torch.float64, torch.bfloat16)
def attend(
    csc: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    running: Running, mask: Mask | None,
) -> None:  # fmt: skip
    """Add one shard's edges to ``running``.

    Args:
        csc: edges by destination, with ``order`` when there is a mask.
        key, value: source rows; the same columns where a layer's keys are its values.
        query: [n, H] (additive) or [n, H * D] rows of the destinations.
        weight: [H * D] w of mixed scores, else of any shape.
    """
    dropped, ends = _dropout(csc, mask, query), csc.arrays[:3]
    arrays = *ends, *_numpy(key.rows, value.rows, query, weight.view(-1))
    state = _numpy(running.largest, running.total, running.sums)
    numbers, fresh = _numbers(scores, query), not running.begun
    if fresh and csc.rows is not None:
        raise ValueError("csc: got some rows, expected all of them in the first shard")

    def part(_: int, first: int, last: int) -> None:
        loops.attend(
            first, last, *arrays, key.offset, value.offset, *numbers, fresh, *state, *dropped,
            *_scratch(query, scores),
        )  # fmt: skip

    in_parallel(part, *csc.ids)
    running.begun = True


def attend_grad_additive(
    csr: Csc, scores: Scores, key: Columns, value: Columns, incoming: Incoming, dkey: Columns,
    dvalue: Columns, dquery: Tensor, mask: Mask | None, adds: bool = False,
) -> None:  # fmt: skip
    """One shard's gradients of keys, values and queries for additive scores, by source.

    Args:
        csr: edges by source, with ``order`` when there is a mask.
        incoming: with the queries.
        dkey, dvalue: rows to overwrite, or to add to where ``adds``, as ``csr`` numbers them.
        dquery: [threads, n, H] to add to; each thread has a part of its own. [threads, 0, H] where
            nobody asks for it.
    """
    rows = key.rows, value.rows, incoming.dout, incoming.known, dkey.rows, dvalue.rows
    arrays = *csr.arrays[:3], *_numpy(*rows)
    parts, dropped = array(dquery), _dropout(csr, mask, dquery)
    offsets = key.offset, value.offset, dkey.offset, dvalue.offset, incoming.offset
    _, *sizes, slope, _ = _numbers(scores, dquery)
    numbers = *offsets, not adds, *sizes, slope

    def part(index: int, first: int, last: int) -> None:
        own, scratch = (*arrays, parts[index]), _scratch(dquery, scores)
        loops.additive_grads(first, last, *own, *numbers, *dropped, *scratch)

    in_parallel(part, *csr.ids)


def attend_grad_of_additive_queries(
    csc: Csc, scores: Scores, key: Tensor, value: Tensor, incoming: Incoming, dquery: Tensor,
    mask: Mask | None,
) -> None:  # fmt: skip
    """Add the gradient of the queries of additive scores, by destination, to ``dquery`` [n, H].

    ``incoming`` is with the queries, none of it packed; so are ``key`` and ``value``.
    """
    arrays = *csc.arrays[:3], *_numpy(key, value, incoming.dout, incoming.known, dquery)
    dropped = _dropout(csc, mask, dquery)
    _, *sizes, slope, _ = _numbers(scores, dquery)

    def part(_: int, first: int, last: int) -> None:
        own = *arrays, *sizes, slope, *dropped, *_scratch(dquery, scores)
        loops.additive_grads_of_queries(first, last, *own)

    in_parallel(part, *csc.ids)


def attend_grad_of_sources(
    csr: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    incoming: Incoming, dkey: Columns, dvalue: Columns, mask: Mask | None,
) -> None:  # fmt: skip
    """One shard's gradients of keys and values for mixed or dot scores, by source.

    ``csr`` has ``order`` when there is a mask. ``dkey`` and ``dvalue`` are overwritten, a row per
    segment of ``csr``; they are the same columns where keys are values.
    """
    arrays = csr.arrays.indptr, csr.arrays.indices, *_numpy(
        key.rows, value.rows, query, weight.view(-1), incoming.dout, incoming.known, dkey.rows,
        dvalue.rows,
    )  # fmt: skip
    offsets = (key.offset, value.offset, dkey.offset, dvalue.offset)
    numbers, dropped = (*offsets, *_numbers(scores, query)), _dropout(csr, mask, query)

    def part(_: int, first: int, last: int) -> None:
        loops.wide_grads_of_sources(first, last, *arrays, *numbers, *dropped)

    in_parallel(part, *csr.ids)


def attend_grad_of_queries(
    csc: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    incoming: Incoming, dquery: Tensor, mask: Mask | None,
) -> Tensor:  # fmt: skip
    """Add one shard's gradient of the queries of mixed or dot scores, by destination, to ``dquery``
    [n, H * D]; returns [H * D], that of the weight of mixed scores (0 for dot products)."""
    rows = key.rows, value.rows, query, weight.view(-1), incoming.dout, incoming.known, dquery
    arrays = *csc.arrays[:3], *_numpy(*rows)
    dweight = query.new_zeros((num_parts(csc.indptr), scores.heads * scores.width))
    parts = array(dweight)
    numbers, dropped = _numbers(scores, query), _dropout(csc, mask, query)

    def part(index: int, first: int, last: int) -> None:
        own = (*arrays, parts[index], key.offset, value.offset)
        loops.wide_grads_of_queries(first, last, *own, *numbers, *dropped)

    in_parallel(part, *csc.ids)
    return dweight.sum(0)


def head_sums(rows: Tensor, vector: Tensor) -> Tensor:
    """Scores s_h = <a_h, row_h>, [n, H], of contiguous rows [n, H, D] and a, H * D numbers."""
    return _dots_of_heads(rows.flatten(1), vector.reshape(1, -1), rows.shape[1])


def _dots_of_heads(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """Products per head, [n, H], of rows [n, H * D] with as many rows, or with one."""
    out = a.new_empty((len(a), heads))
    arrays = _numpy(a, b, out)

    def part(_: int, first: int, last: int) -> None:
        loops.dots_of_heads(first, last, *arrays)

    rows_in_parallel(part, len(a), a.numel())
    return out


def add_projected_grads(
    drows: Tensor, rows: Tensor, grads: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Tensor:
    """Add to rows' gradients those of scores s_h = <a_h, row_h>: drow_h += g_h a_h for each a.

    ``grads`` are g [n, H] for each of the ``vectors`` [H * D]. Returns float64 gradients of the
    vectors, [number of vectors, H * D], the sums over rows of g_h row_h.
    """
    joined, stacked = torch.cat(tuple(grads), 1), torch.stack(tuple(vectors))
    arrays = _numpy(rows, stacked, joined, drows)
    sums = stacked.new_zeros((torch.get_num_threads(), *stacked.shape), dtype=torch.float64)
    some, total = _numpy(torch.zeros_like(sums, dtype=stacked.dtype), sums)

    def part(index: int, first: int, last: int) -> None:
        loops.projected_grads(first, last, *arrays, some[index], total[index])

    rows_in_parallel(part, len(rows), rows.numel())
    return sums.sum(0)


def _scratch(like: Tensor, scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    """Memory [*, edges of a chunk, H] for compiled code, which owns none; and a part of it flat."""
    made = like.new_zeros((loops.SCRATCH, loops.CHUNK, scores.heads))
    return array(made), array(made[0].view(-1))


def _numpy(*tensors: Tensor) -> list[np.ndarray]:
    return list(map(array, tensors))


def _numbers(scores: Scores, like: Tensor) -> tuple[Any, ...]:
    """Scalars of compiled code in the dtype of the rows: a float64 would widen all it meets."""
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    sizes = np.uint64(scores.heads), np.uint64(scores.width)
    return scores.kind, *sizes, kind(scores.slope), kind(scores.scale)


_NO_KEYS = np.empty(0, np.int32)  # as those that are there: nothing is compiled twice


def _dropout(csc: Csc, mask: Mask | None, like: Tensor) -> tuple[Any, ...]:
    """Each edge's position, keys by position (empty: no dropout), seed, probability, factor, first
    head."""
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    if mask is None or mask.probability == 0:
        return csc.arrays.indptr[:0], _NO_KEYS, 0, 0.0, kind(1), np.uint64(0)
    if csc.order is None:
        raise ValueError("csc: got no order, expected each edge's position for its dropout")
    p = float(mask.probability)
    keep = kind(1 / (1 - p) if p < 1 else 0)
    return csc.arrays.order, array(mask.keys), mask.seed, p, keep, np.uint64(mask.first)
