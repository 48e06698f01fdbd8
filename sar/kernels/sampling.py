"""Drawing neighbors by keyed random numbers, and fetching rows of those that were drawn.

A draw is a function of a base (which batch, hop and relation) and of the node's key, through
splitmix64 (Steele, Lea and Flood 2014): who computes it, and in which order, plays no part.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sar.kernels.jit import (
    LINE,
    STEP,
    STREAMED,
    copy_bytes,
    end_streams,
    inlined,
    mix,
    ordered_kernel,
    prefetch_byte,
    stream_bytes,
)

_AHEAD = 8  # rows between asking for one and using it
_CACHED = 1 << 22  # bytes of rows; more leave the caches before they are read
_ALL = np.empty(0, np.int32)
_LOW = np.uint64(0xFFFFFFFF)
_11, _32 = np.uint64(11), np.uint64(32)
Make = Callable[..., Tensor]


@inlined
def _bounded(bits: Any, limit: Any) -> Any:
    """floor(bits / 2**64 * limit), for limits below 2**32."""
    bound = np.uint64(limit)
    high, low = (bits >> _32) * bound, (bits & _LOW) * bound
    return np.int64((high + (low >> _32)) >> _32)


@ordered_kernel
def _uniform(chosen: Any, degree: int, fanout: int, row: Any, replace: bool) -> int:
    """Draw positions among ``degree`` edges; returns how many. Without replacement Floyd's sets
    (Bentley and Floyd 1987), in order of the draw."""
    if degree == 0:
        return 0
    if replace:
        for j in range(fanout):
            chosen[j] = _bounded(mix(row + np.uint64(j + 1) * STEP), degree)
        return fanout
    if degree <= fanout:
        for j in range(degree):
            chosen[j] = j
        return degree
    for j in range(fanout):
        last = degree - fanout + j
        one = _bounded(mix(row + np.uint64(j + 1) * STEP), last + 1)
        for before in range(j):
            if chosen[before] == one:
                one = last
                break
        chosen[j] = one
    return fanout


@ordered_kernel
def _weighted(chosen: Any, best: Any, weights: Any, fanout: int, row: Any) -> int:
    """Draw positions without replacement, with chances in proportion to weights: the largest of
    log(u) / w (Efraimidis and Spirakis 2006). Edges of weight 0 are never drawn."""
    count = 0
    for j in range(weights.shape[0]):
        if not weights[j] > 0:
            continue
        bits = mix(row + np.uint64(j + 1) * STEP) >> _11
        score = math.log((np.float64(bits) + 0.5) * 2.0**-53) / weights[j]
        if count == fanout and score <= best[count - 1]:
            continue
        at = min(count, fanout - 1)
        while at > 0 and best[at - 1] < score:
            best[at], chosen[at] = best[at - 1], chosen[at - 1]
            at -= 1
        best[at], chosen[at] = score, j
        count = min(count + 1, fanout)
    return count


@ordered_kernel
def _weighted_again(chosen: Any, weights: Any, fanout: int, row: Any) -> int:
    """Draw positions with replacement, with chances in proportion to weights."""
    total = 0.0
    for j in range(weights.shape[0]):
        total += weights[j]
    if not total > 0:
        return 0
    for j in range(fanout):
        bits = mix(row + np.uint64(j + 1) * STEP) >> _11
        goal, below, one = np.float64(bits) * 2.0**-53 * total, 0.0, -1
        for k in range(weights.shape[0]):
            if weights[k] > 0:
                one = k
                below += weights[k]
                if below > goal:
                    break
        chosen[j] = one
    return fanout


@ordered_kernel
def _draw(
    out: Any,
    at: int,
    indptr: Any,
    neighbor: Any,
    eid: Any,
    weight: Any,
    time: Any,
    rows: Any,
    keys: Any,
    trees: Any,
    base: Any,
    fanout: int,
    replace: bool,
    last: bool,
    chosen: Any,
    best: Any,
) -> int:
    pair, is_weighted, has_trees = at + rows.shape[0], weight.shape[0] > 0, trees.shape[0] > 0
    for i in range(rows.shape[0]):
        if i + 2 * _AHEAD < rows.shape[0]:
            prefetch_byte(indptr, np.int64(rows[i + 2 * _AHEAD]) * indptr.itemsize)
        if i + _AHEAD < rows.shape[0]:
            edge = indptr[rows[i + _AHEAD]]
            for byte in range(0, 2 * LINE, LINE):
                prefetch_byte(neighbor, edge * neighbor.itemsize + byte)
                prefetch_byte(eid, edge * eid.itemsize + byte)
        begin, end = indptr[rows[i]], indptr[rows[i] + 1]
        if time.shape[0] > 0:
            end = begin + np.searchsorted(time[begin:end], trees[i, 1], side="right")
            if last and fanout >= 0:
                begin = max(begin, end - fanout)
        if fanout < 0 or (last and time.shape[0] > 0):
            first = pair
            for j in range(begin, end):
                if is_weighted and not weight[j] > 0:
                    continue
                out[pair] = neighbor[j]
                out[pair + 1] = eid[j]
                pair += 2
            out[at + i] = (pair - first) // 2
            continue
        row = mix(np.uint64(keys[rows[i]]) * STEP + base)
        if has_trees:
            row = mix(row + np.uint64(trees[i, 0]))
        if not is_weighted:
            count = _uniform(chosen, end - begin, fanout, row, replace)
        elif replace:
            count = _weighted_again(chosen, weight[begin:end], fanout, row)
        else:
            count = _weighted(chosen, best, weight[begin:end], fanout, row)
        out[at + i] = count
        for j in range(count):
            out[pair] = neighbor[begin + chosen[j]]
            out[pair + 1] = eid[begin + chosen[j]]
            pair += 2
    return pair


class Csc(NamedTuple):
    """In-edges of n rows.

    Attributes:
        indptr: int64 [n + 1].
        neighbor, eid: [E] int32 or int64, source and id of each edge.
        weight: float64 [E], 0 or more; [0]: all edges are equally likely.
        time: int64 [E], ascending within a row; [0]: edges are there from the beginning.
    """

    indptr: Tensor
    neighbor: Tensor
    eid: Tensor
    weight: Tensor
    time: Tensor


def draw(
    out: Tensor,
    at: int,
    edges: Csc,
    rows: Tensor,
    keys: Tensor,
    base: int,
    fanout: int,
    replace: bool,
    last: bool = False,
) -> int:
    """Draw in-edges of some rows into ``out[at:]``; returns where the next may begin.

    Args:
        out: [*] of the dtype of ``edges.eid``. It gets how many of each row, [m]; then neighbor and
            edge id of each drawn edge, row by row.
        rows: int32 [m] of the n; or int64 [m, 3], a row, what keys its draws beside its own key,
            and the time after which no edge is drawn.
        keys: [n] int32 or int64, what names the rows in random numbers.
        base: 64 well mixed bits.
        fanout: of each row; -1 takes all. Edges of weight 0 are never drawn.
        replace: whether an edge may come several times; a row with edges then has ``fanout``.
        last: take the latest edges, instead of drawing.
    """
    if not replace:  # no row has more, and the memory below is by the fanout
        fanout = min(fanout, max(1, len(edges.neighbor)))
    chosen = np.empty(max(fanout, 1), np.int64)
    best = np.empty(1 if replace else len(chosen))
    trees = torch.empty(0, 2, dtype=torch.int64)
    if rows.dim() == 2:
        rows, trees = rows[:, 0].int(), rows[:, 1:].contiguous()
    return _draw(
        out.numpy(), at, *(one.numpy() for one in edges), rows.numpy(), keys.numpy(), trees.numpy(),
        np.uint64(base % 2**64), fanout, replace, last, chosen, best,
    )  # fmt: skip


def leave_out(
    out: Tensor, at: int, end: int, near: Tensor, without: Tensor, width: int, is_out: bool
) -> int:
    """Take edges out of what :func:`draw` wrote into ``out[at:end]``; returns where the next may
    begin.

    Args:
        near: int64 [m] ids of the rows, sources if ``is_out``, else destinations.
        without: int64, ascending, not empty: source x ``width`` + destination of these edges.
    """
    first = at + len(near)
    counts, drawn = out[at:first], out[first:end].view(-1, 2)
    of = torch.repeat_interleave(counts.long())
    ends = (near[of], drawn[:, 0]) if is_out else (drawn[:, 0].long(), near[of])
    keys = ends[0] * width + ends[1]
    kept = without[torch.searchsorted(without, keys).clamp(max=len(without) - 1)] != keys
    rest = drawn[kept].view(-1)
    counts.copy_(torch.bincount(of[kept], minlength=len(near)))
    out[first : first + len(rest)] = rest
    return first + len(rest)


def hashed(*words: int) -> int:
    """Mix some integers, in their order, to 64 bits."""
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for word in words:
            state = mix.py_func(state + np.uint64(word % 2**64) * STEP + STEP)
    return int(state)


@ordered_kernel
def _split(
    ids: Any, bounds: Any, kept: Any, order: Any, rows: Any, counts: Any, owner: Any, cursor: Any
) -> None:
    """Sort by owner, stable: ``order`` lists the ids of owner 0 first, ``rows`` their numbers."""
    own = bounds.shape[0] - 1
    for i in range(ids.shape[0]):
        p = 0
        for q in range(1, own):  # as vectors; of 64 owners, a fourth of what halving takes
            p += ids[i] >= bounds[q]
        if kept.shape[0] > 0 and kept[i] >= 0:
            p = own
        owner[i] = p
        counts[p] += 1
    cursor[0] = 0
    for p in range(1, counts.shape[0]):
        cursor[p] = cursor[p - 1] + counts[p - 1]
    for i in range(ids.shape[0]):
        p = owner[i]
        order[cursor[p]] = i
        rows[cursor[p]] = ids[i] - bounds[p] if p < own else kept[i]
        cursor[p] += 1


def split(
    ids: Tensor, bounds: Tensor, kept: Tensor | None = None
) -> tuple[Tensor, Tensor, list[int]]:
    """Group ids by their owners.

    Args:
        ids: int64 [m], in ``[bounds[0], bounds[P])``.
        bounds: int64 [P + 1], ascending; owner p has ``[bounds[p], bounds[p + 1])``.
        kept: int64 [m]: where it is not -1, one more owner P has the id, under that number.

    Returns int32 [m] positions in ``ids``, those of owner 0 first, each owner's ascending; int32
    [m] the ids there less the owner's first; how many each owner has.
    """
    order, rows = (torch.empty(len(ids), dtype=torch.int32) for _ in range(2))
    counts = torch.zeros(len(bounds) - (kept is None), dtype=torch.int64)
    found = np.empty(0, np.int64) if kept is None else kept.numpy()
    room = np.empty(len(ids), np.int32), np.empty(len(counts), np.int64)
    given = ids.numpy(), bounds.numpy(), found
    _split(*given, order.numpy(), rows.numpy(), counts.numpy(), *room)
    return order, rows, counts.tolist()


@ordered_kernel
def _counted(buffer: Any, starts: Any, sizes: Any, order: Any, offsets: Any) -> None:
    first = 0
    for p in range(starts.shape[0]):
        for i in range(sizes[p]):
            offsets[order[first + i] + 1] = buffer[starts[p] + i]
        first += sizes[p]
    for i in range(1, offsets.shape[0]):
        offsets[i] += offsets[i - 1]


@ordered_kernel
def _place(
    buffer: Any, starts: Any, sizes: Any, order: Any, offsets: Any, neighbor: Any, eid: Any, of: Any
) -> None:
    first = 0
    for p in range(starts.shape[0]):
        pair = starts[p] + sizes[p]
        for i in range(sizes[p]):
            row = order[first + i]
            for j in range(offsets[row], offsets[row + 1]):
                neighbor[j] = buffer[pair]
                eid[j] = buffer[pair + 1]
                of[j] = row
                pair += 2
        first += sizes[p]
        starts[p] = pair


class Placed(NamedTuple):
    """Edges that the owners drew for m rows, in the order of the rows.

    ``offsets``, int64 [m + 1], says where the edges of each row begin; ``neighbor``, ``eid`` and
    ``of``, int64 [offsets[m]], are source, id and row of each edge.
    """

    offsets: Tensor
    neighbor: Tensor
    eid: Tensor
    of: Tensor


def place(
    buffer: Tensor, starts: Tensor, sizes: Tensor, order: Tensor, make: Make = torch.empty
) -> Placed:
    """Join the edges that :func:`draw` wrote for each owner's rows.

    Args:
        make: gives the memory of the edges, as :func:`torch.empty` does.
        buffer: of all owners.
        starts: int64 [P], where each owner's begins; afterwards where its next begins.
        sizes: int64 [P], for how many rows.
        order: int32 [m], as :func:`split` gives it.
    """
    offsets = torch.zeros(len(order) + 1, dtype=torch.int64)
    given = buffer.numpy(), starts.numpy(), sizes.numpy(), order.numpy(), offsets.numpy()
    _counted(*given)
    edges = make((3, int(offsets[-1])), dtype=torch.int64)
    _place(*given, *edges.numpy())
    return Placed(offsets, *edges)


@ordered_kernel
def _copy_rows(
    out: Any, to: Any, table: Any, rows: Any, count: int, nbytes: int, is_streamed: bool
) -> None:
    are_placed, are_chosen = to.shape[0] > 0, rows.shape[0] > 0
    for i in range(count):
        if are_chosen and i + _AHEAD < count:
            start = np.int64(rows[i + _AHEAD]) * nbytes
            for byte in range(start, start + nbytes, LINE):
                prefetch_byte(table, byte)
        at = np.int64(to[i] if are_placed else i) * nbytes
        begin = np.int64(rows[i] if are_chosen else i) * nbytes
        if is_streamed:
            stream_bytes(out, at, table, begin, nbytes)
        else:
            copy_bytes(out, at, table, begin, nbytes)
    if is_streamed:
        end_streams()


def copy_rows(out: Tensor, to: Tensor | None, table: Tensor, rows: Tensor | None) -> None:
    """out[to] = table[rows], of rows [*, ...] of one dtype and shape, contiguous; ``to`` and
    ``rows`` are int32 [m], and ``None`` for one of them: the first m."""
    places, origins = (_ALL if one is None else one.numpy() for one in (to, rows))
    count = max(len(places), len(origins))
    if count and out[0].numel():
        nbytes = out[0].numel() * out.element_size()
        is_streamed = out.nbytes > _CACHED and not (nbytes | out.data_ptr()) % STREAMED
        _copy_rows(_bytes(out), places, _bytes(table), origins, count, nbytes, is_streamed)


def _bytes(rows: Tensor) -> np.ndarray:
    return rows.detach().view(-1).view(torch.uint8).numpy()
