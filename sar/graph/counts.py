"""How many nodes and edges there are, here and everywhere, and their degrees."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.graph.node_count import NodeCount
from sar.graph.store import EType, GraphStore
from sar.graph.undistributed import refuse_undistributed


class LocalCount(NodeCount):
    """A count of rows that also leads to the ranks that hold the others.

    Attributes:
        group: the ranks.
    """

    group: Group

    @staticmethod
    def of_rank(here: int, everywhere: int | None, store: GraphStore) -> LocalCount:
        """int64 [1] on the device of ``store``."""
        count = torch.tensor([here], device=store.device).as_subclass(LocalCount)
        count.everywhere = None if everywhere is None else torch.full_like(count, everywhere)
        count.group = store.group
        return count


class Counts:
    """Counting members of :class:`sar.graph.ShardedGraph`; local unless the name says global."""

    _store: GraphStore
    _is_slice: bool
    canonical_etypes: list[EType]

    @property
    def ntypes(self) -> list[str]:
        raise NotImplementedError

    @property
    def srctypes(self) -> list[str]:
        raise NotImplementedError

    @property
    def dsttypes(self) -> list[str]:
        raise NotImplementedError

    def _canonical(self, etype: str | EType | None) -> EType:
        raise NotImplementedError

    def _num_rows(self, rows: dict[str, Tensor], types: list[str], ntype: str | None) -> int:
        if ntype is None:
            return sum(len(rows[name]) for name in types)
        if ntype not in types:
            raise KeyError(f"ntype: got {ntype!r}, expected one of {types}")
        return len(rows[ntype])

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Rows of ``srcdata``, of one type or all."""
        return self._num_rows(self._store.src_rows, self.srctypes, ntype)

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Rows of ``dstdata``, of one type or all."""
        return self._num_rows(self._store.dst_rows, self.dsttypes, ntype)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of this rank; on a block, those on either side, counted once."""
        refuse_undistributed()
        store = self._store
        if not store.is_block:
            return self._num_rows(store.src_rows, self.ntypes, ntype)
        names = self.ntypes if ntype is None else [ntype]
        pairs = [(store.src_rows[name], store.dst_rows[name]) for name in names]
        return sum(len(torch.unique(torch.cat(pair))) for pair in pairs)

    def num_edges(self, etype: str | EType | None = None) -> int:
        """Edges that end in rows of this rank, of one relation or all shown."""
        etypes = self.canonical_etypes if etype is None else [self._canonical(etype)]
        return sum(self._store.relations[name].num_edges for name in etypes)

    def num_nodes_global(self, ntype: str | None = None) -> int:
        """Nodes of the whole graph on all ranks."""
        return self._store.book.num_nodes(ntype)

    def num_edges_global(self, etype: str | EType | None = None) -> int:
        """Edges on all ranks; on a block, the block's."""
        etypes = self.canonical_etypes if etype is None else [self._canonical(etype)]
        return sum(self._store.relations[name].num_edges_global for name in etypes)

    number_of_src_nodes = num_src_nodes
    number_of_dst_nodes = num_dst_nodes
    number_of_nodes = num_nodes
    number_of_edges = num_edges
    number_of_nodes_global = num_nodes_global
    number_of_edges_global = num_edges_global

    def in_degrees(self, v: Any = "__ALL__", etype: str | EType | None = None) -> Tensor:
        """int64 edges that end in each destination row, or in rows ``v``."""
        degrees = self._store.relations[self._canonical(etype)].in_degrees
        return degrees if isinstance(v, str) else degrees[torch.as_tensor(v)]

    def out_degrees(self, u: Any = "__ALL__", etype: str | EType | None = None) -> Tensor:
        """int64 edges on all ranks that start in each source row, or in rows ``u``."""
        degrees = self._store.relations[self._canonical(etype)].out_degrees
        return degrees if isinstance(u, str) else degrees[torch.as_tensor(u)]

    @property
    def batch_size(self) -> int:
        """1: a sharded graph is one graph."""
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> LocalCount:
        """int64 [1] nodes of this rank; a division by it divides by the nodes of all ranks.

        DGL's readouts, which get it instead of the graph, reduce over all ranks.
        """
        refuse_undistributed()
        store, names = self._store, self.ntypes if ntype is None else [ntype]
        everywhere = sum(store.book.num_nodes(name) for name in names)
        return LocalCount.of_rank(
            self.num_nodes(ntype), None if store.is_block else everywhere, store
        )

    def batch_num_edges(self, etype: str | EType | None = None) -> LocalCount:
        """int64 [1] edges of this rank; like :meth:`batch_num_nodes`."""
        return LocalCount.of_rank(self.num_edges(etype), self.num_edges_global(etype), self._store)
