"""Partitions of PyG and GraphLearn, renumbered so that they load as DGL's do.

Here nodes (and edges) of a type are numbered part after part, inside a part by original id, which
``orig_id`` and ``orig_eid`` keep. Loading needs 4 bytes per node and about 80 per inner edge.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ORIG_EID, ORIG_ID, STORED_DTYPES, EType
from sar.partition.book import PartitionBook, ranges_of
from sar.partition.column import MappedColumn, check
from sar.partition.features import FeatureStore
from sar.partition.foreign_folders import Columns, GltFolder, PartitionFolder, PygFolder
from sar.partition.progress import blocks
from sar.partition.shards import ShardEdges, check_int32, group_by_source, next_places
from sar.partition.sources.npz import NODE_DATA, read_node_data

_Table = tuple[MappedColumn, np.ndarray]  # the part of each node and, int32 [N], its row there


def is_foreign(folder: str | os.PathLike) -> bool:
    """Whether a folder holds partitions of PyG or GraphLearn."""
    return any(os.path.isfile(os.path.join(folder, one.META)) for one in (PygFolder, GltFolder))


def open_folder(path: str | os.PathLike) -> PartitionFolder:
    """The partitions in a folder. Raises ``PartitionError`` for a folder of neither format."""
    folder = os.fspath(path)
    for kind in (PygFolder, GltFolder):
        if os.path.isfile(os.path.join(folder, kind.META)):
            return kind(folder)
    near = sorted(Path(folder).glob("*.json"))
    hint = f"; partitions of DGL are named by their JSON: {near[0]}" if near else ""
    raise PartitionError(
        f"{folder}: a folder without {PygFolder.META}, as PyG's partitions have it, and without "
        f"{GltFolder.META}, as GraphLearn's{hint}"
    )


def read_foreign_book(path: str | os.PathLike) -> PartitionBook:
    """The book, from the tables of nodes and the files of all parts' edges.
    Raises ``PartitionError`` for files that are missing, damaged or contradict each other."""
    folder = open_folder(path)
    nodes = np.zeros((folder.num_parts, len(folder.ntypes)), np.int64)
    for column, ntype in enumerate(folder.ntypes):
        for _, parts in _owner_blocks(folder, ntype):
            nodes[:, column] += np.bincount(parts, minlength=folder.num_parts)
    return PartitionBook(
        os.path.basename(os.path.abspath(folder.path)),
        folder.num_parts,
        folder.ntypes,
        folder.etypes,
        dict(zip(folder.ntypes, ranges_of(nodes))),
        dict(zip(folder.etypes, ranges_of(_edge_counts(folder)))),
        folder.path,
        halo_hops=1,
        part_method=folder.kind,
    )


def _edge_counts(folder: PartitionFolder) -> np.ndarray:
    """int64 [P, edge types] of edges that end in each part's nodes."""
    counts = np.zeros((folder.num_parts, len(folder.etypes)), np.int64)
    owners = {ntype: folder.owners(ntype) for ntype in folder.ntypes}
    for part in range(folder.num_parts):
        for column, etype in enumerate(folder.etypes):
            dst, owner = folder.edges(etype, part).dst, owners[etype[2]]
            if folder.by_destination:
                counts[part, column] = len(dst)
                continue
            for low, high in blocks(len(dst)):
                ids = _checked(dst.ints(low, high), len(owner), dst.file.path)
                counts[:, column] += np.bincount(owner.ints_at(ids), minlength=folder.num_parts)
    return counts


def _owner_blocks(folder: PartitionFolder, ntype: str) -> Iterator[tuple[int, np.ndarray]]:
    """``(first id, parts)`` of the nodes of a type, block after block."""
    table = folder.owners(ntype)
    for low, high in blocks(len(table)):
        parts = table.ints(low, high)
        yield low, _checked(parts, folder.num_parts, f"{table.file.path}: parts")


def _checked(ids: np.ndarray, total: int, where: str) -> np.ndarray:
    low, high = (ids.min(), ids.max()) if ids.size else (0, -1)
    is_good = 0 <= low and high < total
    check(is_good, f"{where}: ids run from {low} to {high}, expected 0 to {total - 1}")
    return ids


