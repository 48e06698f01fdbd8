"""What a graph and its slices share in DGL's words: relations, and the columns of all types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from sar.edges import AnyRelation, as_stored, reverse_relation
from sar.frontends.dgl.frame import Frame, Later
from sar.graph.store import Structure, with_relation
from sar.graph.transform import are_no_loops, whole_relation, with_loops, with_some_edges
from sar.partition.book import EType

NID = EID = "_ID"  # dgl.NID and dgl.EID
NTYPE = ETYPE = "_TYPE"  # dgl.NTYPE and dgl.ETYPE


@dataclass(kw_only=True)
class GraphStore(Structure):
    """A structure with columns; source and destination frames are the same on a whole graph."""

    src_frames: dict[str, Frame]
    dst_frames: dict[str, Frame]
    edge_frames: dict[EType, Frame]
    added_loops: int = 0

    def to(self, device: torch.device) -> GraphStore:
        moved = super().to(device)
        moved.src_frames = {name: frame.to(device) for name, frame in self.src_frames.items()}
        moved.dst_frames = moved.src_frames
        if self.is_block:
            moved.dst_frames = {name: frame.to(device) for name, frame in self.dst_frames.items()}
        moved.edge_frames = {etype: frame.to(device) for etype, frame in self.edge_frames.items()}
        return moved


def framed(store: Structure) -> GraphStore:
    """The structure with empty frames, unless it has frames."""
    if isinstance(store, GraphStore):
        return store
    given = {one.name: getattr(store, one.name) for one in fields(store) if one.init}
    sources = _node_frames(store, store.src_rows)
    destinations = _node_frames(store, store.dst_rows) if store.is_block else sources
    edges = {e: _edge_frame(store, e, ids) for e, ids in store.edge_ids.items()}
    return GraphStore(**given, src_frames=sources, dst_frames=destinations, edge_frames=edges)


def _node_frames(store: Structure, rows: dict[str, Tensor]) -> dict[str, Frame]:
    """Empty frames with the default columns ``_ID`` (global id) and ``_TYPE``."""
    frames = {}
    for type_id, ntype in enumerate(store.book.ntypes):
        defaults: dict[str, Callable[[], Tensor]] = {
            NID: partial(torch.add, rows[ntype], store.first_nid(ntype)),
            NTYPE: partial(torch.full_like, rows[ntype], type_id),
        }
        frames[ntype] = Frame(len(rows[ntype]), f"node type {ntype!r}", defaults)
    return frames


def _edge_frame(store: Structure, etype: EType, edge_ids: Callable[[], Tensor]) -> Frame:
    """An empty frame with the default columns ``_ID`` (global id, ascending) and ``_TYPE``."""
    number, type_id = store.relations[etype].num_edges, store.book.canonical_etypes.index(etype)
    device = store.device  # not the store, which will hold the frame
    defaults: dict[str, Callable[[], Tensor]] = {
        EID: lambda: edge_ids().to(device),
        ETYPE: lambda: torch.full((number,), type_id, dtype=torch.int64, device=device),
    }
    return Frame(number, f"edge type {etype}", defaults)


def copy_frame(frame: Frame) -> Frame:
    copy = Frame(frame.num_rows, frame.kind, frame.defaults)
    copy.restore(frame.save())
    return copy


def copy_frames(store: GraphStore) -> GraphStore:
    """The same structure with new frames that hold the same tensors."""
    src_frames = {name: copy_frame(frame) for name, frame in store.src_frames.items()}
    dst_frames = src_frames
    if store.is_block:
        dst_frames = {name: copy_frame(frame) for name, frame in store.dst_frames.items()}
    edge_frames = {etype: copy_frame(frame) for etype, frame in store.edge_frames.items()}
    return replace(store, src_frames=src_frames, dst_frames=dst_frames, edge_frames=edge_frames)


def reverse(
    store: GraphStore, etypes: list[EType], copy_nodes: bool, copy_edges: bool
) -> GraphStore:
    """The relations ``etypes`` with sources and destinations swapped."""
    whole = copy_frames(store)
    node_frames = [*whole.src_frames.values(), *whole.dst_frames.values()]
    edge_frames = list(whole.edge_frames.values())
    for frame in [*([] if copy_nodes else node_frames), *([] if copy_edges else edge_frames)]:
        frame.restore({})
    return replace(
        whole,
        relations={e[::-1]: reverse_relation(store.relations[e]) for e in etypes},
        edge_ids={e[::-1]: store.edge_ids[e] for e in etypes},
        edge_frames={e[::-1]: whole.edge_frames[e] for e in etypes},
        src_rows=store.dst_rows,
        dst_rows=store.src_rows,
        src_frames=whole.dst_frames,
        dst_frames=whole.src_frames,
        joined={},
    )


def with_edges(
    store: GraphStore,
    etype: EType,
    relation: AnyRelation,
    edge_ids: Callable[[], Tensor],
    columns: Mapping[str, Tensor | Later],
) -> GraphStore:
    copy = with_relation(copy_frames(store), etype, relation, edge_ids)
    frame = _edge_frame(copy, etype, edge_ids)
    for name, column in columns.items():
        frame[name] = column
    copy.edge_frames[etype] = frame
    return copy


def add_self_loop(store: GraphStore, etype: EType, rows: Mapping[str, Tensor]) -> GraphStore:
    """An edge from every node to itself, behind the others, with columns ``rows`` or 0; collective.

    Global ids of loops follow those of all edges, and of loops that were added before.
    """
    relation, frame = whole_relation(store, etype, "add_self_loop"), store.edge_frames[etype]
    times = store.added_loops
    grown = with_loops(relation, lambda: store.keys.loops(etype, times))
    first = store.book.num_edges() + times * store.book.num_nodes() + store.first_nid(etype[0])
    new_eids = store.src_rows[etype[0]] + first
    eids = torch.cat([frame[EID].to(new_eids.device), new_eids])
    count = relation.num_edges + relation.num_dst
    columns = {
        name: frame.changed(name, count, partial(_with_rows, relation.num_dst, rows.get(name)))
        for name in frame
        if name != EID
    }
    added = with_edges(store, etype, grown, lambda: eids, columns)
    return replace(added, added_loops=times + 1)


def _with_rows(count: int, rows: Tensor | None, column: Tensor) -> Tensor:
    """``column`` and so many rows behind it, 0 without ``rows``."""
    more = column.new_zeros((count, *column.shape[1:])) if rows is None else rows.to(column.dtype)
    return torch.cat([column, more])


def remove_self_loop(store: GraphStore, etype: EType) -> GraphStore:
    """Without the edges from a node to itself; collective."""
    keep = are_no_loops(whole_relation(store, etype, "remove_self_loop"))
    return edge_subgraph(store, etype, keep)


def edge_subgraph(store: GraphStore, etype: EType, keep: Tensor) -> GraphStore:
    """Only the edges where bool [E] ``keep`` is true, and all nodes; collective."""
    relation, frame = as_stored(store.relations[etype], "edge_subgraph"), store.edge_frames[etype]
    smaller = with_some_edges(relation, keep)
    count = smaller.num_edges
    columns = {n: frame.changed(n, count, lambda t: t[keep]) for n in frame if n != EID}
    eids = frame[EID][keep]
    return with_edges(store, etype, smaller, lambda: eids, columns)
