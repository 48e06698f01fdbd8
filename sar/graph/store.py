"""What a graph and all its slices share: relations, frames and the meaning of local rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges import AnyRelation, Relation, join_relations
from sar.graph.frame import Frame
from sar.partition.book import PartitionBook
from sar.partition.features import Keys

EType = tuple[str, str, str]
NID = EID = "_ID"  # dgl.NID and dgl.EID
NTYPE = ETYPE = "_TYPE"  # dgl.NTYPE and dgl.ETYPE


@dataclass
class GraphStore:
    """One rank's part of a graph, or of one layer's block of it.

    Attributes:
        book, part_id: the partitioning and this rank's part.
        relations: edges by canonical type.
        src_rows, dst_rows: per node type, int64 rows of the part that are rows of the source and
            destination tensors. The same object on a whole graph.
        src_frames, dst_frames, edge_frames: columns. Source and destination frames are the same
            objects on a whole graph.
        keys: what names the part's nodes and edges in random numbers.
        added_loops: how often self loops were added.
        keyed_rows: what :func:`sar.graph.rows.keyed_rows` made of late; no copy has it.
        is_block: True for a block (MFG).
        keep_seeds: on blocks, whether source rows begin with the destination rows.
        joined: relations out of the same source rows as one relation, made on first need.
        sharing: the layer's call in progress whose modules share rows; no copy has it.
    """

    group: Group
    book: PartitionBook
    part_id: int
    relations: dict[EType, AnyRelation]
    src_rows: dict[str, Tensor]
    dst_rows: dict[str, Tensor]
    src_frames: dict[str, Frame]
    dst_frames: dict[str, Frame]
    edge_frames: dict[EType, Frame]
    keys: Keys
    is_block: bool = False
    keep_seeds: bool = True
    device: torch.device = torch.device("cpu")
    added_loops: int = 0
    joined: dict[tuple[EType, ...], Relation] = field(default_factory=dict)
    keyed_rows: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    sharing: Any = field(default=None, init=False, repr=False, compare=False)

    def first_nid(self, ntype: str) -> int:
        """Global id of this part's first node of a type."""
        return int(self.book.node_ranges[ntype][self.part_id, 0])

    def join(self, etypes: tuple[EType, ...]) -> Relation:
        """Relations out of the same source rows as one; collective on first use."""
        if etypes not in self.joined:
            relations = [self.relations[etype] for etype in etypes]
            self.joined[etypes] = join_relations([r for r in relations if isinstance(r, Relation)])
        return self.joined[etypes]

    def to(self, device: torch.device) -> GraphStore:
        """A copy on ``device``; no communication."""
        src_frames = {name: frame.to(device) for name, frame in self.src_frames.items()}
        dst_frames = src_frames
        if self.is_block:
            dst_frames = {name: frame.to(device) for name, frame in self.dst_frames.items()}
        src_rows = {name: rows.to(device) for name, rows in self.src_rows.items()}
        dst_rows = src_rows
        if self.is_block:
            dst_rows = {name: rows.to(device) for name, rows in self.dst_rows.items()}
        moved = GraphStore(
            self.group,
            self.book,
            self.part_id,
            {etype: relation.to(device) for etype, relation in self.relations.items()},
            src_rows,
            dst_rows,
            src_frames,
            dst_frames,
            {etype: frame.to(device) for etype, frame in self.edge_frames.items()},
            self.keys,
            self.is_block,
            self.keep_seeds,
            device,
            self.added_loops,
        )
        for etype, frame in self.edge_frames.items():
            pending = {name: column.to(moved) for name, column in frame.pending.items()}
            moved.edge_frames[etype].pending = pending
        return moved


def node_frames(book: PartitionBook, part_id: int, rows: dict[str, Tensor]) -> dict[str, Frame]:
    """Empty frames with the default columns ``_ID`` (global id) and ``_TYPE``."""
    frames = {}
    for type_id, ntype in enumerate(book.ntypes):
        start = int(book.node_ranges[ntype][part_id, 0])
        defaults: dict[str, Callable[[], Tensor]] = {
            NID: partial(torch.add, rows[ntype], start),
            NTYPE: partial(torch.full_like, rows[ntype], type_id),
        }
        frames[ntype] = Frame(len(rows[ntype]), f"node type {ntype!r}", defaults)
    return frames


def edge_frame(etype: EType, type_id: int, eids: Callable[[], Tensor], num_edges: int) -> Frame:
    """An empty frame with the default columns ``_ID`` (global id, ascending) and ``_TYPE``."""
    defaults: dict[str, Callable[[], Tensor]] = {
        EID: eids,
        ETYPE: lambda: torch.full((num_edges,), type_id, dtype=torch.int64),
    }
    return Frame(num_edges, f"edge type {etype}", defaults)
