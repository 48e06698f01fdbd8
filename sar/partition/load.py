"""Loading one part: its shards, and its features as lazy mappings over the files.

Files are compared with their digests; :func:`add_digests` writes some where there are none.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sar import expect
from sar.config import usable_device
from sar.errors import PartitionError
from sar.files import write_whole
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, EType
from sar.partition.book import (
    ArrayDigest,
    Digests,
    FileDigest,
    PartitionBook,
    relative,
    with_digests,
    without_digests,
)
from sar.partition.book_json import parse_book
from sar.partition.column import MappedColumn, MappedFile
from sar.partition.dgl_format import GraphFile, read_graph, read_tensor_dict
from sar.partition.features import FeatureStore, Keys
from sar.partition.foreign import load_foreign_part, read_foreign_book, read_foreign_node_features
from sar.partition.progress import Progress, silent
from sar.partition.shards import ShardEdges, build_shards

__all__ = [
    "PartEdges", "PartitionData", "ShardEdges", "load_partition", "read_book", "read_node_features",
]  # fmt: skip

TYPE_KEY = "_TYPE"


class PartEdges(NamedTuple):
    """Edges from one part into this one: ``edges`` is a pair of int64 global node ids (source,
    destination), ``edge_features["_TYPE"]`` the int32 type id of each edge. Edges are ordered by
    type, then by ascending id."""

    edges: tuple[Tensor, Tensor]
    edge_features: dict[str, Tensor]


@dataclass
class PartitionData:
    """Everything a rank needs of its part.

    ``edges`` maps each canonical edge type to its `ShardEdges`, on ``device``. Row ``i`` of an edge
    type is the edge with global id ``book.edge_ranges[etype][part_id, 0] + i``. ``node_features``
    (``"<ntype>/<name>"``, one row per inner node, and ``"_TYPE"``, the int32 type id of each inner
    node) and ``edge_features`` (``"<src:relation:dst>/<name>"``, one row per inner edge) are lazy
    and give CPU tensors.
    """

    book: PartitionBook
    part_id: int
    edges: dict[EType, ShardEdges]
    node_features: FeatureStore
    edge_features: FeatureStore
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def num_nodes(self, ntype: str) -> int:
        """Inner nodes of a type."""
        return self.book.part_nodes(ntype, self.part_id)

    def num_edges(self, etype: str | tuple[str, ...]) -> int:
        """Inner edges of a type."""
        return self.book.part_edges(etype, self.part_id)

    @cached_property
    def keys(self) -> Keys:
        """Keys of nodes and edges for random numbers, the same however the graph is cut."""
        return Keys(self)

    # The names below are those of the original SAR's PartitionData.

    @property
    def node_ranges(self) -> list[tuple[int, int]]:
        """``(start, end)`` global node ids of each part."""
        return self.book.part_ranges

    @property
    def node_type_names(self) -> list[str]:
        """Node types by id."""
        return self.book.ntypes

    @property
    def edge_type_names(self) -> list[EType]:
        """Canonical edge types by id."""
        return self.book.canonical_etypes

    @property
    def partition_book(self) -> PartitionBook:
        """Same as ``book``."""
        return self.book

    @property
    def all_shard_edges(self) -> list[PartEdges]:
        """Per source part, the edges into this part in global ids; int64 copies, built here."""
        return [self._part_edges(part) for part in range(self.book.num_parts)]

    def _part_edges(self, part: int) -> PartEdges:
        sources, destinations, types = [], [], []
        for type_id, etype in enumerate(self.book.canonical_etypes):
            shard = self.edges[etype]
            group = slice(shard.offsets[part], shard.offsets[part + 1])
            src_start = int(self.book.node_ranges[etype[0]][part, 0])
            dst_start = int(self.book.node_ranges[etype[2]][self.part_id, 0])
            sources.append(shard.src[group].long() + src_start)
            destinations.append(shard.dst[group].long() + dst_start)
            types.append(torch.full_like(shard.eid[group], type_id))
        ends = (torch.cat(sources), torch.cat(destinations))
        return PartEdges(ends, {TYPE_KEY: torch.cat(types)})


def read_book(json_path: str | os.PathLike) -> PartitionBook:
    """Reads and validates a partition's JSON, or a folder that PyG or GraphLearn wrote.

    Ranges must tile the id space in (part, type) order without gap or overlap and agree with the
    JSON's counts; file paths must stay below the JSON's folder. Raises PartitionError, which
    names the file, what came and what was expected. Of a JSON's partition files none is opened.
    """
    if os.path.isdir(json_path):
        return read_foreign_book(json_path)
    return parse_book(os.fspath(json_path))


def load_partition(
    json_path: str | os.PathLike,
    part_id: int,
    device: torch.device | str = "cpu",
    *,
    verify: bool = False,
) -> PartitionData:
    """Loads part ``part_id`` of a partitioned graph; local, without communication.

    Edges go to ``device``; features stay in their files until they are read. While it runs, it
    needs less than 2.5 times the 12 bytes per inner edge that stay; for a folder that PyG or
    GraphLearn wrote more (see docs/formats.md). Where the JSON holds digests, the structure is
    compared with them here, and each feature when all of it has been read for the first time, or
    here with ``verify``.

    Raises PartitionError when a file is missing, damaged, changed meanwhile or contradicts the
    JSON, and with ``verify`` for partitions without digests, of which part 0 warns otherwise;
    ValueError for a part that does not exist.
    """
    book = read_book(json_path)
    expect.integer(part_id, "part_id")
    if not 0 <= part_id < book.num_parts:
        raise ValueError(f"part_id: got {part_id}, expected 0 to {book.num_parts - 1}")
    if book.digests is None and (verify or part_id == 0):
        if verify:
            raise PartitionError(without_digests(book))
        warnings.warn(without_digests(book), stacklevel=2)  # once: rank 0 has part 0
    target = usable_device(device)
    if book.is_foreign:
        edges, node_features, edge_features = load_foreign_part(book, part_id)
    else:
        edges, node_features, edge_features = _load_own(book, part_id, verify)
    counts = torch.tensor([book.part_nodes(ntype, part_id) for ntype in book.ntypes])
    types = torch.arange(len(counts), dtype=torch.int32)
    node_features.synthesize(TYPE_KEY, lambda: types.repeat_interleave(counts))
    moved = {etype: shard.to(target) for etype, shard in edges.items()}
    return PartitionData(book, part_id, moved, node_features, edge_features, target)


def _load_own(
    book: PartitionBook, part_id: int, verify: bool
) -> tuple[dict[EType, ShardEdges], FeatureStore, FeatureStore]:
    # Features first: their headers are cheap to check, the graph is not.
    node_arrays = read_features(book, part_id, "node_feats")
    edge_arrays = read_features(book, part_id, "edge_feats")
    if verify:
        for column in (*node_arrays.values(), *edge_arrays.values()):
            column.verify()
    graph = read_graph(book.files[part_id]["part_graph"])
    verify_graph(book, graph)
    return build_shards(book, part_id, graph), FeatureStore(node_arrays), FeatureStore(edge_arrays)


def read_node_features(book: PartitionBook, part_id: int) -> FeatureStore:
    """The features of a part's nodes alone; of their file only the headers are read. Raises as
    :func:`load_partition`."""
    if book.is_foreign:
        return read_foreign_node_features(book, part_id)
    return FeatureStore(read_features(book, part_id, "node_feats"))


def read_features(book: PartitionBook, part_id: int, key: str) -> dict[str, MappedColumn]:
    """Mapped features by full name, rows checked against the book; none without a file."""
    if key not in book.files[part_id]:
        return {}
    path = book.files[part_id][key]
    if key == "node_feats":
        rows = {ntype: book.part_nodes(ntype, part_id) for ntype in book.ntypes}
    else:
        rows = {":".join(one): book.part_edges(one, part_id) for one in book.canonical_etypes}
    usual = NTYPE_HOMO if key == "node_feats" else ":".join(ETYPE_HOMO)
    default = usual if usual in rows else next(iter(rows))
    columns = read_tensor_dict(path)
    _expect(book, path, columns)
    found: dict[str, MappedColumn] = {}
    for name, column in columns.items():
        full = name if "/" in name else f"{default}/{name}"
        if full in found:
            raise PartitionError(f"{path}: holds feature {full!r} twice")
        found[full] = column
        owner = next((one for one in rows if full.startswith(one + "/")), None)
        if owner is None:
            raise PartitionError(f"{path}: feature {full!r} is of no type in {sorted(rows)}")
        if column.shape[:1] != (rows[owner],):
            raise PartitionError(
                f"{path}: feature {full!r} has shape {column.shape}, expected {rows[owner]} rows"
            )
    return found


def verify_graph(book: PartitionBook, graph: GraphFile) -> None:
    """Compare the graph's file with its digest, where there is one. Raises ``PartitionError``."""
    known, file = book.digest_of(graph.path), graph.file
    if known is not None and (file.size != known.size or file.digest() != known.digest):
        raise PartitionError(
            f"{graph.path}: is damaged, or of another graph: its digest is not that in "
            f"{book.json_path}"
        )


