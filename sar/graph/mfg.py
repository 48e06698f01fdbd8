"""Blocks (message flow graphs): per layer, only the rows that the seeds depend on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group, current_group, exchange_counts
from sar.config import Policy
from sar.graph.build import agree_data, on_device
from sar.graph.sharded import ShardedGraph
from sar.graph.store import EType, GraphStore, edge_frame, node_frames
from sar.ops import AnyRelation, build_relation
from sar.partition.book import PartitionBook
from sar.partition.keys import Keys
from sar.partition.load import PartitionData


def construct_mfgs(
    partition_data: PartitionData,
    seed_nodes: Tensor,
    n_layers: int,
    keep_seed_nodes: bool = True,
    *,
    policy: Policy | None = None,
) -> list[ShardedGraph]:
    """One block a layer, first layer first, that together compute the seeds' outputs; collective.

    What ``dgl.to_block`` gives layer by layer on the whole graph: degrees are the block's. Results
    of the last block are in ascending order of the seeds' global ids, per node type.

    Args:
        seed_nodes: int [n] distinct global ids of nodes of this rank's part; may be empty.
        n_layers: number of blocks.
        keep_seed_nodes: let the source rows of a block begin with its destination rows. Without,
            source rows are in ascending order and hold only sources of edges.

    Raises:
        ValueError: on every rank, when seeds of any rank repeat or are not its own.
    """
    group, book = current_group(), partition_data.book
    agree_data(partition_data, group, policy)
    group.agree(_seed_error(partition_data, seed_nodes, n_layers), "construct_mfgs")
    dst_rows = _split_seeds(partition_data, seed_nodes)
    blocks = []
    for _ in range(n_layers):
        store = _build_block(partition_data, group, book, dst_rows, keep_seed_nodes)
        blocks.append(on_device(store, partition_data, policy))
        dst_rows = store.src_rows
    return blocks[::-1]


def _seed_error(data: PartitionData, seeds: Any, num_layers: Any) -> Exception | None:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        return ValueError(f"n_layers: got {num_layers!r}, expected an int of at least 1")
    if not isinstance(seeds, Tensor) or seeds.is_floating_point() or seeds.dim() != 1:
        return TypeError("seed_nodes: expected a 1-D integer tensor of global node ids")
    start, stop = data.book.part_ranges[data.part_id]
    if len(seeds) and (int(seeds.min()) < start or int(seeds.max()) >= stop):
        return ValueError(
            f"seed_nodes: got ids from {int(seeds.min())} to {int(seeds.max())}, "
            f"expected ids of this rank's part, [{start}, {stop})"
        )
    if len(torch.unique(seeds)) != len(seeds):
        return ValueError("seed_nodes: got repeated ids, expected distinct ones")
    return None


def _split_seeds(data: PartitionData, seeds: Tensor) -> dict[str, Tensor]:
    """Per node type the ascending rows of the part."""
    type_id, _, row = data.book.locate(torch.sort(seeds.cpu().long())[0])
    return {ntype: row[type_id == i] for i, ntype in enumerate(data.book.ntypes)}


@dataclass
class _BlockEdges:
    """The part's edges that end in a block's destination rows, as build_relation wants them."""

    src: Tensor
    dst: Tensor
    eid: Tensor
    offsets: list[int]
    positions: Tensor  # int32, of the edges among the part's, ascending


def _edges_into(data: PartitionData, etype: EType, dst_rows: Tensor) -> _BlockEdges:
    shards = data.edges[etype].to("cpu")
    new_row = torch.full((data.num_nodes(etype[2]),), -1, dtype=torch.int32)
    new_row[dst_rows] = torch.arange(len(dst_rows), dtype=torch.int32)
    dst = new_row.index_select(0, shards.dst)
    keep = dst >= 0
    ends = torch.cumsum(keep, 0)
    offsets = [0 if end == 0 else int(ends[end - 1]) for end in shards.offsets]
    eid = shards.eid[keep]
    positions = torch.sort(eid)[0]
    local = torch.searchsorted(positions, eid, out_int32=True)
    return _BlockEdges(shards.src[keep], dst[keep], local, offsets, positions)


def _build_block(
    data: PartitionData,
    group: Group,
    book: PartitionBook,
    dst_rows: dict[str, Tensor],
    keep_seeds: bool,
) -> GraphStore:
    edges = {etype: _edges_into(data, etype, dst_rows[etype[2]]) for etype in book.canonical_etypes}
    src_rows = {
        ntype: _source_rows(data, group, edges, ntype, dst_rows[ntype] if keep_seeds else None)
        for ntype in book.ntypes
    }
    relations: dict[EType, AnyRelation] = {}
    edge_frames = {}
    for type_id, (etype, part) in enumerate(edges.items()):
        position = torch.full((data.num_nodes(etype[0]),), -1, dtype=torch.int64)
        rows = src_rows[etype[0]]
        position[rows] = torch.arange(len(rows))
        relations[etype] = build_relation(
            group,
            part.src,
            part.dst,
            part.eid,
            part.offsets,
            len(rows),
            len(dst_rows[etype[2]]),
            partial(_edge_keys, data.keys, etype, part.positions),
            position,
        )
        first = int(book.edge_ranges[etype][data.part_id, 0])
        eids = partial(_edge_ids, part.positions, first)
        edge_frames[etype] = edge_frame(etype, type_id, eids, len(part.positions))
    return GraphStore(
        group,
        book,
        data.part_id,
        relations,
        src_rows,
        dst_rows,
        node_frames(book, data.part_id, src_rows),
        node_frames(book, data.part_id, dst_rows),
        edge_frames,
        data.keys,
        is_block=True,
        keep_seeds=keep_seeds,
    )


def _edge_keys(keys: Keys, etype: EType, positions: Tensor) -> Tensor:
    return keys.edges(etype).index_select(0, positions)


def _edge_ids(positions: Tensor, first: int) -> Tensor:
    return positions.long() + first


def _source_rows(
    data: PartitionData,
    group: Group,
    edges: dict[EType, _BlockEdges],
    ntype: str,
    seeds: Tensor | None,
) -> Tensor:
    """Rows of the part that some rank's edges start in: the seeds in order, then ascending."""
    wanted: list[list[Tensor]] = [[] for _ in range(group.size)]
    for etype, part in edges.items():
        if etype[0] == ntype:
            for peer in range(group.size):
                wanted[peer].append(part.src[part.offsets[peer] : part.offsets[peer + 1]])
    empty = torch.empty(0, dtype=torch.int32)
    unique = [torch.unique(torch.cat([empty, *rows])) for rows in wanted]
    counts = [len(rows) for rows in unique]
    asked = group.all_to_all(torch.cat(unique), counts, exchange_counts(group, counts)).long()
    needed = torch.zeros(data.num_nodes(ntype), dtype=torch.bool)
    needed[asked] = True
    if seeds is None:
        return needed.nonzero().view(-1)
    needed[seeds] = False
    return torch.cat([seeds, needed.nonzero().view(-1)])
