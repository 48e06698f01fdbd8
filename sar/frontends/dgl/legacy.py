"""Members of the original library's graph objects that are not DGL's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges import as_stored
from sar.edges.build import edge_ends
from sar.errors import NotSupportedError
from sar.frontends.dgl.counts import Counts
from sar.frontends.dgl.edge_columns import EdgeColumns
from sar.frontends.dgl.frame import Frame
from sar.partition.book import EType, PartitionBook
from sar.partition.require import require_dgl

ONE_SHOT = Policy(rounds=1, rematerialize=False)


class NodeSpace:
    """``graph.nodes("user")``: rows of the part; ``graph.nodes["user"].data["h"]``: columns."""

    def __init__(self, rows: dict[str, Tensor], frames: dict[str, Frame], types: list[str]) -> None:
        self._rows, self._frames, self._types = rows, frames, types

    def __call__(self, ntype: str | None = None) -> Tensor:
        return self._rows[self._checked(ntype)]

    def __getitem__(self, ntype: str | None) -> TypeData:
        return TypeData(self._frames[self._checked(ntype)])

    def _checked(self, ntype: str | None) -> str:
        if ntype is None:
            if len(self._types) != 1:
                raise ValueError(f"ntype: got None, expected one of {self._types}")
            return self._types[0]
        if ntype not in self._types:
            raise KeyError(f"ntype: got {ntype!r}, expected one of {self._types}")
        return ntype


class EdgeSpace:
    """``graph.edges[etype].data["w"]``, as in DGL; the end points of edges are not listed."""

    def __init__(self, columns: Callable[[str | EType], EdgeColumns]) -> None:
        self._columns = columns

    def __getitem__(self, etype: str | EType) -> TypeData:
        return TypeData(self._columns(etype))

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotSupportedError(
            "edges(): a sharded graph does not list the end points of its edges; change the graph "
            "before it is cut, and use update_all or apply_edges on its parts"
        )


@dataclass(frozen=True)
class TypeData:
    data: Frame | EdgeColumns


class OriginalMembers(Counts):
    """What scripts for the original library read from a graph, whole or sliced."""

    def _edge_columns(self, etype: str | EType) -> EdgeColumns:
        raise NotImplementedError

    @property
    def srcnodes(self) -> NodeSpace:
        """int64 rows of the part (inside the type) that the source rows are, and their columns."""
        return NodeSpace(self._store.src_rows, self._store.src_frames, self.srctypes)

    @property
    def dstnodes(self) -> NodeSpace:
        """int64 rows of the part (inside the type) that the destination rows are, and columns."""
        return NodeSpace(self._store.dst_rows, self._store.dst_frames, self.dsttypes)

    @property
    def nodes(self) -> NodeSpace:
        """The nodes of every type that the graph or slice shows; on a block the sources."""
        types = self.srctypes if self._store.is_block else self.ntypes
        return NodeSpace(self._store.src_rows, self._store.src_frames, types)

    @property
    def edges(self) -> EdgeSpace:
        """The columns of each edge type."""
        return EdgeSpace(self._edge_columns)

    def _part_rows(self, rows: dict[str, Tensor], types: list[str]) -> Tensor:
        """Rows of the part over all types, types one after the other."""
        store = self._store
        start = store.book.part_ranges[store.part_id][0]
        parts = [rows[ntype] + (store.first_nid(ntype) - start) for ntype in types]
        return torch.cat(parts)

    @property
    def input_nodes(self) -> Tensor:
        """int64 rows of the part, over all types, that the source rows are."""
        return self._part_rows(self._store.src_rows, self.srctypes)

    @property
    def seeds(self) -> Tensor:
        """Destination rows: on a block their global ids, on a whole graph rows of the part."""
        store = self._store
        rows = self._part_rows(store.dst_rows, self.dsttypes)
        return rows + store.book.part_ranges[store.part_id][0] if store.is_block else rows

    @property
    def tgt_in_src(self) -> bool:
        """Whether the source rows begin with the destination rows."""
        return self._store.keep_seeds

    @property
    def src_is_tgt(self) -> bool:
        """Whether source and destination rows are the same: True except on blocks."""
        return not self._store.is_block

    @property
    def partition_book(self) -> PartitionBook:
        """The partitioning."""
        return self._store.book

    _partition_book = partition_book

    @property
    def node_ranges(self) -> list[tuple[int, int]]:
        """(first, last + 1) global node id of each part."""
        return self._store.book.part_ranges

    @property
    def ntypes_global(self) -> list[str]:
        """Node types of the whole graph."""
        return list(self._store.book.ntypes)

    @property
    def canonical_etypes_global(self) -> list[EType]:
        """Canonical edge types of the whole graph."""
        return list(self._store.book.canonical_etypes)

    @property
    def etypes_global(self) -> list[str]:
        """Relation names of the whole graph."""
        return [etype[1] for etype in self._store.book.canonical_etypes]

    edge_type_names = canonical_etypes_global

    @property
    def canonical_relation(self) -> EType:
        """A slice's relation."""
        if len(self.canonical_etypes) != 1:
            raise ValueError(f"etype: got none, expected one of {self.canonical_etypes}")
        return self.canonical_etypes[0]

    @property
    def tgt_node_range(self) -> tuple[int, int]:
        """(start of the part, start + destination rows)."""
        start = self._store.book.part_ranges[self._store.part_id][0]
        return start, start + sum(len(self._store.dst_rows[ntype]) for ntype in self.dsttypes)

    @property
    def local_src_node_range(self) -> tuple[int, int]:
        """(start of the part, start + source rows)."""
        start = self._store.book.part_ranges[self._store.part_id][0]
        return start, start + sum(len(self._store.src_rows[ntype]) for ntype in self.srctypes)

    @property
    def graph_shard_managers(self) -> dict[int, Any]:
        """The slice of each relation by its number."""
        return {i: self[etype] for i, etype in enumerate(self.canonical_etypes)}  # type: ignore[index]

    @property
    def graph_shards(self) -> list[slice]:
        """One entry per part: where its edges lie among the relation's."""
        offsets = self._store.relations[self.canonical_relation].offsets
        return [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]

    def get_full_partition_graph(self, delete_shard_data: bool = True) -> Any:
        """The graph under the one-shot policy that keeps fetched rows."""
        return self.with_policy(ONE_SHOT)  # type: ignore[attr-defined]

    @property
    def sampling_graph(self) -> Any:
        """A DGLGraph of all nodes by their global ids and the edges that end in this rank's, with
        their columns, in ascending global id; collective, and made anew each time.

        Raises ``ValueError`` for a block and for several types.
        """
        etype, book = self.canonical_relation, self._store.book
        if self.is_block or len(book.ntypes) > 1:
            raise ValueError(f"sampling_graph: got {self!r}, expected a whole graph of one type")
        ends = edge_ends(as_stored(self._relation(None), "edges"))
        starts = torch.as_tensor(book.node_ranges[etype[0]][:, 0])
        src, dst = ends.src + starts[ends.owner], ends.dst + starts[self._store.part_id]
        graph = require_dgl("sampling_graph").graph((src, dst), num_nodes=book.num_nodes())
        for name in self._store.edge_frames[etype]:
            graph.edata[name] = self.edge_column(name).detach().cpu()
        return graph
