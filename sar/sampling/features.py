"""Rows of node and edge features, of whichever rank owns them, in one exchange; a cache of some."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from sar.kernels.numbering import Numbering
from sar.kernels.sampling import copy_rows, split
from sar.options import closest
from sar.partition.book import PartitionBook
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData
from sar.sampling.buffers import IDLE, BufferPool, Scratch, padded
from sar.sampling.exchange import Exchange, Kind, id_bounds

Rows = dict[Kind, dict[str, Tensor]]
_Split = tuple[Tensor, Tensor, list[int]]  # as sar.kernels.sampling.split gives it
_NONE = torch.empty(0, dtype=torch.int64)


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


@dataclass
class _Table:
    """This rank's rows of a node type or a relation, by field, and cached rows of other ranks."""

    bounds: Tensor
    fields: dict[str, Tensor]
    cached: tuple[Numbering, dict[str, Tensor]] | None = None

    def split(self, ids: Tensor) -> _Split:
        """Split ids by owner; cached ones are those of one more owner, the last."""
        return split(ids, self.bounds, self.cached[0].find(ids) if self.cached else None)


class FeatureTables:
    """The features that batches have, in memory; made collectively.

    Args:
        exchange: how ranks ask each other.
        fields: per node type and relation, the names of features; ``None``: all there are.

    Attributes:
        stats: of the cache, see :meth:`keep`.

    Raises, on every rank, ``ValueError`` for a type or a field that is missing and for fields that
    differ between ranks.
    """

    def __init__(
        self,
        data: PartitionData,
        exchange: Exchange,
        fields: Mapping[Kind, Sequence[str]] | None = None,
    ) -> None:
        self._exchange, self._tables, self.stats = exchange, dict[Kind, _Table](), CacheStats()
        self._pool, self._sent, self._came = BufferPool(IDLE), Scratch(), Scratch()
        alike = dict[str, object]()
        with exchange.group.agreed("features", alike):
            self._tables = _tables(data, fields)
            for kind, table in self._tables.items():
                columns = table.fields.items()
                alike[str(kind)] = [(n, str(one.dtype), one.shape[1:]) for n, one in columns]

    @property
    def kinds(self) -> list[Kind]:
        """Node types and relations of which there are features."""
        return [kind for kind, table in self._tables.items() if table.fields]

    def fetch(self, ids: Mapping[Kind, Tensor]) -> Rows:
        """The rows of some nodes and edges, per kind and field; collective.

        Args:
            ids: int64 [n] per node type and relation, as :func:`id_bounds` numbers them; they need
                not be owned, nor differ.
        """
        exchange, rank, size = self._exchange, self._exchange.group.rank, self._exchange.group.size
        tables = {kind: self._tables[kind] for kind in self.kinds}
        parts = {kind: table.split(ids.get(kind, _NONE)) for kind, table in tables.items()}
        self._count(parts)
        asked = exchange.questions([rows.split(sizes) for _, rows, sizes in parts.values()])
        give = [_columns(tables.values(), map(len, their)) for their in asked]
        wanted = [[0 if p == rank else one[2][p] for one in parts.values()] for p in range(size)]
        take = [_columns(tables.values(), counts) for counts in wanted]
        reply = self._sent.take(sum(map(_nbytes, give)))
        views = _views(reply, chain(*give))
        for their in asked:
            for table, rows in zip(tables.values(), their, strict=True):
                for column in table.fields.values():
                    copy_rows(next(views), None, column, rows)
        nbytes = [*map(_nbytes, take)]
        came = self._came.take(sum(nbytes))
        exchange.send(reply, [*map(_nbytes, give)], nbytes, came)
        return self._joined(parts, _views(came, chain(*take)))

    def _joined(self, parts: Mapping[Kind, _Split], views: Iterator[Tensor]) -> Rows:
        """Rows that came, in views owner by owner, own and cached ones, in the ids' order."""
        found: Rows = {}
        for kind, (order, _, _) in parts.items():
            found[kind] = {
                name: self._pool.take((len(order), *column.shape[1:]), column.dtype)
                for name, column in self._tables[kind].fields.items()
            }
        group = self._exchange.group
        for owner in range(group.size):
            for kind, (order, rows, sizes) in parts.items():
                to, own = order.split(sizes)[owner], rows.split(sizes)[owner]
                for name, column in self._tables[kind].fields.items():
                    view = next(views)
                    is_here = owner == group.rank
                    copy_rows(found[kind][name], to, *((column, own) if is_here else (view, None)))
        for kind, (order, rows, sizes) in parts.items():
            cached = self._tables[kind].cached
            for name, column in cached[1].items() if cached else ():
                copy_rows(found[kind][name], order.split(sizes)[-1], column, rows.split(sizes)[-1])
        return found

    def keep(self, draws: Iterable[Mapping[str, Tensor]], budget: int) -> None:
        """Keep as many bytes of other ranks' rows, those that draws (per node type, distinct ids)
        need most often; collective."""
        widths = {n: self._width(n) for n in self.kinds if isinstance(n, str) and self._width(n)}
        if not widths:  # on any rank
            return
        numberings = {ntype: Numbering() for ntype in widths}
        counts, rank = dict.fromkeys(widths, _NONE), self._exchange.group.rank
        for nodes in draws:
            for ntype, numbering in numberings.items():
                first, last = self._tables[ntype].bounds[rank:][:2].tolist()
                ids = nodes[ntype]
                numbers = numbering.number(ids[(ids < first) | (ids >= last)])
                new = counts[ntype].new_zeros(numbering.count - len(counts[ntype]))
                known = torch.cat([counts[ntype], new])
                counts[ntype] = known.index_add_(0, numbers, torch.ones_like(numbers))
        found = _hottest({n: one.nodes() for n, one in numberings.items()}, counts, widths, budget)
        kept: dict[Kind, Tensor] = {n: one for n, one in found.items() if len(one)}
        for kind, rows in self.fetch(kept).items():
            if kind in kept:
                numbering = Numbering()
                numbering.number(kept[kind])
                self._tables[kind].cached = numbering, rows
                self.stats.nbytes += sum(column.nbytes for column in rows.values())

    def _count(self, parts: Mapping[Kind, _Split]) -> None:
        if not any(table.cached for table in self._tables.values()):
            return
        for kind, (order, _, sizes) in parts.items():
            if isinstance(kind, str):
                self.stats.needed += len(order) - sizes[self._exchange.group.rank]
                self.stats.had += sizes[-1] if self._tables[kind].cached else 0

    def _width(self, kind: Kind) -> int:
        return sum(map(_row_bytes, self._tables[kind].fields.values()))


