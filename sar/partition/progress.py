"""How far a run is: what takes time says so, block after block.

Names of what is done, about in the order of a run, and what is counted:

reading node ids, reading edges, reading edge data, reading node data
    rows of tables, or of partitions (edges there twice); the total of CSV is unknown
checking data, checking ids
    rows of columns; ends of edges
counting edges, spreading edges, sorting edges, copying edges, finding edges, copying edge data
    edges that are transformed, or that are cut or written; copied are destinations' rows
digesting the graph
    bytes
counting in-edges, comparing directions
    edges
finding clusters
    nodes, of all rounds together
sampling clusters, joining clusters
    nodes of the coarse graph
cutting clusters, cutting the graph
    nodes, all at once at the end
refining the cut, sweep 1; counting halo rows
    nodes; sweeps go on as long as they are worth it
following draws
    edges, at each hop
measuring the cut
    edges
writing nodes, writing edges, writing graphs, writing parts
    nodes, edges, three times the edges, parts

The same name may come again and then begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much; 0: unknown
T = TypeVar("T")
BLOCK = 1 << 20  # nodes or edges that are looked at together
BLOCK_BYTES = 8 << 20  # of data that are


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


class Counter:
    """How much of one thing, ``what`` of the names above, is done; a ``total`` of 0: unknown."""

    def __init__(self, progress: Progress, what: str, total: int = 0) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        progress(what, 0, total)

    def add(self, count: int) -> None:
        self._done += count
        self._progress(self._what, self._done, self._total)


NOBODY = Counter(silent, "")


def blocks(
    total: int, counter: Counter = NOBODY, size: int | None = None
) -> Iterator[tuple[int, int]]:
    """``(low, high)`` of runs of rows, which count when they have been dealt with."""
    step = size or BLOCK
    for low in range(0, total, step):
        high = min(low + step, total)
        yield low, high
        counter.add(high - low)


def rows_in(row_bytes: int, room: int | None = None) -> int:
    """How many rows of so many bytes are read together: a few MB, or ``room``."""
    return max(1, (room or BLOCK_BYTES) // max(1, row_bytes))


def watched(blocks: Iterable[T], counter: Counter, size_of: Callable[[T], int]) -> Iterator[T]:
    """The blocks; each counts when the next one is asked for."""
    for block in blocks:
        yield block
        counter.add(size_of(block))
