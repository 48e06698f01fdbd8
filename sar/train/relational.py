"""The built-in model for graphs of several node and edge types."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sar.errors import NotSupportedError
from sar.frontends.dgl import ShardedGraph
from sar.nn import DistributedBN1D, Dropout, ShardedEmbedding
from sar.partition.require import require_dgl
from sar.train.options import ModelOptions


class RelationalStack(nn.Module):
    """R-GCN (arXiv 1703.06103): of each relation the mean of its sources times a matrix, summed
    over relations, and the node's own row times another.

    Rows first become ``hidden`` wide: by a matrix for types that have features, and for the others
    they are learned, a row for each node on the rank that owns it.

    Args:
        graph: this rank's, whose types and nodes count.
        in_feats: width of the features, by node type.
        target_type: the node type that logits are of.

    Attributes:
        num_blocks: the layers, one for each block when it is called with a list of blocks.
    """

    def __init__(
        self,
        options: ModelOptions,
        graph: ShardedGraph,
        in_feats: dict[str, int],
        num_classes: int,
        target_type: str,
    ) -> None:
        super().__init__()
        hidden, self.target_type, self.num_blocks = options.hidden, target_type, options.layers
        self.inputs = nn.ModuleDict({t: nn.Linear(n, hidden) for t, n in in_feats.items()})
        others = [ntype for ntype in graph.ntypes if ntype not in in_feats]
        self.tables = nn.ModuleDict({t: ShardedEmbedding(graph, t, hidden) for t in others})
        widths = [hidden] * options.layers + [num_classes]
        self.layers = nn.ModuleList(
            _Layer(graph, a, b, options) for a, b in zip(widths[:-1], widths[1:])
        )
        hidden_layers = range(options.layers - 1 if options.batch_norm else 0)
        self.norms = nn.ModuleDict(
            {f"{i} {t}": DistributedBN1D(hidden) for i in hidden_layers for t in graph.ntypes}
        )

    def forward(self, graph: Any, x: Tensor | dict[str, Tensor]) -> Tensor:
        """Features by node type to logits [n, num_classes] of the target type's nodes.

        With a list of blocks: from the first one's source rows to the last one's destinations.
        """
        graphs = graph if isinstance(graph, list) else [graph] * self.num_blocks
        x = {self.target_type: x} if isinstance(x, Tensor) else x
        h = {ntype: self.inputs[ntype](rows) for ntype, rows in x.items()}
        h |= {ntype: self._learned(table, graphs[0]) for ntype, table in self.tables.items()}
        for number, (layer, one) in enumerate(zip(self.layers, graphs, strict=True)):
            wanted = None if number < self.num_blocks - 1 else self.target_type
            h = layer(one, h, wanted)
            if wanted is None:
                h = {ntype: self._hidden(number, ntype, rows) for ntype, rows in h.items()}
        return h[self.target_type]

    def _hidden(self, number: int, ntype: str, rows: Tensor) -> Tensor:
        return F.relu(self.norms[f"{number} {ntype}"](rows) if len(self.norms) else rows)

    def _learned(self, table: nn.Module, graph: Any) -> Tensor:
        if not isinstance(graph, ShardedGraph):
            raise NotSupportedError(
                f"sampled: node type {table.ntype!r} has no features, and learned rows of other "
                "ranks' nodes are not fetched; expected features of all types"
            )
        return table(graph)


class _Layer(nn.Module):
    """The relations of a layer, and each node's own row."""

    def __init__(self, graph: ShardedGraph, width: int, out: int, options: ModelOptions) -> None:
        super().__init__()
        require_dgl("--model rgcn")
        from dgl.nn.pytorch import GraphConv, HeteroGraphConv

        relations = graph.canonical_etypes
        convs = {r: GraphConv(width, out, "right", bias=False) for r in relations}
        self.convs = HeteroGraphConv(convs, aggregate="sum")
        self.own = nn.ModuleDict({ntype: nn.Linear(width, out) for ntype in graph.ntypes})
        self.dropout = Dropout(options.dropout)

    def forward(self, graph: Any, h: dict[str, Tensor], wanted: str | None) -> dict[str, Tensor]:
        """Rows of all types, or of the one that is ``wanted``."""
        h = {ntype: self._dropped(graph, ntype, rows) for ntype, rows in h.items()}
        ntypes = h if wanted is None else [wanted]
        ends = {ntype: h[ntype][: graph.num_dst_nodes(ntype)] for ntype in ntypes}
        sums = self.convs(graph, (h, ends))
        found = {ntype: self.own[ntype](rows) for ntype, rows in ends.items()}
        return {t: rows + sums[t] if t in sums else rows for t, rows in found.items()}

    def _dropped(self, graph: Any, ntype: str, rows: Tensor) -> Tensor:
        if isinstance(graph, ShardedGraph):
            return self.dropout(rows, graph, rows=ntype)
        return F.dropout(rows, self.dropout.p, self.training)  # a block that was sampled
