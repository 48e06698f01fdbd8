"""What a graph and all its slices share: relations and the meaning of local rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from sar.comm import Group
from sar.edges import AnyRelation, Relation, join_relations
from sar.partition.book import EType, PartitionBook
from sar.partition.features import Keys

S = TypeVar("S", bound="Structure")


@dataclass
class Structure:
    """One rank's part of a graph, or of one layer's block (MFG) of it, without any columns.

    Attributes:
        relations: edges by canonical type.
        edge_ids: of each relation, what makes int64 [E] global ids, on the CPU.
        src_rows, dst_rows: per node type, int64 rows of the part that are rows of the source and
            destination tensors. The same object on a whole graph.
        keys: what names the part's nodes and edges in random numbers.
        keyed_rows: what :func:`sar.graph.rows.keyed_rows` made of late; no copy has it.
        keep_seeds: on blocks, whether source rows begin with the destination rows.
        directories: by node type, what finds nodes by their original ids; copies share them.
        joined: relations out of the same source rows as one relation, made on first need.
        sharing: the layer's call in progress whose modules share rows; no copy has it.
    """

    group: Group
    book: PartitionBook
    part_id: int
    relations: dict[EType, AnyRelation]
    edge_ids: dict[EType, Callable[[], Tensor]]
    src_rows: dict[str, Tensor]
    dst_rows: dict[str, Tensor]
    keys: Keys
    is_block: bool = False
    keep_seeds: bool = True
    device: torch.device = torch.device("cpu")
    directories: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    joined: dict[tuple[Relation, ...], Relation] = field(default_factory=dict)
    keyed_rows: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    sharing: Any = field(default=None, init=False, repr=False, compare=False)

    def first_nid(self, ntype: str) -> int:
        """Global id of this part's first node of a type."""
        return int(self.book.node_ranges[ntype][self.part_id, 0])

    def join(self, relations: tuple[Relation, ...]) -> Relation:
        """Relations out of the same source rows as one; collective on first use."""
        if relations not in self.joined:
            self.joined[relations] = join_relations(relations)
        return self.joined[relations]

    def to(self: S, device: torch.device) -> S:
        """A copy on ``device``; no communication."""
        src_rows = {name: rows.to(device) for name, rows in self.src_rows.items()}
        dst_rows = src_rows
        if self.is_block:
            dst_rows = {name: rows.to(device) for name, rows in self.dst_rows.items()}
        return replace(
            self,
            relations={etype: relation.to(device) for etype, relation in self.relations.items()},
            src_rows=src_rows,
            dst_rows=dst_rows,
            device=device,
            joined={},
        )


def with_relation(
    store: S, etype: EType, relation: AnyRelation, edge_ids: Callable[[], Tensor]
) -> S:
    """A copy in which one relation has other edges."""
    return replace(
        store,
        relations={**store.relations, etype: relation},
        edge_ids={**store.edge_ids, etype: edge_ids},
        joined={},
    )