def _expect(book: PartitionBook, path: str, columns: dict[str, MappedColumn]) -> None:
    """Compare names, dtypes and shapes with the digests', if any; contents are when read."""
    told = book.digest_of(path)
    if told is None:
        return
    if set(columns) != set(told.arrays):
        raise PartitionError(
            f"{path}: holds {sorted(columns)}, expected {sorted(told.arrays)}, as in "
            f"{book.json_path}"
        )
    for name, column in columns.items():
        known = told.arrays[name]
        got = str(column.dtype).removeprefix("torch."), list(column.shape)
        if got != (known.dtype, known.shape):
            raise PartitionError(
                f"{path}: feature {name!r} is {got[0]} of shape {got[1]}, expected {known.dtype} "
                f"of shape {known.shape}, as in {book.json_path}"
            )
        column.expect(known.digest, name)
    if (size := os.path.getsize(path)) != told.size:
        raise PartitionError(f"{path}: has {size} bytes, expected {told.size}")


def differing(
    path: str | os.PathLike, watch: Callable[[Iterable[int]], Iterable[int]] = iter
) -> tuple[list[str], int]:
    """What differs from the digests, in words that begin with the file's name; and the number of
    files. ``watch`` gets the numbers of the parts and gives them out again, as a progress bar does.
    Raises ``PartitionError`` for a JSON that is not there, and for one without digests."""
    try:
        book = read_book(path)
    except PartitionError as error:
        if not os.path.isfile(path):
            raise
        return [str(error)], 1
    if book.digests is None:
        raise PartitionError(without_digests(book))
    found = []
    for part in watch(range(book.num_parts)):
        for key in book.files[part]:
            try:
                if key == "part_graph":
                    verify_graph(book, read_graph(book.files[part][key]))
                    continue
                for column in read_features(book, part, key).values():
                    column.verify()
            except PartitionError as error:
                found.append(str(error))
    return found, sum(map(len, book.files))


