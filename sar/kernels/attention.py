"""Softmax-weighted sums over edges, scores and weights never stored: o_i = sum_e a_e v_j.

Per head h, with e = (j -> i): a_e = exp(z_e - lse_i), lse_i = log sum_e exp(z_e), and one of

* additive (arXiv 1710.10903): z_e = lrelu(k_j + q_i), k and q one number per head;
* mixed (arXiv 2105.14491): z_e = sum_d w_d lrelu(k_jd + q_id);
* dot (arXiv 1706.03762): z_e = c sum_d k_jd q_id.

Forward runs by destination and shard after shard: the largest score so far rescales what was
summed before. Backward of a shard is told lse and delta_i = <do_i, o_i>, which is
sum_e a_e <do_i, v_j>, so that it needs no second pass over the edges:
dz_e = a_e (<do_i, v_j> - delta_i), dv_j = sum_e a_e do_i. Dropout multiplies a_e by a factor r_e
wherever v_j does, which delta contains already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar.kernels.csc import Csc
from sar.kernels.jit import exp, in_parallel, inlined, keep_factor, kernel, num_parts, prefetch_row

ADDITIVE, MIXED, DOT = 0, 1, 2
_CHUNK = 32  # edges whose scores are taken together


@dataclass(frozen=True)
class Scores:
    """How scores are computed.

    Attributes:
        kind: :data:`ADDITIVE`, :data:`MIXED` or :data:`DOT`.
        heads: number of heads H.
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
    """Dropout of attention weights, a function of the edge.

    Attributes:
        keys: integer [num_edges] by local edge position.
        seed: of this use of dropout.
        probability: of a weight to be zeroed.
    """

    keys: Tensor
    seed: int
    probability: float


@dataclass(frozen=True)
class Columns:
    """Columns ``offset ..`` of rows [R, stride], contiguous: packed halo rows or a whole tensor."""

    rows: Tensor
    offset: int = 0


