"""How many nodes and edges there are, here and everywhere, and their degrees."""

from __future__ import annotations

import torch

from sar.frontends.dgl.node_count import NodeCount
from sar.frontends.dgl.store import GraphStore
from sar.graph.view import GraphView
from sar.partition.book import EType
from sar.tracing.nodes import EdgesHere


class Counts(GraphView):
    """DGL's names of counts, and the counts that its readouts get."""

    _store: GraphStore

    number_of_src_nodes = GraphView.num_src_nodes
    number_of_dst_nodes = GraphView.num_dst_nodes
    number_of_nodes = GraphView.num_nodes
    number_of_nodes_global = GraphView.num_nodes_global
    number_of_edges_global = GraphView.num_edges_global

    def num_edges(self, etype: str | EType | None = None) -> int:
        """Edges that end in rows of this rank, of one relation or all shown."""
        return EdgesHere(super().num_edges(etype))

    number_of_edges = num_edges

    @property
    def batch_size(self) -> int:
        """1: a sharded graph is one graph."""
        return 1

    def batch_num_nodes(self, ntype: str | None = None) -> NodeCount:
        """int64 [1] nodes of this rank; a division by it divides by the nodes of all ranks.

        DGL's readouts, which get it instead of the graph, reduce over all ranks.
        """
        names = self.ntypes if ntype is None else [ntype]
        everywhere = None if self.is_block else sum(map(self.num_nodes_global, names))
        return self._count(self.num_nodes(ntype), everywhere)

    def batch_num_edges(self, etype: str | EType | None = None) -> NodeCount:
        """int64 [1] edges of this rank; like :meth:`batch_num_nodes`."""
        return self._count(self.num_edges(etype), self.num_edges_global(etype))

    def _count(self, here: int, everywhere: int | None) -> NodeCount:
        local = torch.tensor([here], device=self.device)
        whole = None if everywhere is None else torch.full_like(local, everywhere)
        return NodeCount.of(local, whole, self.group)
