"""METIS, as DGL's `partition_graph` calls it, in memory."""

from __future__ import annotations

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.graph import cut_graph
from sar.partition.methods.metis_solver import metis
from sar.partition.methods.simple import equal_shares
from sar.partition.progress import Counter


class Metis(Method):
    """METIS' recursive bisection; needs dgl, and some hundred bytes an edge in memory.

    Each node type is balanced. With ``edges`` the in-edges of each are balanced too: that cuts a
    few more edges, and no part has several times the work of the others. By itself it does so for
    graphs of one node type; with several, METIS then loses hold of both.
    """

    name = "metis"
    balances = frozenset({"edges"})

    def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
        """Raises MissingDependencyError without dgl, PartitionError when METIS gives up."""
        balance, nodes = options.balance, graph.total_nodes
        if balance is None:
            balance = self.balances if len(graph.num_nodes) == 1 else frozenset()
        rows = cut_graph(graph, options.scratch, options.progress).rows
        # METIS has nothing to work with here, or complains of pieces without a node.
        if len(rows.values) == 0 or 2 * options.num_parts > nodes:
            return equal_shares(graph, options.num_parts, None)
        # It takes no seed from DGL: another seed is another order of the nodes.
        relabel = np.arange(nodes)
        if options.seed:
            relabel = np.random.default_rng(options.seed).permutation(nodes)
        types = np.empty(nodes, dtype=np.int64)
        types[relabel] = np.repeat(np.arange(len(graph.num_nodes)), list(graph.num_nodes.values()))
        src = np.repeat(np.arange(nodes), np.diff(rows.indptr))
        ends = relabel[src], relabel[rows.values]
        counter = Counter(options.progress, "cutting the graph", nodes)
        parts = metis(*ends, types, options.num_parts, "edges" in balance)[relabel]
        counter.add(nodes)
        return parts
