"""Numbers that describe a partitioned graph, gathered from its files without loading features."""

from __future__ import annotations

import os

import torch

from sar.partition.book import PartitionBook, read_book
from sar.partition.cover import count_fewest
from sar.partition.load import PartitionData, ShardEdges, load_partition


def summarize(json_path: str | os.PathLike, *, verify: bool = False) -> dict:
    """Sizes, halo, cut, balance and features of a partitioned graph, as JSON-able values.

    Keys: ``graph_name num_parts part_method halo_hops digest``; ``num_nodes num_edges cut_edges
    halo_nodes`` (whole graph); ``nodes`` and ``edges`` (per type ``total`` and ``per_part``; edges
    also ``cut_per_part``); ``parts`` (per part ``num_nodes num_edges cut_edges halo_nodes``);
    ``sum_rows`` (rows that travel for a sum over each relation: ``pulled`` as they are, or the
    ``fewest`` with partial sums, and the share ``saved``); ``end_rows`` (rows in which cut edges
    end, by relation and once for each part of their sources, to which attention may send them);
    ``node_balance edge_balance`` (largest part over the mean part, 1 is even); ``node_features``
    and ``edge_features`` (per name ``dtype`` and ``shape`` of one row). An edge is cut when its
    source lies in another part; halo nodes are a part's different remote sources, so a node counts
    once for each part that receives it. Parts are read one after another.

    Args:
        verify: read all features, and compare them with the digests in the JSON.

    Raises PartitionError for bad files, and with ``verify`` for a JSON without digests.
    """
    book = read_book(json_path)
    cuts: dict[str, list[int]] = {":".join(etype): [] for etype in book.canonical_etypes}
    parts = []
    pulled = fewest = ends = 0
    features: dict[str, dict] = {"node_features": {}, "edge_features": {}}
    for part in range(book.num_parts):
        data = load_partition(json_path, part, verify=verify)
        for etype, shard in data.edges.items():
            cuts[":".join(etype)].append(_cut(shard.offsets, part))
            pulled += sum(_used(data, etype[0], peer, [shard]) for peer in range(book.num_parts))
            fewest += _fewest(data, etype)
            ends += sum(_ended(shard, peer) for peer in range(book.num_parts) if peer != part)
        parts.append(_describe_part(data, sum(one[-1] for one in cuts.values())))
        _add_features(features, data)
    nodes = [one["num_nodes"] for one in parts]
    edges = [one["num_edges"] for one in parts]
    return {
        "graph_name": book.graph_name,
        "num_parts": book.num_parts,
        "part_method": book.part_method,
        "halo_hops": book.halo_hops,
        "digest": book.digest(),
        "num_nodes": book.num_nodes(),
        "num_edges": book.num_edges(),
        "cut_edges": sum(one["cut_edges"] for one in parts),
        "halo_nodes": sum(one["halo_nodes"] for one in parts),
        "sum_rows": {
            "pulled": pulled,
            "fewest": fewest,
            "saved": 1 - fewest / pulled if pulled else 0.0,
        },
        "end_rows": ends,
        "nodes": _nodes_by_type(book),
        "edges": _edges_by_type(book, cuts),
        "parts": parts,
        "node_balance": _balance(nodes),
        "edge_balance": _balance(edges),
        **features,
    }


def _cut(offsets: list[int], part: int) -> int:
    """Edges of a type whose source is in another part."""
    return offsets[-1] - (offsets[part + 1] - offsets[part])


def _balance(sizes: list[int]) -> float:
    """Largest over mean; 1.0 for parts that are all empty."""
    total = sum(sizes)
    return max(sizes) * len(sizes) / total if total else 1.0


def _describe_part(data: PartitionData, cut_edges: int) -> dict:
    start, end = data.book.part_ranges[data.part_id]
    return {
        "num_nodes": end - start,
        "num_edges": sum(shard.offsets[-1] for shard in data.edges.values()),
        "cut_edges": cut_edges,
        "halo_nodes": _count_halo(data),
    }


def _count_halo(data: PartitionData) -> int:
    """Different remote sources of the part's edges, over all edge types."""
    total = 0
    for ntype in data.book.ntypes:
        shards = [one for etype, one in data.edges.items() if etype[0] == ntype]
        total += sum(_used(data, ntype, part, shards) for part in range(data.book.num_parts))
    return total


def _used(data: PartitionData, ntype: str, part: int, shards: list[ShardEdges]) -> int:
    """Different sources of one type in another part."""
    if part == data.part_id:
        return 0
    used = torch.zeros(data.book.part_nodes(ntype, part), dtype=torch.bool)
    for shard in shards:
        used[shard.src[shard.offsets[part] : shard.offsets[part + 1]]] = True
    return int(used.sum())


def _ended(shard: ShardEdges, peer: int) -> int:
    """Different destinations of edges whose sources are in another part."""
    return len(shard.dst[shard.offsets[peer] : shard.offsets[peer + 1]].unique())


def _fewest(data: PartitionData, etype: tuple[str, str, str]) -> int:
    """Rows that come for a sum over a relation."""
    shard, book = data.edges[etype], data.book
    sizes = [book.part_nodes(etype[0], part) for part in range(book.num_parts)]
    ends = (shard.src.numpy(), shard.dst.numpy())
    return int(count_fewest(*ends, shard.offsets, sizes, data.part_id).sum())


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
