"""One block: the edges that end in given rows, cut out of all edges, and the rows they start in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sar.comm import Group, exchange_counts
from sar.edges import AnyRelation, as_stored, build_relation
from sar.edges.build import owned_ends
from sar.edges.relation import EdgeArrays
from sar.graph.store import Structure
from sar.partition.book import EType, PartitionBook
from sar.partition.features import Keys
from sar.partition.load import PartitionData


@dataclass(frozen=True)
class EdgeSource:
    """All edges that end in this part's rows, on the CPU, out of which blocks are cut.

    In ``edges`` rows of sources are those inside the owner's part. ``edge_keys`` and ``edge_ids``
    are of a relation's edges, by position, and hold no edges.
    """

    book: PartitionBook
    part_id: int
    keys: Keys
    num_nodes: Callable[[str], int]
    edges: Callable[[EType], EdgeArrays]
    edge_keys: Callable[[EType], Tensor]
    edge_ids: Callable[[EType, Tensor], Tensor]


def whole_of_data(data: PartitionData) -> EdgeSource:
    """The edges of a part as they were loaded."""
    firsts = {e: int(ranges[data.part_id, 0]) for e, ranges in data.book.edge_ranges.items()}

    def edges(etype: EType) -> EdgeArrays:
        shards = data.edges[etype].to("cpu")
        return EdgeArrays(shards.src, shards.dst, shards.eid, shards.offsets)

    return EdgeSource(
        data.book,
        data.part_id,
        data.keys,
        data.num_nodes,
        edges,
        data.keys.edges,
        lambda etype, positions: positions.long() + firsts[etype],
    )


def whole_of_graph(store: Structure) -> EdgeSource:
    """The edges as the graph has them now, added and removed ones included; collective."""
    relations = {etype: as_stored(one, "blocks") for etype, one in store.relations.items()}
    edges = {etype: owned_ends(relation) for etype, relation in relations.items()}
    rows, ids = store.src_rows, store.edge_ids  # blocks do not hold the graph
    return EdgeSource(
        store.book,
        store.part_id,
        store.keys,
        lambda ntype: len(rows[ntype]),
        edges.__getitem__,
        lambda etype: relations[etype].make_keys(),
        lambda etype, positions: ids[etype]().cpu()[positions.long()],
    )


@dataclass
class BlockEdges:
    """The part's edges that end in a block's destination rows, as build_relation wants them."""

    src: Tensor
    dst: Tensor
    eid: Tensor
    offsets: list[int]
    positions: Tensor  # int32, of the edges among the part's, ascending


def _edges_into(whole: EdgeSource, etype: EType, dst_rows: Tensor) -> BlockEdges:
    shards = whole.edges(etype)
    new_row = torch.full((whole.num_nodes(etype[2]),), -1, dtype=torch.int32)
    new_row[dst_rows] = torch.arange(len(dst_rows), dtype=torch.int32)
    dst = new_row.index_select(0, shards.dst)
    keep = dst >= 0
    ends = torch.cumsum(keep, 0)
    offsets = [0 if end == 0 else int(ends[end - 1]) for end in shards.offsets]
    eid = shards.eid[keep]
    positions = torch.sort(eid)[0]
    local = torch.searchsorted(positions, eid, out_int32=True)
    return BlockEdges(shards.src[keep], dst[keep], local, offsets, positions)


@dataclass
class Layer:
    """A block before its exchange is planned; ``num_halo`` rows are received by this rank."""

    edges: dict[EType, BlockEdges]
    src_rows: dict[str, Tensor]
    num_halo: int


def plan_layer(
    whole: EdgeSource, group: Group, dst_rows: dict[str, Tensor], keep_seeds: bool
) -> Layer:
    """What some destination rows need; sources begin with them if ``keep_seeds``; collective."""
    book, src_rows, num_halo = whole.book, {}, 0
    edges = {
        etype: _edges_into(whole, etype, dst_rows[etype[2]]) for etype in book.canonical_etypes
    }
    for ntype in book.ntypes:
        unique = _unique_sources(group, edges, ntype)
        num_halo += sum(len(rows) for peer, rows in enumerate(unique) if peer != group.rank)
        seeds = dst_rows[ntype] if keep_seeds else None
        src_rows[ntype] = _source_rows(group, unique, whole.num_nodes(ntype), seeds)
    return Layer(edges, src_rows, num_halo)


def build_block(
    whole: EdgeSource, group: Group, dst_rows: dict[str, Tensor], keep_seeds: bool,
    is_square: bool = False,
) -> Structure:  # fmt: skip
    """The block of :func:`plan_layer` with its exchange planned; collective. If ``is_square``, its
    destinations are all its source rows; no edge ends in those behind ``dst_rows``."""
    layer, book = plan_layer(whole, group, dst_rows, keep_seeds), whole.book
    src_rows = layer.src_rows
    dst_rows = src_rows if is_square else dst_rows
    relations: dict[EType, AnyRelation] = {}
    edge_ids: dict[EType, Callable[[], Tensor]] = {}
    for etype, part in layer.edges.items():
        position = torch.full((whole.num_nodes(etype[0]),), -1, dtype=torch.int64)
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
            partial(_edge_keys, whole.edge_keys, etype, part.positions),
            position,
        )
        edge_ids[etype] = partial(whole.edge_ids, etype, part.positions)
    return Structure(
        group,
        book,
        whole.part_id,
        relations,
        edge_ids,
        src_rows,
        dst_rows,
        whole.keys,
        is_block=True,
        keep_seeds=keep_seeds,
    )


def _edge_keys(keys: Callable[[EType], Tensor], etype: EType, positions: Tensor) -> Tensor:
    return keys(etype).index_select(0, positions)


def _unique_sources(group: Group, edges: dict[EType, BlockEdges], ntype: str) -> list[Tensor]:
    """Per rank, the ascending rows of a type that edges start in."""
    wanted: list[list[Tensor]] = [[] for _ in range(group.size)]
    for etype, part in edges.items():
        if etype[0] == ntype:
            for peer in range(group.size):
                wanted[peer].append(part.src[part.offsets[peer] : part.offsets[peer + 1]])
    empty = torch.empty(0, dtype=torch.int32)
    return [torch.unique(torch.cat([empty, *rows])) for rows in wanted]


def _source_rows(
    group: Group, unique: list[Tensor], num_nodes: int, seeds: Tensor | None
) -> Tensor:
    """Rows of the part that some rank's edges start in: the seeds in order, then ascending."""
    counts = [len(rows) for rows in unique]
    asked = group.all_to_all(torch.cat(unique), counts, exchange_counts(group, counts)).long()
    needed = torch.zeros(num_nodes, dtype=torch.bool)
    needed[asked] = True
    if seeds is None:
        return needed.nonzero().view(-1)
    needed[seeds] = False
    return torch.cat([seeds, needed.nonzero().view(-1)])