def _columns(tables: Iterable[_Table], counts: Iterable[int]) -> list[tuple[Tensor, int]]:
    """(a column of a table, how many rows of it), for all tables and fields."""
    pairs = zip(tables, counts, strict=True)
    return [(column, count) for table, count in pairs for column in table.fields.values()]


def _nbytes(columns: Iterable[tuple[Tensor, int]]) -> int:
    return sum(padded(count * _row_bytes(column)) for column, count in columns)


def _views(message: Tensor, columns: Iterable[tuple[Tensor, int]]) -> Iterator[Tensor]:
    """Views [count, ...] of a message, one for each of the columns, one behind the other."""
    at = 0
    for column, count in columns:
        size = count * _row_bytes(column)
        yield message[at : at + size].view(column.dtype).view(count, *column.shape[1:])
        at += padded(size)


def _row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def _by_kind(
    fields: Mapping[Kind, Sequence[str]], book: PartitionBook
) -> dict[Kind, Sequence[str]]:
    """``fields`` by canonical relations; raises ``ValueError`` for types that there are not."""
    found = dict[Kind, Sequence[str]]()
    for kind, names in fields.items():
        if isinstance(names, str):
            raise ValueError(f"fields: got {names!r} of {kind!r}, expected a list of names")
        try:
            known = kind if kind in book.ntypes else book.canonical(kind)
        except ValueError as error:
            types = ", ".join(map(repr, book.ntypes))
            told = f"got {kind!r}, expected one of {types} or a relation: {error}"
            raise ValueError(f"fields: {told}") from None
        if known in found:
            raise ValueError(f"fields: got {list(fields)}, expected each relation once")
        found[known] = names
    return found


def column_name(store: FeatureStore, prefix: str, name: str, told: str) -> str:
    """The full name of a column; raises ``ValueError`` that begins with ``told`` for none."""
    if prefix + name not in store:
        there = sorted(key.removeprefix(prefix) for key in store if key.startswith(prefix))
        hint = closest(name, there, quoted=True)
        raise ValueError(f"{told}, expected one of {', '.join(there) or 'none'}{hint}")
    return prefix + name


def column_of(data: PartitionData, kind: Kind, name: str, told: str) -> tuple[Tensor, str]:
    """A column of a node type or a relation, and its full name; raises as :func:`column_name`."""
    store, prefix = columns_of(data, kind)
    full = column_name(store, prefix, name, told)
    return store[full], full


def columns_of(data: PartitionData, kind: Kind) -> tuple[FeatureStore, str]:
    """The store of a kind's columns, and what their names begin with."""
    if isinstance(kind, str):
        return data.node_features, f"{kind}/"
    return data.edge_features, ":".join(kind) + "/"


def _tables(data: PartitionData, fields: Mapping[Kind, Sequence[str]] | None) -> dict[Kind, _Table]:
    """A table for every kind, also for those of which no field is wanted."""
    kinds: list[Kind] = [*data.book.ntypes, *data.book.canonical_etypes]
    found = {kind: _Table(id_bounds(data.book, kind), {}) for kind in kinds}
    chosen = {} if fields is None else _by_kind(fields, data.book)
    for kind in kinds if fields is None else chosen:
        store, prefix = columns_of(data, kind)
        there = sorted(key.removeprefix(prefix) for key in store if key.startswith(prefix))
        for name in chosen.get(kind, there):
            column, _ = column_of(data, kind, name, f"fields: got {name!r} of {kind!r}")
            found[kind].fields[name] = column.contiguous()
    return found


def _hottest(
    ids: Mapping[str, Tensor], counts: Mapping[str, Tensor], widths: Mapping[str, int], budget: int
) -> dict[str, Tensor]:
    """Per node type, the ids that are needed most often for a row's bytes, within ``budget``."""
    worth, size, kinds = [], [], []
    for kind, (ntype, one) in enumerate(ids.items()):
        worth.append(counts[ntype].double() / widths[ntype])
        size.append(torch.full_like(one, widths[ntype]))
        kinds.append(torch.full_like(one, kind))
    order = torch.cat(worth).argsort(descending=True, stable=True)
    fits = torch.cat(size)[order].cumsum(0) <= budget
    order = order[fits]
    chosen, of = torch.cat([*ids.values()])[order], torch.cat(kinds)[order]
    return {ntype: chosen[of == kind] for kind, ntype in enumerate(ids)}
