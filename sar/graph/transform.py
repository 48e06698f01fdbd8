"""Copies of a graph with other columns or other edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sar.edges import Relation, as_stored, reverse_relation
from sar.edges.build import EdgeEnds, edge_ends, relation_of_edges
from sar.graph.frame import Frame
from sar.graph.store import EID, EType, GraphStore, edge_frame


def copy_frames(store: GraphStore) -> GraphStore:
    """The same structure with frames of its own, which hold the same tensors."""
    src_frames = {name: copy_frame(frame) for name, frame in store.src_frames.items()}
    dst_frames = src_frames
    if store.is_block:
        dst_frames = {name: copy_frame(frame) for name, frame in store.dst_frames.items()}
    edge_frames = {etype: copy_frame(frame) for etype, frame in store.edge_frames.items()}
    return replace(store, src_frames=src_frames, dst_frames=dst_frames, edge_frames=edge_frames)


def copy_frame(frame: Frame) -> Frame:
    """A frame of its own with the same columns."""
    copy = Frame(frame.num_rows, frame.kind, frame.defaults)
    copy.restore(frame.save())
    return copy


def reverse(
    store: GraphStore, etypes: list[EType], copy_nodes: bool, copy_edges: bool
) -> GraphStore:
    """The relations ``etypes`` with source and destination in each other's place."""
    whole = copy_frames(store)
    node_frames = [*whole.src_frames.values(), *whole.dst_frames.values()]
    edge_frames = list(whole.edge_frames.values())
    for frame in [*([] if copy_nodes else node_frames), *([] if copy_edges else edge_frames)]:
        frame.restore(({}, {}, {}))
    return replace(
        whole,
        relations={e[::-1]: reverse_relation(store.relations[e]) for e in etypes},
        edge_frames={e[::-1]: whole.edge_frames[e] for e in etypes},
        src_rows=store.dst_rows,
        dst_rows=store.src_rows,
        src_frames=whole.dst_frames,
        dst_frames=whole.src_frames,
        joined={},
    )


def _whole_relation(store: GraphStore, etype: EType, what: str) -> Relation:
    """A relation whose edges may be changed."""
    if etype[0] != etype[2] or store.is_block:
        raise ValueError(f"{what}: got {etype}, expected one node type and no block")
    return as_stored(store.relations[etype], what)


def with_edges(
    store: GraphStore, etype: EType, relation: Relation, eids: Tensor, columns: dict[str, Tensor]
) -> GraphStore:
    """A copy in which one relation has other edges."""
    copy = copy_frames(store)
    type_id = store.book.canonical_etypes.index(etype)
    frame = edge_frame(etype, type_id, lambda: eids, relation.num_edges)
    for name, column in columns.items():
        frame[name] = column
    copy.relations, copy.joined = {**store.relations, etype: relation}, {}
    copy.edge_frames[etype] = frame
    return copy


def add_self_loop(store: GraphStore, etype: EType, rows: Mapping[str, Tensor]) -> GraphStore:
    """An edge from every node to itself, behind the others; collective.

    Their global ids follow those of all edges, and of loops that were added before; their columns
    are ``rows``, and 0 where there are none.
    """
    relation, frame = _whole_relation(store, etype, "add_self_loop"), store.edge_frames[etype]
    rank, loops = store.group.rank, torch.arange(relation.num_dst, dtype=torch.int32)
    src, dst, eid, offsets = relation.arrays()
    loops = loops.to(src.device)
    end = offsets[rank + 1]
    parts = {"src": (src, loops), "dst": (dst, loops), "eid": (eid, loops + relation.num_edges)}
    arrays = {name: torch.cat([old[:end], new, old[end:]]) for name, (old, new) in parts.items()}
    offsets = [offset + (len(loops) if p > rank else 0) for p, offset in enumerate(offsets)]
    times = store.added_loops

    def keys() -> Tensor:
        return torch.cat([relation.make_keys(), store.keys.loops(etype, times)])

    grown = Relation(
        relation.plan,
        relation.num_src,
        relation.num_dst,
        **arrays,
        offsets=offsets,
        make_keys=keys,
    )
    first = store.book.num_edges() + times * store.book.num_nodes() + store.first_nid(etype[0])
    new_eids = store.src_rows[etype[0]] + first
    eids = torch.cat([frame[EID].to(new_eids.device), new_eids])
    columns = {}
    for name in frame:
        if name != EID:
            old = frame[name]
            new = rows.get(name, old.new_zeros((len(loops), *old.shape[1:])))
            columns[name] = torch.cat([old, new.to(old.dtype)])
    added = with_edges(store, etype, grown, eids, columns)
    return replace(added, added_loops=times + 1)


def remove_self_loop(store: GraphStore, etype: EType) -> GraphStore:
    """Without the edges from a node to itself; collective."""
    relation = _whole_relation(store, etype, "remove_self_loop")
    rank = store.group.rank
    src, dst, eid, offsets = relation.arrays()
    own = slice(offsets[rank], offsets[rank + 1])
    keep = torch.ones(relation.num_edges, dtype=torch.bool, device=src.device)
    keep[eid[own].long()] = src[own] != dst[own]
    return edge_subgraph(store, etype, keep)


def edge_subgraph(store: GraphStore, etype: EType, keep: Tensor) -> GraphStore:
    """Only the edges where bool [E] ``keep`` is true, and all nodes; collective."""
    relation, frame = as_stored(store.relations[etype], "edge_subgraph"), store.edge_frames[etype]
    chosen = keep.cpu()
    smaller = relation_of_edges(
        store.group,
        EdgeEnds(*(end[chosen] for end in edge_ends(relation))),
        (relation.num_src, relation.num_dst),
        lambda: relation.make_keys()[chosen],
    )
    columns = {name: frame.values_of(name)[keep] for name in frame if name != EID}
    return with_edges(store, etype, smaller.to(store.device), frame[EID][keep], columns)
