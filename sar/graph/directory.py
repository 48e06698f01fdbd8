"""Nodes by a number that no cut changes, looked up without any rank holding the whole table."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.comm.collectives import ask_rows, send_rows
from sar.graph.view import GraphView


def directory_of(graph: GraphView, ntype: str) -> NodeDirectory:
    """The directory of a node type, kept with the graph; collective when it is made."""
    known: dict[str, NodeDirectory] = graph._store.directories
    if ntype not in known:
        known[ntype] = NodeDirectory(graph, ntype)
    return known[ntype]


class NodeDirectory:
    """The global ids of the nodes of a type by their original ids; made collectively.

    Each rank keeps an equal share of the table, [ceil(N / P)]. Where the partitioning has no
    original ids, nodes are numbered as it orders them.

    Attributes:
        first: the smallest original id, which the node of number 0 has.

    Raises ``ValueError`` on every rank when the original ids are not the numbers below N.
    """

    def __init__(self, graph: GraphView, ntype: str) -> None:
        self.group, self.num_nodes = graph.group, graph.num_nodes_global(ntype)
        self.share = max(1, -(-self.num_nodes // self.group.size))
        self.first, store = 0, graph._store
        rows = torch.arange(store.book.part_nodes(ntype, store.part_id))
        nids = rows + store.first_nid(ntype)
        numbers = self._numbers(graph.node_names(ntype)[0], nids)
        if numbers is None:
            parts = range(store.part_id)
            numbers = rows + sum(store.book.part_nodes(ntype, part) for part in parts)
        found = send_rows(self.group, numbers // self.share, torch.stack([numbers, nids], 1))
        start = self.group.rank * self.share
        length = max(0, min(self.share, self.num_nodes - start))
        self.table = torch.full((length,), -1, dtype=torch.int64)
        self.table[found[:, 0] - start] = found[:, 1]
        missing = int((self.table < 0).sum())
        error = ValueError(f"orig_id of {ntype!r}: {missing} ids are missing") if missing else None
        self.group.agree(error, "node directory")

    def _numbers(self, keys: Tensor, nids: Tensor) -> Tensor | None:
        """Keys less the smallest of all ranks; ``None`` where they are the global ids."""
        big = torch.iinfo(torch.int64).max
        low = keys.min() if len(keys) else torch.tensor(big)
        high = keys.max() if len(keys) else torch.tensor(-big)
        low, high = self.group.all_reduce(low, "min"), self.group.all_reduce(high, "max")
        if int(high) - int(low) + 1 == self.num_nodes or self.num_nodes == 0:
            self.first = int(low) if self.num_nodes else 0
            return keys - low
        other = self.group.all_reduce(torch.tensor(not torch.equal(keys, nids)).int(), "max")
        if int(other):
            raise ValueError(
                f"orig_id: got ids from {int(low)} to {int(high)} for {self.num_nodes} nodes, "
                "expected each number from 0 once"
            )
        return None

    def nids(self, numbers: Tensor) -> Tensor:
        """int64 [n] global ids of the nodes that have these numbers; collective."""
        start = self.group.rank * self.share
        return ask_rows(
            self.group,
            numbers // self.share,
            numbers,
            lambda asked: self.table.index_select(0, asked - start),
        )
