"""Pairs (row, value) in any order as rows of ascending values, for more pairs than fit in memory.

A first pass counts each row's pairs. Consecutive rows make up a bucket, as many as have
`BUCKET_PAIRS` pairs together; a second pass spreads the pairs over a file in which each bucket has
its place, and then each bucket is put in order by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sar.partition.column import create_array
from sar.partition.compiled import compiled
from sar.partition.progress import NOBODY, Counter, Progress, silent

BUCKET_PAIRS = 1 << 24
_RUN = 1 << 22  # values that are looked at together
Blocks = Callable[[str], Iterator[tuple[np.ndarray, np.ndarray]]]


class Rows(NamedTuple):
    """Rows one behind the other, in mapped files.

    Attributes:
        indptr: int64 [N + 1], where each row begins and ends.
        values: int32 [E], ascending in each row.
    """

    indptr: np.ndarray
    values: np.ndarray

    def runs(self, counter: Counter = NOBODY) -> Iterator[tuple[int, int]]:
        """``(first, last)`` of all rows, a few million values together: a second's work.

        Rows count when they have been dealt with.
        """
        marks = np.arange(_RUN, len(self.values) + _RUN, _RUN)
        ends = np.searchsorted(self.indptr[:-1], marks)
        for first, last in pairwise(np.unique([0, *ends, len(self.indptr) - 1]).tolist()):
            yield first, last
            counter.add(last - first)


def sort_rows(
    blocks: Blocks, num_rows: int, folder: Path, progress: Progress = silent, *, unique: bool = True
) -> Rows:
    """The pairs of all blocks as rows; with ``unique`` a pair that comes again is dropped.

    Args:
        blocks: starts over at each call and gives int32 rows (below ``num_rows``) and values, the
            same each time, a block's pairs at once. It is called with the name of what is
            done with them, and tells of its progress itself.
        folder: where ``indptr.npy`` and ``values.npy`` come to lie; needs 12 bytes a pair, of
            which 4 remain.

    Memory: 4 bytes a row, 4 a pair of the largest bucket. Raises ``OSError`` for a full disk.
    """
    counts = np.zeros(num_rows, np.uint32)
    for rows, _ in blocks("counting edges"):
        _count(rows, counts)
    first_rows = _bucket_bounds(counts)
    bounds = zip(first_rows[:-1].tolist(), first_rows[1:].tolist())
    sizes = np.array([counts[low:high].sum(dtype=np.int64) for low, high in bounds], np.int64)
    spread_path = folder / "spread.npy"
    pairs = create_array(spread_path, np.int32, (int(sizes.sum()), 2))
    _spread(blocks, first_rows, sizes, pairs)
    values_path = folder / "values.npy"
    values = create_array(values_path, np.int32, (len(pairs),))
    counter = Counter(progress, "sorting edges", len(pairs))
    kept = _order(pairs, counts, first_rows, values, unique, counter)
    del pairs
    spread_path.unlink()
    indptr = create_array(folder / "indptr.npy", np.int64, (num_rows + 1,))
    np.cumsum(counts, dtype=np.int64, out=indptr[1:])
    return Rows(indptr, values[:kept])


def _bucket_bounds(counts: np.ndarray) -> np.ndarray:
    """int64 [buckets + 1], first row of each bucket; a longer row is a bucket of its own."""
    bounds = np.empty(2 + 2 * (int(counts.sum(dtype=np.int64)) // BUCKET_PAIRS + 1), np.int64)
    return bounds[: _cut_rows(counts, BUCKET_PAIRS, bounds)].copy()


def _spread(blocks: Blocks, first_rows: np.ndarray, sizes: np.ndarray, pairs: np.ndarray) -> None:
    cursor = np.cumsum(sizes) - sizes
    for rows, values in blocks("spreading edges"):
        _spread_block(rows, values, first_rows, cursor, pairs)


def _order(
    pairs: np.ndarray,
    counts: np.ndarray,
    first_rows: np.ndarray,
    values: np.ndarray,
    unique: bool,
    counter: Counter,
) -> int:
    """Fills ``values`` bucket by bucket and sets ``counts`` to what is kept; returns its sum."""
    read = kept = 0
    for low, high in zip(first_rows[:-1].tolist(), first_rows[1:].tolist()):
        own = counts[low:high]
        size = int(own.sum(dtype=np.int64))
        room = np.empty(size, np.int32)
        starts = np.cumsum(own, dtype=np.int64) - own
        _place(pairs[read : read + size], low, starts.copy(), room)
        kept += _sort_and_keep(room, starts, own, unique, values[kept:])
        read += size
        counter.add(size)
    return kept


@compiled
def _count(rows, counts):
    for i in range(len(rows)):
        counts[rows[i]] += np.uint32(1)


@compiled
def _cut_rows(counts, size, bounds):
    bounds[0] = 0
    found, total = 1, 0
    for row in range(len(counts)):
        if total + counts[row] > size and total > 0:
            bounds[found] = row
            found += 1
            total = 0
        total += counts[row]
    if len(counts):
        bounds[found] = len(counts)
        found += 1
    return found


@compiled
def _spread_block(rows, values, first_rows, cursor, pairs):
    last = len(first_rows) - 1
    for i in range(len(rows)):
        low, high = 0, last
        while low < high - 1:
            middle = (low + high) >> 1
            if first_rows[middle] <= rows[i]:
                low = middle
            else:
                high = middle
        at = cursor[low]
        pairs[at, 0] = rows[i]
        pairs[at, 1] = values[i]
        cursor[low] = at + 1


@compiled
def _place(pairs, first_row, cursor, room):
    for i in range(len(pairs)):
        row = pairs[i, 0] - first_row
        room[cursor[row]] = pairs[i, 1]
        cursor[row] += 1


@compiled
def _sort_and_keep(room, starts, counts, unique, out):
    kept = 0
    for row in range(len(starts)):
        size = np.int64(counts[row])
        own = room[starts[row] : starts[row] + size]
        _sort(own)
        before = kept
        for i in range(size):
            if not unique or i == 0 or own[i] != own[i - 1]:
                out[kept] = own[i]
                kept += 1
        counts[row] = np.uint32(kept - before)
    return kept


@compiled
def _sort(own):
    """Ascending, in place: by insertion where it is short, else as a heap."""
    size = len(own)
    if size <= 48:
        for i in range(1, size):
            value = own[i]
            j = i - 1
            while j >= 0 and own[j] > value:
                own[j + 1] = own[j]
                j -= 1
            own[j + 1] = value
        return
    for start in range(size // 2 - 1, -1, -1):
        _sift(own, start, size)
    for end in range(size - 1, 0, -1):
        own[0], own[end] = own[end], own[0]
        _sift(own, 0, end)


@compiled
def _sift(own, root, end):
    value = own[root]
    while True:
        child = 2 * root + 1
        if child >= end:
            break
        if child + 1 < end and own[child + 1] > own[child]:
            child += 1
        if own[child] <= value:
            break
        own[root] = own[child]
        root = child
    own[root] = value
