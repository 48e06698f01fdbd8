"""The library's own front end as :mod:`sar.registry` offers it, which needs no other library.

Its mini-batches are blocks for models that are made of the library's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group, LocalGroup
from sar.config import Policy
from sar.edges import Relation, build_relation
from sar.errors import NotSupportedError
from sar.graph import Scope
from sar.kernels.device import is_host
from sar.models import calling
from sar.models.convs import LAYERS
from sar.partition.arrays import ORIG_EID
from sar.partition.book import EType
from sar.sampling.batch import NO_EDGES, Drawn, columns_by_hop, tensors
from sar.tracing.reducing import aggregate_rows

__all__ = [
    "BLOCKS",
    "COLUMNS",
    "LAYERS",
    "SampledBlock",
    "arguments",
    "batch_maker",
    "install",
    "read_batch",
]
BLOCKS = "sar's blocks"
COLUMNS = {"edge_weight": "weight", "edge_feat": "feat"}
_POLICY = Policy(constant_inputs="off")  # the rows of a block are read once


def install() -> None:
    """Nothing: the library's own layers take sharded graphs as they are."""


def batch_maker(subgraph_type: str) -> Callable[[Any], Any]:
    if subgraph_type != "directional":
        expected = "'directional', or as_='tensors', 'pyg' or 'dgl'"
        raise NotSupportedError(f"subgraph_type: got {subgraph_type!r}, expected {expected}")
    return block_maker()


def read_batch(batch: Any, input_type: str, name: str, device: Any) -> tuple[Any, Any, Tensor]:
    blocks = [block.to(device) for block in batch]
    found = blocks[0].src_data
    features = {ntype: columns[name] for ntype, columns in found.items() if name in columns}
    return blocks, features, blocks[-1].dst_data[input_type]["input_id"]


def arguments(names: Sequence[str], given: Any, features: Any) -> list[Any]:
    return calling.arguments(names, given, features, COLUMNS)


