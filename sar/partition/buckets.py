"""Pairs (row, value) in any order as rows of ascending values, for more pairs than fit in memory.

A first pass counts each row's pairs. Consecutive rows with about `BUCKET_PAIRS` pairs together make
a bucket. A second pass spreads the pairs over a file, to their buckets, each of which is then
sorted by itself.
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

BUCKET_PAIRS = 1 << 23
_RUN = 1 << 22  # values that are looked at together
Blocks = Callable[[str], Iterator[tuple[np.ndarray, np.ndarray]]]


class Rows(NamedTuple):
    """Rows one behind the other in mapped files: int64 ``indptr`` [N + 1], where each begins and
    ends, and int32 ``values`` [E], ascending in each row."""

    indptr: np.ndarray
    values: np.ndarray

    def runs(self, counter: Counter = NOBODY) -> Iterator[tuple[int, int]]:
        """``(first, last)`` rows of runs of a few million values; rows count when dealt with."""
        marks = np.arange(_RUN, len(self.values) + _RUN, _RUN)
        ends = np.searchsorted(self.indptr[:-1], marks)
        for first, last in pairwise(np.unique([0, *ends, len(self.indptr) - 1]).tolist()):
            yield first, last
            counter.add(last - first)


def sort_rows(
    blocks: Blocks, num_rows: int, folder: Path, progress: Progress = silent, *, unique: bool = True
) -> Rows:
    """The pairs of all blocks as rows; with ``unique`` a pair that comes again is dropped.

    ``blocks`` is called once per pass with the pass's name, gives the same int32 rows (below
    ``num_rows``) and values (0 or more) each time, and reports its own progress. ``folder`` gets
    ``indptr.npy`` and ``values.npy``; it needs 12 bytes a pair, of which 4 remain.

    Memory: 4 bytes a row, 8 a pair of the largest bucket. Raises ``OSError`` for a full disk.
    """
    counts = np.zeros(num_rows, np.uint32)
    for rows, _ in blocks("counting edges"):
        count_ids(rows, 0, counts)
    indptr = create_array(folder / "indptr.npy", np.int64, (num_rows + 1,))
    np.cumsum(counts, dtype=np.int64, out=indptr[1:])
    first = [0]  # row of each bucket; a longer row is a bucket of its own
    while first[-1] < num_rows:
        most = np.searchsorted(indptr, indptr[first[-1]] + BUCKET_PAIRS, side="right")
        first.append(max(first[-1] + 1, int(most) - 1))
    bounds = indptr[first]
    pairs = create_array(folder / "spread.npy", np.int64, (int(bounds[-1]),))
    cursor, first_rows = bounds.copy(), np.array(first)
    for block in blocks("spreading edges"):
        _spread(*block, first_rows, cursor, pairs)
    values = create_array(folder / "values.npy", np.int32, (len(pairs),))
    counter, kept = Counter(progress, "sorting edges", len(pairs)), 0
    for low, high in pairwise(bounds.tolist()):
        kept += _keep(np.sort(pairs[low:high]), unique, counts, values[kept:])
        counter.add(high - low)
    del pairs
    (folder / "spread.npy").unlink()
    np.cumsum(counts, dtype=np.int64, out=indptr[1:])
    return Rows(indptr, values[:kept])


@compiled
def count_ids(ids, offset, counts):
    """Add to ``counts`` how often each id comes, ``offset`` places further."""
    for i in range(len(ids)):
        counts[ids[i] + offset] += 1


@compiled
def _spread(rows, values, first_rows, cursor, pairs):
    """Put each pair, as ``row << 32 | value``, at the next place of its bucket in ``pairs``."""
    last = len(first_rows) - 1
    for i in range(len(rows)):
        low, high = 0, last
        while low < high - 1:
            middle = (low + high) >> 1
            if first_rows[middle] <= rows[i]:
                low = middle
            else:
                high = middle
        pairs[cursor[low]] = (np.int64(rows[i]) << 32) | values[i]
        cursor[low] += 1


@compiled
def _keep(pairs, unique, counts, values):
    """Unpack sorted ``pairs`` into ``values``, without repeats if ``unique``; returns the count."""
    kept = 0
    for i in range(len(pairs)):
        if unique and i and pairs[i] == pairs[i - 1]:
            counts[pairs[i] >> 32] -= 1
        else:
            values[kept] = np.int32(pairs[i])
            kept += 1
    return kept