def add_digests(path: str | os.PathLike, progress: Progress = silent) -> int:
    """Write digests into the JSON of partitions that have none; returns of how many files.

    All parts are loaded before, so that damage is not taken for what was written. Raises
    ``PartitionError`` for what does not load, has digests or no place for them, and ``OSError``
    naming the JSON where it cannot be written.
    """
    book = read_book(path)
    if book.is_foreign:
        raise PartitionError(without_digests(book))
    if book.digests is not None:
        raise PartitionError(f"{path}: holds digests; sar inspect {path} --check compares them")
    files: dict[str, FileDigest] = {}
    folder = os.path.realpath(os.path.dirname(book.json_path))
    for part in range(book.num_parts):
        progress("reading parts", part, book.num_parts)
        with warnings.catch_warnings():  # that there are none is known
            warnings.simplefilter("ignore")
            load_partition(book.json_path, part)
        for key, name in book.files[part].items():
            file, arrays = MappedFile(name), {}
            if key != "part_graph":
                for array, one in read_tensor_dict(name).items():
                    arrays[array] = ArrayDigest.of(one.dtype, one.shape, one.digest())
            whole = file.digest() if key == "part_graph" else ""
            files[relative(name, folder)] = FileDigest(file.size, whole, arrays)
    content = json.loads(Path(path).read_bytes())
    text = json.dumps(with_digests(content, Digests(None, files)), indent=4) + "\n"
    write_whole(Path(path).resolve(), lambda file: file.write(text.encode()), durable=True)
    return len(files)