@dataclass
class Running:
    """The state of a forward pass: [n, H] largest score and sum of weights, [n, H * D] sums."""

    largest: Tensor
    total: Tensor
    sums: Tensor

    @staticmethod
    def start(num_rows: int, heads: int, width: int, like: Tensor) -> Running:
        """Before the first edge; dtype and device of ``like``."""
        largest = like.new_full((num_rows, heads), -torch.inf)
        sums = like.new_zeros((num_rows, heads * width))
        return Running(largest, torch.zeros_like(largest), sums)

    def finish(self) -> tuple[Tensor, Tensor]:
        """(out [n, H * D], lse [n, H]) in the memory of the state; 0 in rows without edges."""
        empty = self.total == 0
        self.total.masked_fill_(empty, 1)
        rows, heads = self.total.shape
        by_head = self.sums.view(rows, heads, self.sums.shape[1] // heads)
        by_head.div_(self.total.unsqueeze(2))
        lse = self.largest.masked_fill_(empty, 0).add_(self.total.log_())
        return self.sums, lse


@dataclass(frozen=True)
class Incoming:
    """What backward knows of each destination: [n, H * D] do, [n, H] lse and delta."""

    dout: Tensor
    lse: Tensor
    delta: Tensor


def attend(
    csc: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    running: Running, mask: Mask | None,
) -> None:  # fmt: skip
    """Take one shard's edges into ``running``.

    Args:
        csc: edges by destination, with ``order`` when there is a mask.
        key, value: source rows; the same columns where a layer's keys are its values.
        query: [n, H] (additive) or [n, H * D] rows of the destinations.
        weight: [H * D] w of mixed scores, else of any shape.
    """
    run = _attend_additive if scores.kind == ADDITIVE else _attend_wide
    rows, ends, dropped = _rows(csc), (csc.indptr, csc.indices), _dropout(csc, mask, query)
    arrays = _numpy(rows, *ends, key.rows, value.rows, query, weight.view(-1))
    state = _numpy(running.largest, running.total, running.sums)
    numbers = _numbers(scores, query)

    def part(_: int, first: int, last: int) -> None:
        run(first, last, *arrays, key.offset, value.offset, *numbers, *state, *dropped)

    in_parallel(part, csc.indptr)


def attend_grad_of_sources(
    csr: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    incoming: Incoming, dkey: Columns, dvalue: Columns, mask: Mask | None,
) -> Tensor | None:  # fmt: skip
    """Add one shard's gradients of keys and values, by source; for additive scores of queries, too.

    Args:
        csr: edges by source, with ``order`` when there is a mask.
        dkey, dvalue: rows to add to, one per segment of ``csr``; the same columns where keys are
            values.

    Returns:
        [n, H] gradient of the queries for additive scores, else ``None``.
    """
    additive = scores.kind == ADDITIVE
    arrays = _numpy(
        csr.indptr, csr.indices, key.rows, value.rows, query, weight.view(-1),
        incoming.dout, incoming.lse, incoming.delta, dkey.rows, dvalue.rows,
    )  # fmt: skip
    offsets = (key.offset, value.offset, dkey.offset, dvalue.offset)
    numbers, dropped = _numbers(scores, query), _dropout(csr, mask, query)
    dquery = query.new_zeros((num_parts(csr.indptr) if additive else 0, *query.shape))
    parts = dquery.numpy()

    def part(index: int, first: int, last: int) -> None:
        if additive:
            own = (*arrays, parts[index])
            _additive_grads(first, last, *own, *offsets, *numbers, *dropped)
        else:
            _wide_grads_of_sources(first, last, *arrays, *offsets, *numbers, *dropped)

    in_parallel(part, csr.indptr)
    return dquery.sum(0) if additive else None


def attend_grad_of_queries(
    csc: Csc, scores: Scores, key: Columns, value: Columns, query: Tensor, weight: Tensor,
    incoming: Incoming, dquery: Tensor, mask: Mask | None,
) -> Tensor:  # fmt: skip
    """Add one shard's gradient of the queries of mixed or dot scores, by destination.

    Args:
        dquery: [n, H * D] to add to.

    Returns:
        [H * D] gradient of the weight of mixed scores (0 for dot products).
    """
    arrays = _numpy(
        _rows(csc), csc.indptr, csc.indices, key.rows, value.rows, query, weight.view(-1),
        incoming.dout, incoming.lse, incoming.delta, dquery,
    )  # fmt: skip
    dweight = query.new_zeros((num_parts(csc.indptr), scores.heads * scores.width))
    parts = dweight.numpy()
    numbers, dropped = _numbers(scores, query), _dropout(csc, mask, query)

    def part(index: int, first: int, last: int) -> None:
        own = (*arrays, parts[index], key.offset, value.offset)
        _wide_grads_of_queries(first, last, *own, *numbers, *dropped)

    in_parallel(part, csc.indptr)
    return dweight.sum(0)


def _rows(csc: Csc) -> Tensor:
    """The rows of the segments; empty stands for 0, 1, 2, .."""
    return csc.indptr[:0] if csc.rows is None else csc.rows


def _numpy(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().numpy() for tensor in tensors]


def _numbers(scores: Scores, like: Tensor) -> tuple[Any, ...]:
    """Scalars in the dtype of the rows: a float64 would widen all that it meets."""
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    sizes = np.uint64(scores.heads), np.uint64(scores.width)
    return scores.kind, *sizes, kind(scores.slope), kind(scores.scale)


def _dropout(csc: Csc, mask: Mask | None, like: Tensor) -> tuple[Any, ...]:
    """Each edge's position, keys by position (empty: no dropout), seed, probability, factor."""
    kind = np.float32 if like.dtype == torch.float32 else np.float64
    if mask is None or mask.probability == 0:
        return *_numpy(csc.indptr[:0], torch.empty(0, dtype=torch.int64)), 0, 0.0, kind(1)
    if csc.order is None:
        raise ValueError("csc: got no order, expected each edge's position for its dropout")
    p = float(mask.probability)
    keep = kind(1 / (1 - p) if p < 1 else 0)
    return *_numpy(csc.order, mask.keys), mask.seed, p, keep


@inlined
def _absorb(p, count, i, largest, total, sums, heads, width):
    """Turn a chunk's scores [count, H] into exp(score - largest); rescale what came before."""
    for h in range(heads):
        top = largest[i, h]
        for k in range(count):
            top = max(top, p[k, h])
        if top != largest[i, h]:
            shrink = exp(largest[i, h] - top)
            largest[i, h] = top
            total[i, h] *= shrink
            for d in range(width):
                sums[i, h * width + d] *= shrink
        for k in range(count):
            p[k, h] -= top
    flat = p.reshape(-1)
    for k in range(count * heads):
        flat[k] = exp(flat[k])


@inlined
def _add_values(
    p, start, count, i, indices, value, value_low, total, sums, heads, width,
    position, keys, seed, probability, keep,
):  # fmt: skip
    """Add a chunk's weighted values to the sums of destination i."""
    for k in range(count):
        e = start + k
        prefetch_row(value, indices, e, value_low, heads * width)
        j = indices[e]
        for h in range(heads):
            a = p[k, h]
            total[i, h] += a
            if len(keys):
                a *= keep_factor(keys[position[e]], h, seed, probability, keep)
            low = h * width
            for d in range(width):
                sums[i, low + d] += a * value[j, value_low + low + d]


@inlined
def _lrelu(t, slope):
    return t if t > 0 else t * slope


@kernel
def _attend_additive(
    first, last, rows, indptr, indices, key, value, query, weight, key_low, value_low,
    kind, heads, width, slope, scale, largest, total, sums, position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    p = np.empty((_CHUNK, heads), query.dtype)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        for start in range(indptr[segment], indptr[segment + 1], _CHUNK):
            count = min(_CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                j = indices[start + k]
                for h in range(heads):
                    p[k, h] = _lrelu(key[j, key_low + h] + query[i, h], slope)
            _absorb(p, count, i, largest, total, sums, heads, width)
            _add_values(
                p, start, count, i, indices, value, value_low, total, sums, heads, width,
                position, keys, seed, probability, keep,
            )  # fmt: skip


@inlined
def _wide_score(kind, key, j, key_low, query, i, weight, low, width, slope, scale):
    """z of one edge and head, mixed or dot; ``low`` is the head's first column."""
    z = query.dtype.type(0)
    if kind == DOT:
        for d in range(width):
            z += key[j, key_low + low + d] * query[i, low + d]
        return z * scale
    for d in range(width):
        t = key[j, key_low + low + d] + query[i, low + d]
        z += weight[low + d] * _lrelu(t, slope)
    return z


@kernel
def _attend_wide(
    first, last, rows, indptr, indices, key, value, query, weight, key_low, value_low,
    kind, heads, width, slope, scale, largest, total, sums, position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    p = np.empty((_CHUNK, heads), query.dtype)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        for start in range(indptr[segment], indptr[segment + 1], _CHUNK):
            count = min(_CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                prefetch_row(key, indices, start + k, key_low, heads * width)
                j = indices[start + k]
                for h in range(heads):
                    p[k, h] = _wide_score(
                        kind, key, j, key_low, query, i, weight, h * width, width, slope, scale
                    )
            _absorb(p, count, i, largest, total, sums, heads, width)
            _add_values(
                p, start, count, i, indices, value, value_low, total, sums, heads, width,
                position, keys, seed, probability, keep,
            )  # fmt: skip


@kernel
def _additive_grads(
    first, last, indptr, indices, key, value, query, weight, dout, lse, delta, dkey, dvalue, dquery,
    key_low, value_low, dkey_low, dvalue_low, kind, heads, width, slope, scale,
    position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    dkey_low, dvalue_low = np.uint64(dkey_low), np.uint64(dvalue_low)
    p = np.empty((_CHUNK, heads), query.dtype)
    steep = np.empty((_CHUNK, heads), query.dtype)
    flat, one = p.reshape(-1), query.dtype.type(1)
    for j in range(first, last):
        for start in range(indptr[j], indptr[j + 1], _CHUNK):
            count = min(_CHUNK, indptr[j + 1] - start)
            for k in range(count):
                i = indices[start + k]
                for h in range(heads):
                    t = key[j, key_low + h] + query[i, h]
                    steep[k, h] = one if t > 0 else slope
                    p[k, h] = t * steep[k, h] - lse[i, h]
            for k in range(count * heads):
                flat[k] = exp(flat[k])
            for k in range(count):
                e = start + k
                prefetch_row(dout, indices, e, 0, heads * width)
                i = indices[e]
                for h in range(heads):
                    a, low, r = p[k, h], h * width, one
                    if len(keys):
                        r = keep_factor(keys[position[e]], h, seed, probability, keep)
                    b, product = a * r, query.dtype.type(0)
                    for d in range(width):
                        product += dout[i, low + d] * value[j, value_low + low + d]
                    for d in range(width):
                        dvalue[j, dvalue_low + low + d] += b * dout[i, low + d]
                    dz = a * (r * product - delta[i, h]) * steep[k, h]
                    dkey[j, dkey_low + h] += dz
                    dquery[i, h] += dz


@kernel
def _wide_grads_of_sources(
    first, last, indptr, indices, key, value, query, weight, dout, lse, delta, dkey, dvalue,
    key_low, value_low, dkey_low, dvalue_low, kind, heads, width, slope, scale,
    position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    dkey_low, dvalue_low = np.uint64(dkey_low), np.uint64(dvalue_low)
    one = query.dtype.type(1)
    for j in range(first, last):
        for e in range(indptr[j], indptr[j + 1]):
            prefetch_row(dout, indices, e, 0, heads * width)
            prefetch_row(query, indices, e, 0, heads * width)
            i = indices[e]
            for h in range(heads):
                low, r = h * width, one
                z = _wide_score(kind, key, j, key_low, query, i, weight, low, width, slope, scale)
                a = exp(z - lse[i, h])
                if len(keys):
                    r = keep_factor(keys[position[e]], h, seed, probability, keep)
                b, product = a * r, query.dtype.type(0)
                for d in range(width):
                    product += dout[i, low + d] * value[j, value_low + low + d]
                for d in range(width):
                    dvalue[j, dvalue_low + low + d] += b * dout[i, low + d]
                dz = a * (r * product - delta[i, h])
                if kind == DOT:
                    dz *= scale
                    for d in range(width):
                        dkey[j, dkey_low + low + d] += dz * query[i, low + d]
                else:
                    for d in range(width):
                        t = key[j, key_low + low + d] + query[i, low + d]
                        dt = dz * weight[low + d]
                        dkey[j, dkey_low + low + d] += dt if t > 0 else dt * slope


@kernel
def _wide_grads_of_queries(
    first, last, rows, indptr, indices, key, value, query, weight, dout, lse, delta, dquery,
    dweight, key_low, value_low, kind, heads, width, slope, scale,
    position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    one = query.dtype.type(1)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        for e in range(indptr[segment], indptr[segment + 1]):
            prefetch_row(key, indices, e, key_low, heads * width)
            j = indices[e]
            for h in range(heads):
                low, r = h * width, one
                z = _wide_score(kind, key, j, key_low, query, i, weight, low, width, slope, scale)
                a = exp(z - lse[i, h])
                if len(keys):
                    r = keep_factor(keys[position[e]], h, seed, probability, keep)
                product = query.dtype.type(0)
                for d in range(width):
                    product += dout[i, low + d] * value[j, value_low + low + d]
                dz = a * (r * product - delta[i, h])
                if kind == DOT:
                    dz *= scale
                    for d in range(width):
                        dquery[i, low + d] += dz * key[j, key_low + low + d]
                else:
                    for d in range(width):
                        t = key[j, key_low + low + d] + query[i, low + d]
                        u, dt = _lrelu(t, slope), dz * weight[low + d]
                        dweight[low + d] += dz * u
                        dquery[i, low + d] += dt if t > 0 else dt * slope
