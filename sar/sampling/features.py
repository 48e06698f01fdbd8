"""Rows of node and edge features, of whichever rank owns them, in one exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from sar.kernels.sampling import copy_rows, split
from sar.partition.book import EType, PartitionBook
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData
from sar.sampling.leases import IDLE, Grown, Leases
from sar.sampling.structure import Ids, edge_ids, node_ids
from sar.sampling.swap import Swap

Kind = str | EType
Kept = tuple[Tensor, dict[str, Tensor]]
_ALIGNMENT = 8  # bytes: where a field's rows begin in a message


@dataclass
class _Table:
    """The fields of a node type or a relation that this rank owns rows of."""

    ids: Ids
    fields: dict[str, Tensor]


class FeatureTables:
    """The features that batches have, in memory; made collectively.

    Args:
        swap: how ranks ask each other.
        fields: per node type and relation, the names of features; ``None``: all there are.

    Raises, on every rank, ``ValueError`` for a type or a field that is missing and for fields that
    differ between ranks.
    """

    def __init__(
        self, data: PartitionData, swap: Swap, fields: Mapping[Kind, Sequence[str]] | None = None
    ) -> None:
        self._swap, self._tables, error = swap, dict[Kind, _Table](), None
        self._leases, self._sent, self._came = Leases(IDLE), Grown(), Grown()
        try:
            self._tables = _tables(data, None if fields is None else _by_kind(fields, data.book))
        except Exception as caught:  # any, too little memory as well: the others would wait
            error = caught
        layout = {
            kind: [(name, str(rows.dtype), rows.shape[1:]) for name, rows in table.fields.items()]
            for kind, table in self._tables.items()
        }
        swap.group.agree(error, "features", layout)

    @property
    def kinds(self) -> list[Kind]:
        """Node types and relations of which there are features."""
        return [kind for kind, table in self._tables.items() if table.fields]

    def row_bytes(self, kind: Kind) -> int:
        """Of a row of all fields."""
        return sum(map(_row_bytes, self._tables[kind].fields.values()))

    def others(self, kind: Kind, ids: Tensor) -> Tensor:
        """Those of some ids that other ranks own."""
        first, last = self._tables[kind].ids.bounds[self._swap.group.rank :][:2].tolist()
        return ids[(ids < first) | (ids >= last)]

    def fetch(
        self, ids: Mapping[Kind, Tensor], kept: Mapping[Kind, Kept] = MappingProxyType({})
    ) -> dict[Kind, dict[str, Tensor]]:
        """The rows of some nodes and edges, per kind and field; collective.

        Args:
            ids: int64 [n] per node type and relation, as :mod:`sar.sampling.structure` numbers
                them; they need not be owned, nor differ.
            kept: per kind, int64 [n] which row of some that are here each of the ids has, or -1;
                and these rows.
        """
        kinds = self.kinds
        none = torch.empty(0, dtype=torch.int64)
        here = [kept.get(kind, (None, {}))[0] for kind in kinds]
        parts = [
            split(ids.get(kind, none), self._tables[kind].ids.bounds, found)
            for kind, found in zip(kinds, here, strict=True)
        ]
        swap, rank, size = self._swap, self._swap.group.rank, self._swap.group.size
        wanted = torch.tensor([sizes[:size] for _, _, sizes in parts], dtype=torch.int64)
        wanted = wanted.view(len(kinds), size).T.contiguous()
        wanted[rank] = 0
        asked = swap.sizes(wanted)
        by_owner = [rows.split(sizes) for _, rows, sizes in parts]
        others = [p for p in range(size) if p != rank]
        rows = [torch.empty(0, dtype=torch.int32), *(one[p] for p in others for one in by_owner)]
        came = swap.send(torch.cat(rows), wanted.sum(1).tolist(), asked.sum(1).tolist())
        give, take = (
            [self._bytes(kinds, counts) for counts in one.tolist()] for one in (asked, wanted)
        )
        reply = self._sent.take(sum(give))
        at = 0
        for theirs, counts in zip(came.split(asked.sum(1).tolist()), asked.tolist(), strict=True):
            for kind, mine in zip(kinds, theirs.split(counts), strict=True):
                for table in self._tables[kind].fields.values():
                    view, at = _view(reply, at, table, len(mine))
                    copy_rows(view, None, table, mine)
        reply = swap.send_much(reply, give, take, self._came.take(sum(take)))
        return self._joined(kinds, parts, reply, kept)

    def _joined(
        self,
        kinds: list[Kind],
        parts: list[tuple[Tensor, Tensor, list[int]]],
        reply: Tensor,
        kept: Mapping[Kind, Kept],
    ) -> dict[Kind, dict[str, Tensor]]:
        found: dict[Kind, dict[str, Tensor]] = {}
        for kind, (order, _, _) in zip(kinds, parts, strict=True):
            fields = self._tables[kind].fields
            shapes = {name: (len(order), *rows.shape[1:]) for name, rows in fields.items()}
            found[kind] = {
                n: self._leases.take(shape, fields[n].dtype) for n, shape in shapes.items()
            }
        at, rank = 0, self._swap.group.rank
        for p in range(self._swap.group.size):
            for kind, (order, rows, sizes) in zip(kinds, parts, strict=True):
                to, own = order.split(sizes)[p], rows.split(sizes)[p]
                for name, table in self._tables[kind].fields.items():
                    if p != rank:
                        table, at = _view(reply, at, table, sizes[p])
                    copy_rows(found[kind][name], to, table, own if p == rank else None)
        for kind, (order, rows, sizes) in zip(kinds, parts, strict=True):
            if kind in kept:
                to, own = order.split(sizes)[-1], rows.split(sizes)[-1]
                for name, table in kept[kind][1].items():
                    copy_rows(found[kind][name], to, table, own)
        return found

    def _bytes(self, kinds: list[Kind], counts: list[int]) -> int:
        tables = zip(kinds, counts, strict=True)
        return sum(
            _padded(n * _row_bytes(table))
            for kind, n in tables
            for table in self._tables[kind].fields.values()
        )


def _view(message: Tensor, at: int, table: Tensor, count: int) -> tuple[Tensor, int]:
    """[count, ...] rows like the table's at a place of a message, and where they end."""
    size = count * _row_bytes(table)
    rows = message[at : at + size].view(table.dtype).view(count, *table.shape[1:])
    return rows, at + _padded(size)


