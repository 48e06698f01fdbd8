"""Partitions of PyG and GraphLearn, renumbered so that they load as DGL's do.

They keep original ids, and a table of the part of each node. Here the nodes of a type are numbered
part after part, inside a part by original id, and so are edges; ``orig_id`` and ``orig_eid`` keep
the original ids. Loading needs 4 bytes per node of the graph and about 80 per inner edge.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sar.errors import PartitionError
from sar.partition.arrays import ORIG_EID, ORIG_ID, STORED_DTYPES
from sar.partition.book import EType, PartitionBook
from sar.partition.features import FeatureStore
from sar.partition.glt_format import GltFolder
from sar.partition.pyg_format import PygFolder
from sar.partition.renumber import (
    edge_counts,
    node_counts,
    node_table,
    own_edges,
    own_ids,
    ranges,
)
from sar.partition.shards import ShardEdges, check_int32
from sar.partition.sources.npz import read_node_data
from sar.partition.stored import Columns, Folder

NODE_DATA = "node_data.npz"


class ForeignPart(NamedTuple):
    """The pieces of a :class:`sar.partition.load.PartitionData`, on the CPU."""

    edges: dict[EType, ShardEdges]
    node_features: FeatureStore
    edge_features: FeatureStore


def open_folder(path: str | os.PathLike) -> Folder:
    """The partitions in a folder. Raises ``PartitionError`` for a folder of neither format."""
    folder = os.fspath(path)
    if os.path.isfile(os.path.join(folder, PygFolder.META)):
        return PygFolder(folder)
    if os.path.isfile(os.path.join(folder, GltFolder.META)):
        return GltFolder(folder)
    near = sorted(Path(folder).glob("*.json"))
    hint = f"; partitions of DGL are named by their JSON: {near[0]}" if near else ""
    raise PartitionError(
        f"{folder}: a folder without {PygFolder.META}, as PyG's partitions have it, and without "
        f"{GltFolder.META}, as GraphLearn's{hint}"
    )


def read_foreign_book(path: str | os.PathLike) -> PartitionBook:
    """Who owns what, from the tables of nodes and the files of all parts' edges.

    Raises ``PartitionError`` for files that are missing, damaged or contradict each other.
    """
    folder = open_folder(path)
    return PartitionBook(
        os.path.basename(os.path.abspath(folder.path)),
        folder.num_parts,
        folder.ntypes,
        folder.etypes,
        dict(zip(folder.ntypes, ranges(node_counts(folder)))),
        dict(zip(folder.etypes, ranges(edge_counts(folder)))),
        folder.path,
        halo_hops=1,
        part_method=folder.kind,
    )


def load_foreign_part(book: PartitionBook, part: int) -> ForeignPart:
    """A part of the folder that a book was read from.

    Raises ``PartitionError`` for files that are missing, damaged or contradict each other.
    """
    check_int32(book, part)
    folder = open_folder(book.json_path)
    tables = {ntype: node_table(folder, ntype) for ntype in folder.ntypes}
    shards: dict[EType, ShardEdges] = {}
    features = FeatureStore({})
    for etype in folder.etypes:
        own = own_edges(folder, book, part, etype, tables)
        shards[etype] = own.shard
        columns = folder.edge_features(etype, part, own.eid, own.place)
        _add(features, ":".join(etype), {**columns, ORIG_EID: torch.from_numpy(own.eid)}, book)
    return ForeignPart(shards, _node_features(folder, book, part), features)


def read_foreign_node_features(book: PartitionBook, part: int) -> FeatureStore:
    """The features of a part's nodes alone. Raises as :func:`load_foreign_part`."""
    return _node_features(open_folder(book.json_path), book, part)


def _node_features(folder: Folder, book: PartitionBook, part: int) -> FeatureStore:
    """Those of the files, and of the user's beside them, which has rows by original id."""
    features, beside = FeatureStore({}), Path(folder.path, NODE_DATA)
    extra = {}
    if beside.exists():
        totals = {ntype: book.num_nodes(ntype) for ntype in book.ntypes}
        try:
            extra = read_node_data(beside, totals)
        except ValueError as error:
            raise PartitionError(str(error)) from error
    for ntype in folder.ntypes:
        ids = own_ids(folder, ntype, part)
        rows = torch.from_numpy(ids)
        columns = folder.node_features(ntype, part, ids)
        columns |= {name: one[rows] for name, one in extra.get(ntype, {}).items()}
        _add(features, ntype, {**columns, ORIG_ID: rows}, book)
    return features


def _add(features: FeatureStore, kind: str, columns: Columns, book: PartitionBook) -> None:
    for name, rows in columns.items():
        if not isinstance(name, str) or not name or "/" in name:
            raise PartitionError(f"{book.json_path}: feature {name!r}, expected a name without '/'")
        if rows.dtype not in STORED_DTYPES:
            raise PartitionError(f"{book.json_path}: feature {name!r} is {rows.dtype}")
        if isinstance(rows, Tensor):
            features[f"{kind}/{name}"] = rows
        else:
            features.map(f"{kind}/{name}", rows)
