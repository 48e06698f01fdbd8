"""How far a run is: what takes time says so, block after block.

Names of what is done, in the order of a run:

=============================  ============================================================
reading node ids, edges,       rows of tables, or of partitions; the total of CSV is unknown
edge data, node data
checking data, checking ids    rows of columns, ends of edges
counting, copying, finding      edges that are transformed; those that turned twins come from
copying edge data
counting in-edges              of the graph that is cut
comparing directions           edges: whether they come in both
counting, spreading edges      of either
sorting edges                  neighbors, or edges; pairs of nodes
finding clusters               nodes, for all rounds
sampling, joining clusters     clusters, the coarse graph's nodes
cutting clusters, the graph    nodes, all at once at the end
refining the cut, sweep 1      nodes; one for each sweep
counting halo rows             nodes
following draws                edges, for each hop; of method "hotness"
measuring the cut              edges
digesting the graph            bytes
writing nodes, edges, parts    nodes, edges, parts
writing graphs                 ends of edges, thrice
=============================  ============================================================

The same name may come again and then begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much; 0: unknown
T = TypeVar("T")


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


class Counter:
    """How much of one thing is done.

    Args:
        what: a name of those above.
        total: in the end; 0: unknown.
    """

    def __init__(self, progress: Progress, what: str, total: int = 0) -> None:
        self._progress, self._what, self._total, self._done = progress, what, total, 0
        progress(what, 0, total)

    def add(self, count: int) -> None:
        """So much more is done."""
        self._done += count
        self._progress(self._what, self._done, self._total)


NOBODY = Counter(silent, "")


def watched(blocks: Iterable[T], counter: Counter, size_of: Callable[[T], int]) -> Iterator[T]:
    """The blocks; each counts when the next one is asked for."""
    for block in blocks:
        yield block
        counter.add(size_of(block))