class SampledBlock:
    """The edges drawn at one hop of a mini-batch: a graph of this rank alone, of two sides.

    Layers of :mod:`sar.models` take it as they take a sharded graph. Its source rows begin with
    its destination rows.

    Args:
        edges: by relation, int64 numbers of source rows and of destination rows.
        num_src, num_dst: rows of each node type.
        group: this rank alone.

    Attributes:
        node_ids: int64 [num_src] by node type, as of :class:`sar.sampling.SampledBatch`.
        src_data, dst_data: columns by node type: of the first block's sources and of the last
            block's destinations.
        edge_data: columns by relation, in the order of the edges; ``edge_ids`` among them.
    """

    is_block = True
    policy = _POLICY
    sharing = None

    def __init__(
        self,
        edges: Mapping[EType, tuple[Tensor, Tensor]],
        num_src: Mapping[str, int],
        num_dst: Mapping[str, int],
        group: Group,
    ) -> None:
        self.group, self._edges = group, dict(edges)
        self._num_src, self._num_dst = dict(num_src), dict(num_dst)
        self.node_ids: dict[str, Tensor] = {}
        self.src_data: dict[str, dict[str, Tensor]] = {n: {} for n in num_src}
        self.dst_data: dict[str, dict[str, Tensor]] = {n: {} for n in num_dst}
        self.edge_data: dict[EType, dict[str, Tensor]] = {e: {} for e in edges}
        self._relations: dict[EType, Relation] = {}

    @property
    def ntypes(self) -> list[str]:
        """Node types."""
        return list(self._num_src)

    @property
    def canonical_etypes(self) -> list[EType]:
        """Relations, as (source type, name, destination type)."""
        return list(self._edges)

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Source rows, of one type or all."""
        return sum(self._num_src.values()) if ntype is None else self._num_src[ntype]

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Destination rows, of one type or all."""
        return sum(self._num_dst.values()) if ntype is None else self._num_dst[ntype]

    def num_edges(self, etype: EType | None = None) -> int:
        """Edges, of one relation or all."""
        return sum(len(self._edges[one][0]) for one in ([etype] if etype else self._edges))

    @cached_property
    def sole_relation(self) -> Relation | None:
        """The relation, where there is one node type and one relation."""
        is_one = len(self._num_src) == len(self._edges) == 1
        return self.relation() if is_one else None

    def relation(self, etype: str | EType | None = None) -> Relation:
        """The edges of a relation as one; made at first need."""
        named = [one for one in self._edges if etype in (None, one, one[1])]
        if len(named) != 1:
            raise ValueError(f"etype: got {etype!r}, expected one of {self.canonical_etypes}")
        if named[0] not in self._relations:
            self._relations[named[0]] = self._made(named[0])
        return self._relations[named[0]]

    def _made(self, etype: EType) -> Relation:
        src, dst = (ends.cpu().int() for ends in self._edges[etype])
        numbers = torch.arange(len(src), dtype=torch.int32)
        sizes = self._num_src[etype[0]], self._num_dst[etype[2]]
        offsets, device = [0, len(src)], self._edges[etype][0].device
        made = build_relation(self.group, src, dst, numbers, offsets, *sizes, numbers.clone)
        return made if is_host(device) else made.to(device)

    def scope(self, etype: str | EType | None = None) -> Scope:
        """A relation and how it is streamed."""
        relation = self.relation(etype)
        return Scope(relation, _POLICY, relation.plan.device)

    def in_degrees(self, etype: str | EType | None = None) -> Tensor:
        """int64 [num_dst] edges that end in each destination row."""
        return self.relation(etype).in_degrees

    def out_degrees(self, etype: str | EType | None = None) -> Tensor:
        """int64 [num_src] edges of this block that start in each source row."""
        return self.relation(etype).out_degrees

    def aggregate(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        edge_weight: Tensor | None = None,
        etype: str | EType | None = None,
    ) -> Tensor:
        """Reduce the rows of in-neighbors, as a sharded graph does.

        Args:
            x: [num_src, ...] rows.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            edge_weight: [num_edges] or [num_edges, 1], multiplies each row that is summed.
        """
        return aggregate_rows(self.relation(etype), x, op, edge_weight, _POLICY)

    def to(self, device: torch.device | str) -> SampledBlock:
        """The same on ``device``."""
        edges = {
            etype: (src.to(device), dst.to(device)) for etype, (src, dst) in self._edges.items()
        }
        moved = SampledBlock(edges, self._num_src, self._num_dst, self.group)
        moved.node_ids = {n: ids.to(device) for n, ids in self.node_ids.items()}
        for name in ("src_data", "dst_data", "edge_data"):
            columns = getattr(self, name).items()
            found = {kind: {k: v.to(device) for k, v in one.items()} for kind, one in columns}
            setattr(moved, name, found)
        return moved

    def __repr__(self) -> str:
        rows = {n: (self._num_src[n], self._num_dst[n]) for n in self._num_src}
        edges = {etype[1]: self.num_edges(etype) for etype in self._edges}
        return f"SampledBlock(source and destination rows {rows}, edges {edges})"


def block_maker() -> Callable[[Drawn], list[SampledBlock]]:
    """A function that makes the blocks of a batch, the input layer's first.

    The first has the features of its sources, the last those of the seeds and, for the type of the
    seeds, ``input_id``.
    """
    group = LocalGroup()

    def make(drawn: Drawn) -> list[SampledBlock]:
        batch, blocks = tensors(drawn), list[SampledBlock]()
        counts = {n: one[0] for n, one in batch.num_nodes.items()}
        for hop, (edges, columns) in enumerate(zip(batch.edges, columns_by_hop(batch))):
            after = {n: count + batch.num_nodes[n][hop + 1] for n, count in counts.items()}
            ends = {e: edges.get(e, NO_EDGES)[:2] for e in drawn.types.canonical_etypes}
            block = SampledBlock(ends, after, counts, group)
            block.node_ids = {n: ids[: after[n]] for n, ids in batch.node_ids.items()}
            for etype, found in columns.items():
                block.edge_data[etype] = {"edge_ids": found.pop(ORIG_EID), **found}
            blocks.insert(0, block)
            counts = after
        for ntype, fields in batch.node_data.items():
            blocks[0].src_data[ntype].update(fields)
            seeds = blocks[-1].num_dst_nodes(ntype)
            blocks[-1].dst_data[ntype].update({k: rows[:seeds] for k, rows in fields.items()})
        if batch.links is None:
            blocks[-1].dst_data[str(batch.input_type)]["input_id"] = batch.input_id
        return blocks

    return make
