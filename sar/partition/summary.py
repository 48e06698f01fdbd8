"""Numbers that describe a partitioned graph, gathered from its files without loading features."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from sar.partition.book import PartitionBook
from sar.partition.cover import count_fewest
from sar.partition.load import PartitionData, ShardEdges, load_partition, read_book
from sar.partition.quality import Counts, balance, count_true

_TRAIN = "train_mask"


def summarize(
    json_path: str | os.PathLike,
    *,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict:
    """Sizes, halo, cut, balance and features of a partitioned graph, as JSON-able values.

    Keys: ``graph_name num_parts part_method halo_hops digest``; ``num_nodes num_edges cut_edges
    halo_nodes boundary_nodes train_nodes`` (whole graph); ``nodes`` and ``edges`` (per type
    ``total`` and ``per_part``; edges also ``cut_per_part``); ``parts`` (per part ``num_nodes
    num_edges cut_edges halo_nodes boundary_nodes train_nodes``); ``rows`` (P lists of P: at [p][q]
    the rows that part p receives from part q: ``halo``; the ``fewest`` of sums; the ``ended``, as
    counted in ``end_rows``); ``sum_rows`` (rows that travel for a sum over each relation:
    ``pulled`` as they are, or the ``fewest`` with partial sums, and the share ``saved``);
    ``end_rows`` (rows in which cut edges end, by relation and once for each part of their sources,
    to which attention may send them); ``node_balance edge_balance halo_balance boundary_balance
    train_balance`` (largest part over the mean part, 1 is even); ``node_features`` and
    ``edge_features`` (per name ``dtype`` and ``shape`` of one row).

    An edge is cut when its source lies in another part. Halo nodes are a part's different remote
    sources, so a node counts once for each part that receives it; boundary nodes are inner nodes
    that some other part receives. ``train_nodes`` and their balance are ``None`` without a
    ``train_mask``. Parts are read one after another; a byte for each node stays in memory.

    Args:
        watch: gets the numbers of the parts and gives them out again, such as a progress bar.

    Raises PartitionError for bad files.
    """
    book = read_book(json_path)
    count = _Count(book)
    for part in watch(range(book.num_parts)):
        count.add(load_partition(json_path, part))
    return {
        "graph_name": book.graph_name,
        "num_parts": book.num_parts,
        "part_method": book.part_method,
        "halo_hops": book.halo_hops,
        "digest": book.digest(),
        **count.described(),
        "nodes": _nodes_by_type(book),
        "edges": _edges_by_type(book, count.cuts),
        **count.features,
    }


class _Count:
    """What is counted while parts are read.

    Attributes:
        cuts: per edge type, cut edges of each part.
        parts: per part, the counts that it tells by itself.
        pulled: rows that travel for all relations. rows: see :func:`summarize`, [P, P] each.
        needed: per node type and part, bool: which nodes other parts need.
        has_train: some part has training nodes, or could have.
    """

    def __init__(self, book: PartitionBook) -> None:
        size = book.num_parts
        self.book = book
        self.cuts: dict[str, list[int]] = {":".join(etype): [] for etype in book.canonical_etypes}
        self.parts: list[dict] = []
        self.pulled = 0
        self.rows = {
            name: np.zeros((size, size), dtype=np.int64) for name in ("halo", "fewest", "ended")
        }
        self.needed = {
            ntype: [torch.zeros(book.part_nodes(ntype, p), dtype=torch.bool) for p in range(size)]
            for ntype in book.ntypes
        }
        self.has_train = False
        self.features: dict[str, dict] = {"node_features": {}, "edge_features": {}}

    def add(self, data: PartitionData) -> None:
        """Count one part."""
        part = data.part_id
        for etype, shard in data.edges.items():
            self.cuts[":".join(etype)].append(_cut(shard.offsets, part))
            self.rows["fewest"][part] += _fewest(data, etype)
        for peer in range(self.book.num_parts):
            if peer != part:
                self._add_peer(data, peer)
        start, end = self.book.part_ranges[part]
        masks = _train_masks(data)
        self.has_train = self.has_train or bool(masks)
        self.parts.append(
            {
                "num_nodes": end - start,
                "num_edges": sum(shard.offsets[-1] for shard in data.edges.values()),
                "cut_edges": sum(one[-1] for one in self.cuts.values()),
                "train_nodes": sum(count_true(mask) for mask in masks),
            }
        )
        _add_features(self.features, data)

    def _add_peer(self, data: PartitionData, peer: int) -> None:
        """Count the rows that come from one other part."""
        part = data.part_id
        for shard in data.edges.values():
            self.rows["ended"][peer, part] += _ended(shard, peer)
        for ntype, needed in self.needed.items():
            together = torch.zeros_like(needed[peer])
            for etype, shard in data.edges.items():
                if etype[0] == ntype:
                    used = torch.zeros_like(together)
                    used[shard.src[shard.offsets[peer] : shard.offsets[peer + 1]]] = True
                    self.pulled += int(used.sum())
                    together |= used
            self.rows["halo"][part, peer] += int(together.sum())
            needed[peer] |= together

    def described(self) -> dict:
        """Counts of the whole graph and of parts, when all parts have been added."""
        parts = []
        for number, one in enumerate(self.parts):
            found = {key: one[key] for key in ("num_nodes", "num_edges", "cut_edges")}
            found["halo_nodes"] = int(self.rows["halo"][number].sum())
            found["boundary_nodes"] = sum(int(own[number].sum()) for own in self.needed.values())
            found["train_nodes"] = one["train_nodes"] if self.has_train else None
            parts.append(found)
        columns = {key: [one[key] for one in parts] for key in parts[0]}
        if not self.has_train:
            columns["train_nodes"] = []
        fewest = int(self.rows["fewest"].sum())
        return {
            **{key: sum(counts) if counts else None for key, counts in columns.items()},
            "parts": parts,
            "rows": {name: rows.tolist() for name, rows in self.rows.items()},
            "sum_rows": {
                "pulled": self.pulled,
                "fewest": fewest,
                "saved": 1 - fewest / self.pulled if self.pulled else 0.0,
            },
            "end_rows": int(self.rows["ended"].sum()),
            "node_balance": balance(columns["num_nodes"]),
            "edge_balance": balance(columns["num_edges"]),
            "halo_balance": balance(columns["halo_nodes"]),
            "boundary_balance": balance(columns["boundary_nodes"]),
            "train_balance": balance(columns["train_nodes"]) if self.has_train else None,
        }


def _cut(offsets: list[int], part: int) -> int:
    """Edges of a type whose source is in another part."""
    return offsets[-1] - (offsets[part + 1] - offsets[part])


def _train_masks(data: PartitionData) -> list[Tensor]:
    """Of all node types that have one."""
    names = (f"{ntype}/{_TRAIN}" for ntype in data.book.ntypes)
    return [data.node_features[name] for name in names if name in data.node_features]


def _ended(shard: ShardEdges, peer: int) -> int:
    """Different destinations of edges whose sources are in another part."""
    return len(shard.dst[shard.offsets[peer] : shard.offsets[peer + 1]].unique())


def _fewest(data: PartitionData, etype: tuple[str, str, str]) -> Counts:
    """[P] rows that come for a sum over a relation."""
    shard, book = data.edges[etype], data.book
    sizes = [book.part_nodes(etype[0], part) for part in range(book.num_parts)]
    ends = (shard.src.numpy(), shard.dst.numpy())
    return count_fewest(*ends, shard.offsets, sizes, data.part_id)


def _nodes_by_type(book: PartitionBook) -> dict:
    return {
        ntype: {
            "total": book.num_nodes(ntype),
            "per_part": [book.part_nodes(ntype, part) for part in range(book.num_parts)],
        }
        for ntype in book.ntypes
    }


def _edges_by_type(book: PartitionBook, cuts: dict[str, list[int]]) -> dict:
    return {
        ":".join(etype): {
            "total": book.num_edges(etype),
            "per_part": [book.part_edges(etype, part) for part in range(book.num_parts)],
            "cut_per_part": cuts[":".join(etype)],
        }
        for etype in book.canonical_etypes
    }


def _add_features(features: dict[str, dict], data: PartitionData) -> None:
    """Adds features not met in an earlier part; parts may differ, so all are looked at."""
    for key, store in (
        ("node_features", data.node_features),
        ("edge_features", data.edge_features),
    ):
        for name in store:
            if "/" in name:
                dtype, shape = store.info(name)
                entry = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape[1:])}
                features[key].setdefault(name, entry)
