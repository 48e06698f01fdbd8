"""Negative edges for link prediction, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar import expect
from sar.graph import GraphView
from sar.graph.directory import NodeDirectory
from sar.graph.edge_graph import edge_graph, global_ends
from sar.kernels.keyed import keyed_uniform
from sar.nn.link import of_one_relation

# Which ends of an edge are replaced by random nodes: source, destination.
_REPLACED = {
    "uniform": (True, True),
    "per_source": (False, True),
    "per_destination": (True, False),
}


class NegativeSampler:
    """Draws ``k`` negative edges for each edge of a graph; made collectively.

    Negative j of the edge with original id e takes the node whose original id is
    floor(N x uniform(seed, step, end, e, j)) of the N of its type (:mod:`sar.kernels.keyed`):
    neither the cut nor the number of ranks plays a part. Nobody looks whether it is a true edge.

    A negative belongs to the rank that owns its destination, as edges do. Drawing costs, in time
    and memory, in proportion to this rank's edges, negatives and the rows these need; what a rank
    holds of the graph's nodes is its share.

    Args:
        graph: its edges are the true ones; of one relation, or a slice ``graph[etype]``.
        k: negatives for each edge.
        method: ``"per_source"`` keeps the edge's source, ``"per_destination"`` its destination,
            ``"uniform"`` neither.
        seed: int, the same on all ranks.
        columns: int64 columns of ``graph.edata`` that negatives get from their edge, such as types.

    Raises, on every rank:
        ValueError, TypeError, KeyError: an argument that does not fit, or original ids that are not
            the numbers below N.
    """

    def __init__(
        self,
        graph: GraphView,
        k: int = 1,
        method: str = "per_source",
        *,
        seed: int = 0,
        columns: Sequence[str] = (),
    ) -> None:
        alike = {"k": k, "method": method, "seed": seed, "columns": list(columns)}
        with graph.group.agreed("NegativeSampler", alike):
            of_one_relation(graph)
            expect.integer(k, "k", at_least=1)
            expect.one_of(method, "method", _REPLACED)
            expect.integer(seed, "seed")
            self.columns = {name: _column(graph, name) for name in columns}
        self.graph, self.k, self.method, self.seed = graph, k, method, seed
        self.keys = graph.scope().relation.keys.long().cpu()
        types = (graph.srctypes[0], graph.dsttypes[0])
        known: dict[str, NodeDirectory] = {}
        ends = global_ends(graph)
        self.sides: list[NodeDirectory | Tensor] = []
        for replaced, ntype, end in zip(_REPLACED[method], types, ends, strict=True):
            if replaced and ntype not in known:
                known[ntype] = NodeDirectory(graph, ntype)
            self.sides.append(known[ntype] if replaced else end)

    def __call__(self, step: int) -> GraphView:
        """The negatives of a step, as a graph over the same nodes; collective.

        Its ``edata["_ID"]`` is k times the edge's original id plus j; it has the columns that were
        asked for. Drawn anew, the same step gives the same negatives.
        """
        src, dst = (self._end(side, number, step) for number, side in enumerate(self.sides))
        eids = (self.keys.unsqueeze(1) * self.k + torch.arange(self.k)).view(-1)
        columns = {name: value.repeat_interleave(self.k) for name, value in self.columns.items()}
        return edge_graph(self.graph, src, dst, eids, columns)

    def _end(self, side: NodeDirectory | Tensor, number: int, step: int) -> Tensor:
        """int64 [E * k] global ids of one end of the negatives."""
        if isinstance(side, Tensor):
            return side.repeat_interleave(self.k)
        seed = _mixed(self.seed, 2 * step + number)
        share = keyed_uniform(self.keys, self.k, seed).mul_(side.num_nodes)
        return side.nids(share.long().view(-1))


def _mixed(seed: int, word: int) -> int:
    """A seed whose neighbors have nothing in common with it."""
    return int(keyed_uniform(torch.tensor([word]), 1, seed) * 2.0**53)


def _column(graph: GraphView, name: str) -> Tensor:
    column = graph.edge_column(name)
    if column.dtype != torch.int64 or column.dim() != 1:
        raise TypeError(
            f"columns: {name!r} is {column.dtype} {tuple(column.shape)}, expected int64 [E]"
        )
    return column.cpu()
