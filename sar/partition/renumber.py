"""From original ids to ranges: part after part, inside a part by type and by original id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sar.errors import PartitionError
from sar.partition.book import EType, PartitionBook
from sar.partition.mapped import MappedTensor
from sar.partition.shards import ShardEdges
from sar.partition.stored import Folder, StoredEdges, blocks, check_ids


def node_counts(folder: Folder) -> np.ndarray:
    """int64 [P, node types]."""
    counts = np.zeros((folder.num_parts, len(folder.ntypes)), np.int64)
    for column, ntype in enumerate(folder.ntypes):
        for _, parts in _owner_blocks(folder, ntype):
            counts[:, column] += np.bincount(parts, minlength=folder.num_parts)
    return counts


def edge_counts(folder: Folder) -> np.ndarray:
    """int64 [P, edge types] of edges that end in each part's nodes."""
    counts = np.zeros((folder.num_parts, len(folder.etypes)), np.int64)
    owners = {ntype: folder.owners(ntype) for ntype in folder.ntypes}
    for part in range(folder.num_parts):
        for column, etype in enumerate(folder.etypes):
            dst = folder.edges(etype, part).dst
            if folder.by_destination:
                counts[part, column] = len(dst)
                continue
            owner = owners[etype[2]]
            for low, high in blocks(len(dst)):
                ids = dst.ints(low, high)
                check_ids(ids, len(owner), dst.file.path)
                counts[:, column] += np.bincount(owner.take(ids), minlength=folder.num_parts)
    return counts


def ranges(counts: np.ndarray) -> Iterator[np.ndarray]:
    """Per type, int64 [P, 2], of counts [P, types]."""
    stops = counts.ravel().cumsum().reshape(counts.shape)
    for column in range(counts.shape[1]):
        yield np.stack([stops[:, column] - counts[:, column], stops[:, column]], axis=1)


def own_ids(folder: Folder, ntype: str, part: int) -> np.ndarray:
    """int64 [n], ascending: original ids of a part's nodes."""
    found = [low + np.flatnonzero(parts == part) for low, parts in _owner_blocks(folder, ntype)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


class NodeTable(NamedTuple):
    """The part of each node of a type and, int32 [N], its row there."""

    owner: MappedTensor
    row: np.ndarray


def node_table(folder: Folder, ntype: str) -> NodeTable:
    """Rows are counted in order of original ids."""
    owner = folder.owners(ntype)
    row, before = np.empty(len(owner), np.int32), np.zeros(folder.num_parts, np.int64)
    for low, parts in _owner_blocks(folder, ntype):
        sizes = np.bincount(parts, minlength=folder.num_parts)
        order = np.argsort(parts, kind="stable")
        first = before - (sizes.cumsum() - sizes)
        row[low + order] = np.arange(len(parts)) + first.repeat(sizes)
        before += sizes
    return NodeTable(owner, row)


def _owner_blocks(folder: Folder, ntype: str) -> Iterator[tuple[int, np.ndarray]]:
    """``(first id, parts)`` of the nodes of a type, block after block."""
    table = folder.owners(ntype)
    for low, high in blocks(len(table)):
        parts = table.ints(low, high)
        check_ids(parts, folder.num_parts, f"{table.file.path}: parts")
        yield low, parts


@dataclass
class OwnEdges:
    """The edges of a type that end in a part, by ascending original id.

    Attributes:
        shard: with rows in place of ids.
        eid: int64 [E], original ids.
        place: int64 [E], positions in the files, as :meth:`Folder.edge_features` takes them.
    """

    shard: ShardEdges
    eid: np.ndarray
    place: np.ndarray


def own_edges(
    folder: Folder, book: PartitionBook, part: int, etype: EType, tables: dict[str, NodeTable]
) -> OwnEdges:
    """Read from the part's files, or from all parts' where edges are not kept by destination."""
    found = _Found(book, part, etype, tables)
    for holder in [part] if folder.by_destination else range(folder.num_parts):
        found.add(folder.edges(etype, holder))
    return found.sorted()


class _Found:
    """Edges in the order of the files: part and row of the source, row of the destination (int32),
    original id and place (int64)."""

    def __init__(
        self, book: PartitionBook, part: int, etype: EType, tables: dict[str, NodeTable]
    ) -> None:
        self._book, self._part, self._etype = book, part, etype
        self._tables = tables[etype[0]], tables[etype[2]]
        self._count, self._total = book.part_edges(etype, part), book.num_edges(etype)
        self._ends = np.empty((3, self._count), np.int32)
        self._ids = np.empty((2, self._count), np.int64)
        self._at = self._read = 0

    def add(self, stored: StoredEdges) -> None:
        """Those that end in the part."""
        (src_owner, src_row), (dst_owner, dst_row) = self._tables
        for low, high in blocks(len(stored.dst)):
            dst = stored.dst.ints(low, high)
            check_ids(dst, len(dst_row), stored.dst.file.path)
            mine = np.flatnonzero(dst_owner.take(dst) == self._part)
            src, eid = (one.ints(low, high)[mine] for one in (stored.src, stored.eid))
            check_ids(src, len(src_row), stored.src.file.path)
            check_ids(eid - stored.first, self._total, f"{stored.eid.file.path}: edges")
            end = self._at + len(mine)
            if end > self._count:
                raise self._wrong(end)
            where = slice(self._at, end)
            self._ends[:, where] = src_owner.take(src), src_row[src], dst_row[dst[mine]]
            self._ids[:, where] = eid - stored.first, self._read + low + mine
            self._at = end
        self._read += len(stored.dst)

    def _wrong(self, found: int) -> PartitionError:
        return PartitionError(
            f"{self._book.json_path}: {found} edges of type {self._etype} end in nodes of part "
            f"{self._part}, expected the {self._count} that were counted"
        )

    def sorted(self) -> OwnEdges:
        """By original id, and as a shard."""
        if self._at != self._count:
            raise self._wrong(self._at)
        order = np.argsort(self._ids[0])
        eid, place = (one[order] for one in self._ids)
        if (eid[1:] == eid[:-1]).any():
            twice = int(eid[1:][eid[1:] == eid[:-1]][0])
            raise PartitionError(
                f"{self._book.json_path}: edge {twice} of type {self._etype} is there twice"
            )
        owner, src, dst = (one[order] for one in self._ends)
        group = np.argsort(owner, kind="stable").astype(np.int32)
        counts = np.bincount(owner, minlength=self._book.num_parts)
        offsets = [0, *np.cumsum(counts).tolist()]
        columns = [torch.from_numpy(one) for one in (src[group], dst[group], group)]
        return OwnEdges(ShardEdges(columns[0], columns[1], columns[2], offsets), eid, place)
