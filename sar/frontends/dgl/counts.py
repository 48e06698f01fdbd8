"""How many nodes and edges there are, here and everywhere, and their degrees."""

from __future__ import annotations

import torch

from sar.comm import Group
from sar.frontends.dgl.node_count import NodeCount
from sar.frontends.dgl.store import GraphStore
from sar.graph.view import GraphView
from sar.partition.book import EType


class LocalCount(NodeCount):
    """A count of rows that also leads to the ranks that hold the others.

    Attributes:
        group: the ranks.
    """

    group: Group

    @staticmethod
    def of_rank(here: int, everywhere: int | None, store: GraphStore) -> LocalCount:
        """int64 [1] on the device of ``store``."""
        local = torch.tensor([here], device=store.device)
        whole = None if everywhere is None else torch.full_like(local, everywhere)
        count = LocalCount.of(local, whole)
        count.group = store.group
        return count


class Counts(GraphView):
    """DGL's names of counts, and the counts that its readouts get."""

    _store: GraphStore

    number_of_src_nodes = GraphView.num_src_nodes
    number_of_dst_nodes = GraphView.num_dst_nodes
    number_of_nodes = GraphView.num_nodes
    number_of_edges = GraphView.num_edges
    number_of_nodes_global = GraphView.num_nodes_global
    number_of_edges_global = GraphView.num_edges_global

    @property
    def batch_size(self) -> int:
        """1: a sharded graph is one graph."""
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> LocalCount:
        """int64 [1] nodes of this rank; a division by it divides by the nodes of all ranks.

        DGL's readouts, which get it instead of the graph, reduce over all ranks.
        """
        store, names = self._store, self.ntypes if ntype is None else [ntype]
        everywhere = sum(store.book.num_nodes(name) for name in names)
        return LocalCount.of_rank(
            self.num_nodes(ntype), None if store.is_block else everywhere, store
        )

    def batch_num_edges(self, etype: str | EType | None = None) -> LocalCount:
        """int64 [1] edges of this rank; like :meth:`batch_num_nodes`."""
        return LocalCount.of_rank(self.num_edges(etype), self.num_edges_global(etype), self._store)
