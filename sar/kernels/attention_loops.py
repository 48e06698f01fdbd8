"""Compiled loops of :mod:`sar.kernels.attention`, which says what they compute.

Edges are ``indices`` cut by ``indptr`` into segments, of which each call takes [first, last).
Numbers are indexed as ``rows[row, column]`` with unsigned columns: so the compiler sees that they
are not negative and uses vector units. numba keeps the machine code on disk and notices a changed
file, but not a change of what the file imports: after editing :mod:`sar.kernels.jit`, remove
``sar/kernels/__pycache__``.
"""

# Compiled functions have no annotations: numba compiles them for the types they are called with.
# mypy: allow-untyped-defs

import numpy as np

from sar.kernels.jit import exp, inlined, keep_factor, kernel, prefetch_row

ADDITIVE, MIXED, DOT = 0, 1, 2
_CHUNK = 32  # edges whose scores are taken together


@inlined
def _clear(rows, row, low, width):
    for d in range(width):
        rows[row, low + d] = 0


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
        if top == -np.inf:  # no difference of infinities while all scores are -inf; NaN stays
            for k in range(count):
                p[k, h] = 0 if p[k, h] == top else p[k, h]
        else:
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


@kernel
def dots_of_heads(a, b, out):
    heads = np.uint64(out.shape[1])
    width = np.uint64(a.shape[1]) // heads
    for i in range(len(out)):
        for h in range(heads):
            total = out.dtype.type(0)
            for d in range(width):
                total += a[i, h * width + d] * b[i, h * width + d]
            out[i, h] = total


@inlined
def _lrelu(t, slope):
    return t if t > 0 else t * slope


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


@inlined
def _score(kind, key, j, key_low, query, i, weight, h, width, slope, scale):
    """z of one edge and head."""
    if kind == ADDITIVE:
        return _lrelu(key[j, key_low + h] + query[i, h], slope)
    return _wide_score(kind, key, j, key_low, query, i, weight, h * width, width, slope, scale)


@kernel
def attend(
    first, last, rows, indptr, indices, key, value, query, weight, key_low, value_low,
    kind, heads, width, slope, scale, fresh, largest, total, sums,
    position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    p = np.empty((_CHUNK, heads), query.dtype)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        if fresh:
            _clear(sums, i, 0, heads * width)
        for start in range(indptr[segment], indptr[segment + 1], _CHUNK):
            count = min(_CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                if kind != ADDITIVE:  # narrow keys stay in cache
                    prefetch_row(key, indices, start + k, key_low, heads * width)
                j = indices[start + k]
                for h in range(heads):
                    p[k, h] = _score(
                        kind, key, j, key_low, query, i, weight, h, width, slope, scale
                    )
            _absorb(p, count, i, largest, total, sums, heads, width)
            _add_values(
                p, start, count, i, indices, value, value_low, total, sums, heads, width,
                position, keys, seed, probability, keep,
            )  # fmt: skip


@kernel
def additive_grads(
    first, last, indptr, indices, key, value, query, weight, dout, known,
    dkey, dvalue, dquery, key_low, value_low, dkey_low, dvalue_low,
    kind, heads, width, slope, scale, position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    dkey_low, dvalue_low = np.uint64(dkey_low), np.uint64(dvalue_low)
    p = np.empty((_CHUNK, heads), query.dtype)
    steep = np.empty((_CHUNK, heads), query.dtype)
    flat, one = p.reshape(-1), query.dtype.type(1)
    for j in range(first, last):
        _clear(dkey, j, dkey_low, heads)
        _clear(dvalue, j, dvalue_low, heads * width)
        for start in range(indptr[j], indptr[j + 1], _CHUNK):
            count = min(_CHUNK, indptr[j + 1] - start)
            for k in range(count):
                i = indices[start + k]
                for h in range(heads):
                    t = key[j, key_low + h] + query[i, h]
                    steep[k, h] = one if t > 0 else slope
                    p[k, h] = _lrelu(t, slope) - known[i, h]
            for k in range(count * heads):
                flat[k] = exp(flat[k])
            for k in range(count):
                e = start + k
                prefetch_row(dout, indices, e, 0, heads * width)
                i = indices[e]
                for h in range(heads):
                    a, low, r = p[k, h] * known[i, heads + h], h * width, one
                    if len(keys):
                        r = keep_factor(keys[position[e]], h, seed, probability, keep)
                    b, product = a * r, query.dtype.type(0)
                    for d in range(width):
                        product += dout[i, low + d] * value[j, value_low + low + d]
                    for d in range(width):
                        dvalue[j, dvalue_low + low + d] += b * dout[i, low + d]
                    dz = a * (r * product - known[i, heads + heads + h]) * steep[k, h]
                    dkey[j, dkey_low + h] += dz
                    dquery[i, h] += dz


@kernel
def wide_grads_of_sources(
    first, last, indptr, indices, key, value, query, weight, dout, known,
    dkey, dvalue, key_low, value_low, dkey_low, dvalue_low, kind, heads, width, slope, scale,
    position, keys, seed, probability, keep,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    dkey_low, dvalue_low = np.uint64(dkey_low), np.uint64(dvalue_low)
    one = query.dtype.type(1)
    for j in range(first, last):
        _clear(dkey, j, dkey_low, heads * width)
        _clear(dvalue, j, dvalue_low, heads * width)
        for e in range(indptr[j], indptr[j + 1]):
            prefetch_row(dout, indices, e, 0, heads * width)
            prefetch_row(query, indices, e, 0, heads * width)
            i = indices[e]
            for h in range(heads):
                low, r = h * width, one
                z = _wide_score(kind, key, j, key_low, query, i, weight, low, width, slope, scale)
                a = exp(z - known[i, h]) * known[i, heads + h]
                if len(keys):
                    r = keep_factor(keys[position[e]], h, seed, probability, keep)
                b, product = a * r, query.dtype.type(0)
                for d in range(width):
                    product += dout[i, low + d] * value[j, value_low + low + d]
                for d in range(width):
                    dvalue[j, dvalue_low + low + d] += b * dout[i, low + d]
                dz = a * (r * product - known[i, heads + heads + h])
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
def wide_grads_of_queries(
    first, last, rows, indptr, indices, key, value, query, weight, dout, known,
    dquery, dweight, key_low, value_low, kind, heads, width, slope, scale,
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
                a = exp(z - known[i, h]) * known[i, heads + h]
                if len(keys):
                    r = keep_factor(keys[position[e]], h, seed, probability, keep)
                product = query.dtype.type(0)
                for d in range(width):
                    product += dout[i, low + d] * value[j, value_low + low + d]
                dz = a * (r * product - known[i, heads + heads + h])
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
