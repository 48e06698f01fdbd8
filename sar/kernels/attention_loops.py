"""Compiled loops of :mod:`sar.kernels.attention`, which says what they compute.

Edges are ``indices`` cut by ``indptr`` into segments, of which each call takes [first, last).
Numbers are indexed as ``rows[row, column]`` with unsigned columns: so the compiler sees that they
are not negative and uses vector units. After editing :mod:`sar.kernels.jit`, remove
``sar/kernels/__pycache__``: numba does not notice it.
"""

# Compiled functions have no annotations: numba compiles them for the types they are called with.
# mypy: allow-untyped-defs

import numpy as np

from sar.kernels.jit import exp, inlined, keep_factor, kernel, ordered_kernel, prefetch_row

ADDITIVE, MIXED, DOT = 0, 1, 2
CHUNK = 32  # edges whose scores are taken together
VECTOR = 32  # exponentials that are computed together; divides the scores of a chunk
SCRATCH = 4  # numbers kept of an edge and head
FEW = 256  # rows whose terms are summed in the precision of the rows


@inlined
def _clear(rows, row, low, width):
    for d in range(width):
        rows[row, low + d] = 0


@inlined
def _exp_all(flat, count):
    """exp of ``count`` numbers in place, and of those behind them up to a whole vector. Most
    segments are short, and one by one exponentials take ten times as long."""
    for n in range((count + VECTOR - 1) // VECTOR * VECTOR):
        flat[n] = exp(flat[n])


@inlined
def _absorb(p, flat, count, i, largest, total, sums, heads, width):
    """Turn a chunk's scores [count, H] into exp(score - largest), and rescale earlier sums.
    ``flat`` is the memory of ``p`` as one row."""
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
    _exp_all(flat, count * np.int64(heads))
    _add_totals(p, count, i, total, heads)


@ordered_kernel
def _add_totals(p, count, i, total, heads):
    """total_i += sums over a chunk's edges, in one order for any number of heads: numbers of a
    single head lie side by side, and would be summed as vectors."""
    for h in range(heads):
        even = odd = p.dtype.type(0)
        for k in range(0, count - 1, 2):
            even, odd = even + p[k, h], odd + p[k + 1, h]
        total[i, h] += even + odd + (p[count - 1, h] if count % 2 else p.dtype.type(0))


@inlined
def _add_rows(p, start, count, indices, rows, rows_low, out, i, out_low, heads, width, ahead):
    """out_i += sum over a chunk's edges of p_h rows_j per head h: one pass for four edges.
    ``ahead`` prefetches the rows of later edges, a head's columns at a time between the sums."""
    fours = count - count % 4
    for k in range(0, fours, 4):
        e = start + k
        j0, j1, j2, j3 = indices[e], indices[e + 1], indices[e + 2], indices[e + 3]
        for h in range(heads):
            low, there = out_low + h * width, rows_low + h * width
            if ahead:
                for later in range(4):
                    prefetch_row(rows, indices, e + later, there, width)
            a0, a1, a2, a3 = p[k, h], p[k + 1, h], p[k + 2, h], p[k + 3, h]
            for d in range(width):
                out[i, low + d] += (
                    a0 * rows[j0, there + d]
                    + a1 * rows[j1, there + d]
                    + a2 * rows[j2, there + d]
                    + a3 * rows[j3, there + d]
                )
    for k in range(fours, count):
        e = start + k
        if ahead:
            prefetch_row(rows, indices, e, rows_low, heads * width)
        j = indices[e]
        for h in range(heads):
            a, low, there = p[k, h], out_low + h * width, rows_low + h * width
            for d in range(width):
                out[i, low + d] += a * rows[j, there + d]


@inlined
def _dot_and_add_rows(
    p, product, start, count, indices, rows, row, j, row_low, out, out_low, heads, width
):
    """product_h = <rows_i, row_j> per head h of a chunk's edges and out_j += p_h rows_i. Like
    :func:`_add_rows`; both at once, because rows_i come from far away."""
    zero = p.dtype.type(0)
    fours = count - count % 4
    for k in range(0, fours, 4):
        e = start + k
        i0, i1, i2, i3 = indices[e], indices[e + 1], indices[e + 2], indices[e + 3]
        for h in range(heads):
            low = h * width
            for later in range(4):
                prefetch_row(rows, indices, e + later, low, width)
            a0, a1, a2, a3 = p[k, h], p[k + 1, h], p[k + 2, h], p[k + 3, h]
            b0, b1, b2, b3 = zero, zero, zero, zero
            for d in range(width):
                x = row[j, row_low + low + d]
                x0, x1 = rows[i0, low + d], rows[i1, low + d]
                x2, x3 = rows[i2, low + d], rows[i3, low + d]
                b0 += x * x0
                b1 += x * x1
                b2 += x * x2
                b3 += x * x3
                out[j, out_low + low + d] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            product[k, h], product[k + 1, h] = b0, b1
            product[k + 2, h], product[k + 3, h] = b2, b3
    for k in range(fours, count):
        e = start + k
        prefetch_row(rows, indices, e, 0, heads * width)
        i = indices[e]
        for h in range(heads):
            a, b, low = p[k, h], zero, h * width
            for d in range(width):
                x = rows[i, low + d]
                b += row[j, row_low + low + d] * x
                out[j, out_low + low + d] += a * x
            product[k, h] = b


@kernel
def dots_of_heads(first, last, a, b, out):
    """Products per head of rows of ``a`` with those of ``b``, or with the only one of ``b``."""
    heads = np.uint64(out.shape[1])
    width = np.uint64(a.shape[1]) // heads
    for i in range(first, last):
        j = i if len(b) > 1 else 0
        for h in range(heads):
            total = out.dtype.type(0)
            for d in range(width):
                total += a[i, h * width + d] * b[j, h * width + d]
            out[i, h] = total


@kernel
def projected_grads(first, last, rows, vectors, grads, drows, some, dvectors):
    """:func:`sar.kernels.attention.add_projected_grads`; ``some`` has the sums of a few rows, which
    ``dvectors`` adds up in double precision."""
    count, columns = np.uint64(vectors.shape[0]), np.uint64(vectors.shape[1])
    heads = np.uint64(grads.shape[1]) // count
    width = columns // heads
    for i in range(first, last):
        for v in range(count):
            for h in range(heads):
                g, low = grads[i, v * heads + h], h * width
                for d in range(width):
                    drows[i, low + d] += g * vectors[v, low + d]
                    some[v, low + d] += g * rows[i, low + d]
            if i % FEW == 0 or i == last - 1:
                for d in range(columns):
                    dvectors[v, d] += some[v, d]
                    some[v, d] = 0


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
    if kind == ADDITIVE:
        return _lrelu(key[j, key_low + h] + query[i, h], slope)
    return _wide_score(kind, key, j, key_low, query, i, weight, h * width, width, slope, scale)


@kernel
def attend(
    first, last, rows, indptr, indices, key, value, query, weight, key_low, value_low,
    kind, heads, width, slope, scale, fresh, largest, total, sums,
    position, keys, seed, probability, keep, lowest, scratch, flat,
):  # fmt: skip
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    p = scratch[0]
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        if fresh:
            _clear(sums, i, 0, heads * width)
        for start in range(indptr[segment], indptr[segment + 1], CHUNK):
            count = min(CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                if kind != ADDITIVE:  # narrow keys stay in cache
                    prefetch_row(key, indices, start + k, key_low, heads * width)
                j = indices[start + k]
                for h in range(heads):
                    p[k, h] = _score(
                        kind, key, j, key_low, query, i, weight, h, width, slope, scale
                    )
            _absorb(p, flat, count, i, largest, total, sums, heads, width)
            for k in range(count if len(keys) else 0):
                for h in range(heads):
                    p[k, h] *= keep_factor(
                        keys[position[start + k]], lowest + h, seed, probability, keep
                    )
            _add_rows(
                p, start, count, indices, value, value_low, sums, i, np.uint64(0), heads, width,
                True,
            )  # fmt: skip


@kernel
def additive_grads(
    first, last, rows, indptr, indices, key, value, dout, ends, dkey, dvalue, dquery,
    key_low, value_low, dkey_low, dvalue_low, ends_low, fresh, heads, width, slope,
    position, keys, seed, probability, keep, lowest, scratch, flat,
):  # fmt: skip
    """``ends``: queries, m, 1 / s and delta of the destinations, [n, H] each, side by side.
    ``dquery`` has no rows where nobody asks for it."""
    key_low, value_low = np.uint64(key_low), np.uint64(value_low)
    dkey_low, dvalue_low = np.uint64(dkey_low), np.uint64(dvalue_low)
    query_low = np.uint64(ends_low)
    largest_low, inverse_low = query_low + heads, query_low + heads + heads
    delta_low = inverse_low + heads
    p, product, steep, fixed = scratch[0], scratch[1], scratch[2], scratch[3]
    one = key.dtype.type(1)
    for segment in range(first, last):
        j = rows[segment] if len(rows) else segment
        if fresh:
            _clear(dkey, j, dkey_low, heads)
            _clear(dvalue, j, dvalue_low, heads * width)
        for start in range(indptr[segment], indptr[segment + 1], CHUNK):
            count = min(CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                prefetch_row(ends, indices, start + k, query_low, 4 * heads)
                prefetch_row(dquery, indices, start + k, 0, heads)
                i = indices[start + k]
                for h in range(heads):
                    t = key[j, key_low + h] + ends[i, query_low + h]
                    steep[k, h] = one if t > 0 else slope
                    p[k, h] = _lrelu(t, slope) - ends[i, largest_low + h]
            _exp_all(flat, count * np.int64(heads))
            for k in range(count):
                i = indices[start + k]
                for h in range(heads):
                    a, r = p[k, h] * ends[i, inverse_low + h], one
                    if len(keys):
                        r = keep_factor(
                            keys[position[start + k]], lowest + h, seed, probability, keep
                        )
                    p[k, h] = a * r
                    fixed[k, h] = a * ends[i, delta_low + h]
            _dot_and_add_rows(
                p, product, start, count, indices, dout, value, j, value_low, dvalue, dvalue_low,
                heads, width,
            )  # fmt: skip
            for k in range(count):
                i = indices[start + k]
                for h in range(heads):
                    dz = (p[k, h] * product[k, h] - fixed[k, h]) * steep[k, h]
                    dkey[j, dkey_low + h] += dz
                    if len(dquery):
                        dquery[i, h] += dz


@kernel
def additive_grads_of_queries(
    first, last, rows, indptr, indices, key, value, dout, ends, dquery, heads, width, slope,
    position, keys, seed, probability, keep, lowest, scratch, flat,
):  # fmt: skip
    """Gradients of the queries alone, by destination; ``ends`` as for :func:`additive_grads`."""
    zero_low, largest_low, inverse_low = np.uint64(0), heads, heads + heads
    delta_low = inverse_low + heads
    p, steep = scratch[0], scratch[1]
    one = key.dtype.type(1)
    for segment in range(first, last):
        i = rows[segment] if len(rows) else segment
        for start in range(indptr[segment], indptr[segment + 1], CHUNK):
            count = min(CHUNK, indptr[segment + 1] - start)
            for k in range(count):
                prefetch_row(key, indices, start + k, zero_low, heads)
                j = indices[start + k]
                for h in range(heads):
                    t = key[j, h] + ends[i, h]
                    steep[k, h] = one if t > 0 else slope
                    p[k, h] = _lrelu(t, slope) - ends[i, largest_low + h]
            _exp_all(flat, count * np.int64(heads))
            for k in range(count):
                prefetch_row(value, indices, start + k, zero_low, heads * width)
                j = indices[start + k]
                for h in range(heads):
                    low, product, r = h * width, one - one, one
                    for d in range(width):
                        product += dout[i, low + d] * value[j, low + d]
                    if len(keys):
                        place = position[start + k]
                        r = keep_factor(keys[place], lowest + h, seed, probability, keep)
                    dz = p[k, h] * ends[i, inverse_low + h] * (r * product - ends[i, delta_low + h])
                    dquery[i, h] += dz * steep[k, h]


@kernel
def wide_grads_of_sources(
    first, last, indptr, indices, key, value, query, weight, dout, known,
    dkey, dvalue, key_low, value_low, dkey_low, dvalue_low, kind, heads, width, slope, scale,
    position, keys, seed, probability, keep, lowest,
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
                    r = keep_factor(keys[position[e]], lowest + h, seed, probability, keep)
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
    position, keys, seed, probability, keep, lowest,
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
                    r = keep_factor(keys[position[e]], lowest + h, seed, probability, keep)
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