def _row_bytes(table: Tensor) -> int:
    return math.prod(table.shape[1:]) * table.element_size()


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _by_kind(
    fields: Mapping[Kind, Sequence[str]], book: PartitionBook
) -> dict[Kind, Sequence[str]]:
    """The same per node type and canonical relation."""
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


def _tables(data: PartitionData, fields: Mapping[Kind, Sequence[str]] | None) -> dict[Kind, _Table]:
    book, found = data.book, dict[Kind, _Table]()
    for ntype in book.ntypes:
        read = _read(data.node_features, ntype, f"{ntype}/", fields)
        found[ntype] = _Table(node_ids(book, ntype), read)
    for etype in book.canonical_etypes:
        read = _read(data.edge_features, etype, ":".join(etype) + "/", fields)
        found[etype] = _Table(edge_ids(book, etype), read)
    return found


def _read(
    store: FeatureStore, kind: Kind, prefix: str, fields: Mapping[Kind, Sequence[str]] | None
) -> dict[str, Tensor]:
    there = sorted(key[len(prefix) :] for key in store if key.startswith(prefix))
    chosen = there if fields is None else list(fields.get(kind, ()))
    for name in chosen:
        if name not in there:
            raise ValueError(
                f"fields: got {name!r} of {kind!r}, expected one of {', '.join(there) or 'none'}"
            )
    return {name: store[prefix + name].contiguous() for name in chosen}
