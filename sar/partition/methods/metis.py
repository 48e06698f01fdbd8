"""METIS, as DGL's `partition_graph` calls it: it holds the graph in memory."""

from __future__ import annotations

import numpy as np

from sar.partition.arrays import GraphArrays
from sar.partition.column import create_array
from sar.partition.methods import metis_main
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.graph import cut_graph
from sar.partition.methods.simple import equal_shares
from sar.partition.methods.solver import Solver
from sar.partition.progress import Counter

_METIS = Solver("METIS", "metis", "dgl", "dgl==1.1.3", metis_main.__file__)


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
        whole, folder = cut_graph(graph, options.scratch, options.progress), options.scratch
        # METIS has nothing to work with here, or complains of pieces without a node.
        if len(whole.rows.values) == 0 or 2 * options.num_parts > nodes:
            return equal_shares(graph, options.num_parts, None)
        create_array(folder / "types.npy", np.int16, (nodes,))[:] = whole.types
        counter = Counter(options.progress, "cutting the graph", nodes)
        settings = folder, options.seed, "edges" in balance
        parts = _METIS.solve(folder / "parts.npy", nodes, options.num_parts, *settings)
        counter.add(nodes)
        return np.array(parts)