def load_foreign_part(
    book: PartitionBook, part: int
) -> tuple[dict[EType, ShardEdges], FeatureStore, FeatureStore]:
    """Edges, on the CPU, and features of nodes and edges of a part of the book's folder.
    Raises as :func:`read_foreign_book`."""
    check_int32(book, part)
    folder = open_folder(book.json_path)
    tables: dict[str, _Table] = {}
    for ntype in folder.ntypes:  # rows are counted in order of original ids
        owner = folder.owners(ntype)
        row, at = np.empty(len(owner), np.int32), np.zeros(folder.num_parts, np.int64)
        for positions, places in next_places(_owner_blocks(folder, ntype), at):
            row[positions] = places
        tables[ntype] = owner, row
    shards, features = {}, FeatureStore()
    for etype in folder.etypes:
        shards[etype], eid, places = _own_edges(folder, book, part, etype, tables)
        columns = folder.edge_features(etype, part, eid, places)
        _add(features, ":".join(etype), {**columns, ORIG_EID: torch.from_numpy(eid)}, book)
    return shards, read_foreign_node_features(book, part, folder), features


def read_foreign_node_features(
    book: PartitionBook, part: int, folder: PartitionFolder | None = None
) -> FeatureStore:
    """Node features of a part: those in its files, and columns of ``node_data.npz`` beside them,
    whose rows are by original id. Raises as :func:`read_foreign_book`."""
    folder = folder or open_folder(book.json_path)
    features, beside = FeatureStore(), Path(folder.path, NODE_DATA)
    extra: dict[str, dict[str, Tensor]] = {}
    if beside.exists():
        try:
            extra = read_node_data(beside, {ntype: book.num_nodes(ntype) for ntype in book.ntypes})
        except ValueError as error:
            raise PartitionError(str(error)) from error
    for ntype in folder.ntypes:
        own = [low + np.flatnonzero(one == part) for low, one in _owner_blocks(folder, ntype)]
        ids = np.concatenate(own or [np.empty(0, np.int64)])
        rows = torch.from_numpy(ids)
        columns = folder.node_features(ntype, part, ids)
        columns |= {name: one[rows] for name, one in extra.get(ntype, {}).items()}
        _add(features, ntype, {**columns, ORIG_ID: rows}, book)
    return features


def _add(features: FeatureStore, kind: str, columns: Columns, book: PartitionBook) -> None:
    for name, rows in columns.items():
        where = f"{book.json_path}: feature {name!r}"
        is_good = isinstance(name, str) and name and "/" not in name
        check(is_good, f"{where}, expected a name without '/'")
        check(rows.dtype in STORED_DTYPES, f"{where} is {rows.dtype}")
        if isinstance(rows, Tensor):
            features[f"{kind}/{name}"] = rows
        else:
            features.map(f"{kind}/{name}", rows)


def _own_edges(
    folder: PartitionFolder,
    book: PartitionBook,
    part: int,
    etype: EType,
    tables: dict[str, _Table],
) -> tuple[ShardEdges, np.ndarray, np.ndarray]:
    """The edges of a type that end in a part, by ascending original id; int64 [E] these ids, and
    places as ``edge_features`` of a folder takes them.

    Read from the part's files, or from all parts' where edges are not kept by destination.
    """
    count, total = book.part_edges(etype, part), book.num_edges(etype)
    (src_owner, src_row), (dst_owner, dst_row) = tables[etype[0]], tables[etype[2]]
    ends, ids = np.empty((3, count), np.int32), np.empty((2, count), np.int64)
    at = before = 0

    def check_count(is_right: bool) -> None:
        what = f"{book.json_path}: {at} edges of type {etype} end in nodes of part {part}"
        check(is_right, f"{what}, expected the {count} that were counted")

    for holder in [part] if folder.by_destination else range(folder.num_parts):
        stored = folder.edges(etype, holder)
        for low, high in blocks(len(stored.dst)):
            dst = _checked(stored.dst.ints(low, high), len(dst_row), stored.dst.file.path)
            mine = np.flatnonzero(dst_owner.ints_at(dst) == part)
            src, eid = (one.ints(low, high)[mine] for one in (stored.src, stored.eid))
            _checked(src, len(src_row), stored.src.file.path)
            eid = _checked(eid - stored.first, total, f"{stored.eid.file.path}: edges")
            where = slice(at, at := at + len(mine))
            check_count(at <= count)
            ends[:, where] = src_owner.ints_at(src), src_row[src], dst_row[dst[mine]]
            ids[:, where] = eid, before + low + mine
        before += len(stored.dst)
    check_count(at == count)
    order = np.argsort(ids[0])
    ends, (eid, places) = ends[:, order], ids[:, order]
    twice = eid[1:][eid[1:] == eid[:-1]][:1].tolist()
    check(not twice, f"{book.json_path}: edge {sum(twice)} of type {etype} is there twice")
    return group_by_source(ends[1:], ends[0], book.num_parts), eid, places
