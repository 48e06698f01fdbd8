"""Numbers that describe a partitioned graph, gathered from its files without loading features."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import torch

from sar.partition.book import PartitionBook
from sar.partition.cover import count_fewest
from sar.partition.load import PartitionData, load_partition, read_book
from sar.partition.quality import CutQuality, count_true


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
    size = book.num_parts
    count = _Count(size)
    needed = {
        (ntype, part): torch.zeros(book.part_nodes(ntype, part), dtype=torch.bool)
        for ntype in book.ntypes
        for part in range(size)
    }
    for part in watch(range(size)):
        count.add(load_partition(json_path, part), needed)
    boundary = [sum(int(needed[one, p].sum()) for one in book.ntypes) for p in range(size)]
    return {**_described(book, count, boundary), **count.features}


def _described(book: PartitionBook, count: _Count, boundary: list[int]) -> dict:
    """Counts of the whole graph and of parts, when all parts have been added."""
    parts = range(book.num_parts)
    nodes = {t: np.array([book.part_nodes(t, part) for part in parts]) for t in book.ntypes}
    edges = {
        ":".join(t): np.array([book.part_edges(t, part) for part in parts])
        for t in book.canonical_etypes
    }
    quality = CutQuality(
        book.graph_name,
        len(edges),
        np.sum([*nodes.values()], axis=0),
        nodes,
        np.sum([*edges.values()], axis=0),
        np.sum([*count.cuts.values()], axis=0),
        count.rows["halo"].sum(1),
        np.array(boundary),
        np.array(count.training) if count.has_train else None,
        count.rows["halo"],
    )
    fewest = int(count.rows["fewest"].sum())
    saved = 1 - fewest / count.pulled if count.pulled else 0.0
    return {
        **quality.to_dict(),
        "part_method": book.part_method,
        "halo_hops": book.halo_hops,
        "digest": book.digest(),
        "rows": {name: rows.tolist() for name, rows in count.rows.items()},
        "sum_rows": {"pulled": count.pulled, "fewest": fewest, "saved": saved},
        "end_rows": int(count.rows["ended"].sum()),
        "edges": {
            name: {
                "total": int(own.sum()),
                "per_part": own.tolist(),
                "cut_per_part": count.cuts[name],
            }
            for name, own in edges.items()
        },
    }


class _Count:
    """What is counted while parts are read.

    Attributes:
        cuts: per edge type, cut edges of each part. training: of each part, its training nodes.
        pulled: rows that travel for all relations. rows: see :func:`summarize`, [P, P] each.
        has_train: some part has training nodes, or could have.
    """

    def __init__(self, size: int) -> None:
        self.cuts: dict[str, list[int]] = {}
        self.training: list[int] = []
        self.pulled, self.has_train = 0, False
        self.rows = {name: np.zeros((size, size), np.int64) for name in ("halo", "fewest", "ended")}
        self.features: dict[str, dict] = {"node_features": {}, "edge_features": {}}

    def add(self, data: PartitionData, needed: dict[tuple[str, int], torch.Tensor]) -> None:
        """Count one part; ``needed`` gets the nodes that it needs of each type and part."""
        part, book = data.part_id, data.book
        for etype, shard in data.edges.items():
            local = shard.offsets[part + 1] - shard.offsets[part]
            self.cuts.setdefault(":".join(etype), []).append(shard.offsets[-1] - local)
            sizes = [book.part_nodes(etype[0], peer) for peer in range(book.num_parts)]
            ends = shard.src.numpy(), shard.dst.numpy()
            self.rows["fewest"][part] += count_fewest(*ends, shard.offsets, sizes, part)
        for peer in range(book.num_parts):
            if peer != part:
                self._add_peer(data, peer, needed)
        masks = (f"{ntype}/train_mask" for ntype in book.ntypes)
        found = [data.node_features[name] for name in masks if name in data.node_features]
        self.has_train |= bool(found)
        self.training.append(sum(map(count_true, found)))
        stores = data.node_features, data.edge_features
        for features, store in zip(self.features.values(), stores):
            for name in store:  # parts may differ, so all are looked at
                if "/" in name:
                    dtype, shape = store.info(name)
                    kind = str(dtype).removeprefix("torch.")
                    features.setdefault(name, {"dtype": kind, "shape": list(shape[1:])})

    def _add_peer(
        self, data: PartitionData, peer: int, needed: dict[tuple[str, int], torch.Tensor]
    ) -> None:
        """Count the rows that come from one other part."""
        together: dict[str, torch.Tensor] = {}
        for (ntype, _, _), shard in data.edges.items():
            own = slice(shard.offsets[peer], shard.offsets[peer + 1])
            self.rows["ended"][peer, data.part_id] += len(shard.dst[own].unique())
            used = torch.zeros_like(needed[ntype, peer])
            used[shard.src[own]] = True
            self.pulled += int(used.sum())
            together[ntype] = used | together.get(ntype, used)
        for ntype, used in together.items():
            self.rows["halo"][data.part_id, peer] += int(used.sum())
            needed[ntype, peer] |= used
