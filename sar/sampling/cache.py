"""Rows of other ranks' features that this one keeps: those that draws need most often."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sar.config import parse_bytes
from sar.kernels.numbering import Numbering
from sar.partition.book import PartitionBook
from sar.sampling.features import FeatureTables, Kind
from sar.sampling.options import LoaderOptions
from sar.sampling.sampler import Sample

Rows = dict[Kind, dict[str, Tensor]]


@dataclass
class CacheStats:
    """What a cache was asked for since it was made.

    Attributes:
        nbytes: of the rows that it keeps.
        needed: rows of other ranks that batches needed.
        had: how many of them it had.
    """

    nbytes: int = 0
    needed: int = 0
    had: int = 0

    @property
    def hit_rate(self) -> float:
        """From 0 to 1; 0 before anything was needed."""
        return self.had / self.needed if self.needed else 0.0


class CachedTables:
    """Tables of which some rows that others own are kept as well; read-only.

    Args:
        ids: per node type, int64 [k] of the rows that are kept; they are fetched, collectively.
    """

    def __init__(self, tables: FeatureTables, ids: Mapping[Kind, Tensor]) -> None:
        self._tables, self.stats, self._counted = tables, CacheStats(), list(ids)
        wanted = {kind: one for kind, one in ids.items() if len(one)}
        fetched = tables.fetch(wanted)
        self._kept = dict[Kind, tuple[Numbering, dict[str, Tensor]]]()
        for kind, one in wanted.items():
            numbering = Numbering()
            numbering.number(one)
            self._kept[kind] = numbering, fetched[kind]
            self.stats.nbytes += sum(rows.nbytes for rows in fetched[kind].values())

    def fetch(self, ids: Mapping[Kind, Tensor]) -> Rows:
        """As :meth:`FeatureTables.fetch`, the same on all ranks; collective."""
        kept = dict[Kind, tuple[Tensor, dict[str, Tensor]]]()
        for kind, (numbering, rows) in self._kept.items():
            found = numbering.find(ids[kind])
            self.stats.had += int((found >= 0).sum())
            kept[kind] = found, rows
        if kept:
            self.stats.needed += sum(len(self._tables.others(n, ids[n])) for n in self._counted)
        return self._tables.fetch(ids, kept)


def cached(
    tables: FeatureTables,
    book: PartitionBook,
    options: LoaderOptions,
    presampled: Callable[[], Iterator[Sample]],
) -> CachedTables:
    """Tables with a cache as large as the options allow; collective.

    Args:
        presampled: what is drawn to find out which rows are needed, where there is a cache.
    """
    if not options.cache:
        return CachedTables(tables, {})
    counters = {ntype: _Counter() for ntype in book.ntypes if tables.row_bytes(ntype)}
    for sample in presampled():
        for ntype, counter in counters.items():
            counter.add(tables.others(ntype, sample.nodes[ntype]))
    return CachedTables(tables, _hottest(counters, tables, parse_bytes(options.cache, "cache")))


class _Counter:
    """How often ids came."""

    def __init__(self) -> None:
        self._numbering, self._counts = Numbering(), np.zeros(0, np.int64)

    def add(self, ids: Tensor) -> None:
        """Count each once."""
        numbers = self._numbering.number(ids).numpy()
        more = self._numbering.count - len(self._counts)
        self._counts = np.append(self._counts, np.zeros(more, np.int64))
        np.add.at(self._counts, numbers, 1)

    def counted(self) -> tuple[Tensor, Tensor]:
        """Ids, and how often each came."""
        return self._numbering.nodes(), torch.from_numpy(self._counts)


def _hottest(
    counters: Mapping[str, _Counter], tables: FeatureTables, budget: int
) -> dict[Kind, Tensor]:
    """Per node type, the ids that came most often for the bytes of their rows."""
    ids, worth, size, kinds = [], [], [], []
    for kind, (ntype, counter) in enumerate(counters.items()):
        one, counts = counter.counted()
        width = tables.row_bytes(ntype)
        ids.append(one)
        worth.append(counts.double() / width)
        size.append(torch.full_like(one, width))
        kinds.append(torch.full_like(one, kind))
    order = torch.cat(worth).argsort(descending=True, stable=True)
    fits = torch.cat(size)[order].cumsum(0) <= budget
    order = order[fits]
    chosen, of = torch.cat(ids)[order], torch.cat(kinds)[order]
    return {ntype: chosen[of == kind] for kind, ntype in enumerate(counters)}
