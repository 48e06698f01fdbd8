"""Models of several graph layers: one kind of layer, or R-GCN for several types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar.errors import NotSupportedError
from sar.graph import GraphView
from sar.models.sharing import reduce_jointly
from sar.nn import DistributedBN1D, Dropout, ShardedEmbedding
from sar.ops.rectify import rectified
from sar.partition.book import EType


class Stack(nn.Module):
    """Graph layers with ReLU and dropout between them; the last gives the logits.

    Args:
        convs: modules called as ``conv(graph, x)``.
        norms: one for each hidden layer, or none.
        dropout: probability on every layer's input.

    Attributes:
        num_blocks: the layers, one for each block when it is called with a list of blocks.
    """

    def __init__(self, convs: list[nn.Module], norms: list[nn.Module], dropout: float) -> None:
        super().__init__()
        self.convs, self.norms = nn.ModuleList(convs), nn.ModuleList(norms)
        self.dropout = Dropout(dropout)
        self._layers = [_Layer(self, i) for i in range(len(convs))]
        self.num_blocks = len(convs)

    def graph_layers(self) -> list[nn.Module]:
        """For :func:`sar.set_activations`: from one graph layer's input to that of the next."""
        return list(self._layers)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``x`` [n, in_feats] of this rank's nodes to logits [n, num_classes].

        With a list of blocks: from the first one's source rows to the last one's destinations.
        """
        graphs = graph if isinstance(graph, list) else [graph] * self.num_blocks
        for layer, one in zip(self._layers, graphs, strict=True):
            x = layer(one, x)
        return x


class _Layer(nn.Module):
    """One layer of a stack, which owns the parameters."""

    def __init__(self, stack: Stack, index: int) -> None:
        super().__init__()
        self.conv, self.dropout = stack.convs[index], stack.dropout
        hidden = index < len(stack.convs) - 1
        self.norm = stack.norms[index] if hidden and stack.norms else None
        self.rectifies = hidden and getattr(self.conv, "activation", None) is None

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.conv(graph, _dropped(self.dropout, graph, x))
        if self.norm is not None:
            return self.norm(x, relu=True)
        return rectified(x) if self.rectifies else x  # nobody saved what it overwrites


def _dropped(dropout: Dropout, graph: Any, x: Tensor, ntype: str | None = None) -> Tensor:
    """Dropout of ``x``, the source rows of ``graph`` of one type."""
    if isinstance(graph, GraphView):
        return dropout(x, graph, rows=graph.srctypes[0] if ntype is None else ntype)
    return F.dropout(x, dropout.p, dropout.training)  # a block that was sampled


class RelationalStack(nn.Module):
    """R-GCN (arXiv 1703.06103): of each relation the mean of its sources times a matrix, summed
    over relations, and the node's own row times another.

    Rows first become ``hidden`` wide: by a matrix for types that have features, and for the others
    they are learned, a row for each node on the rank that owns it.

    Args:
        graph: this rank's, whose types and nodes count.
        in_feats: width of the features, by node type.
        target_type: the node type that logits are of.
        layers, hidden, dropout, batch_norm: as :class:`sar.train.ModelOptions` says.

    Attributes:
        num_blocks: the layers, one for each block when it is called with a list of blocks.
    """

    def __init__(
        self,
        graph: GraphView,
        in_feats: Mapping[str, int],
        num_classes: int,
        target_type: str,
        *,
        layers: int,
        hidden: int,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.target_type, self.num_blocks = target_type, layers
        self.inputs = nn.ModuleDict({t: nn.Linear(n, hidden) for t, n in in_feats.items()})
        others = [ntype for ntype in graph.ntypes if ntype not in in_feats]
        self.tables = nn.ModuleDict({t: ShardedEmbedding(graph, t, hidden) for t in others})
        widths = [hidden] * layers + [num_classes]
        self.layers = nn.ModuleList(
            RelationalLayer(graph, a, b, dropout) for a, b in zip(widths[:-1], widths[1:])
        )
        normed = range(layers - 1 if batch_norm else 0)
        self.norms = nn.ModuleDict(
            {f"{i} {t}": DistributedBN1D(hidden) for i in normed for t in graph.ntypes}
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
        if not isinstance(graph, GraphView):
            raise NotSupportedError(
                f"sampled: node type {table.ntype!r} has no features, and learned rows of other "
                "ranks' nodes are not fetched; expected features of all types"
            )
        return table(graph)


class RelationalLayer(nn.Module):
    """The relations of a layer and each node's own row, ``width`` to ``out`` columns."""

    def __init__(self, graph: GraphView, width: int, out: int, dropout: float) -> None:
        super().__init__()
        self.etypes = list(graph.canonical_etypes)
        weights = [nn.Parameter(torch.empty(width, out)) for _ in self.etypes]
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        self.relations = nn.ParameterList(weights)
        self.own = nn.ModuleDict({ntype: nn.Linear(width, out) for ntype in graph.ntypes})
        self.dropout = Dropout(dropout)

    def forward(self, graph: Any, h: dict[str, Tensor], wanted: str | None) -> dict[str, Tensor]:
        """Rows [num_src, width] by type to [num_dst, out], of all or of the one ``wanted`` type."""
        h = {ntype: _dropped(self.dropout, graph, rows, ntype) for ntype, rows in h.items()}
        ntypes = list(h) if wanted is None else [wanted]
        weights = {e: w for e, w in zip(self.etypes, self.relations) if e[2] in ntypes}
        found: dict[str, Tensor] = {}
        for etype, rows in sums_of_relations(graph, h, weights):
            scale = graph.in_degrees(etype=etype).clamp(min=1).to(rows.dtype)
            mean = rows * scale.reciprocal().unsqueeze(1)
            found[etype[2]] = found[etype[2]] + mean if etype[2] in found else mean
        own = {t: self.own[t](h[t][: graph.num_dst_nodes(t)]) for t in ntypes}
        return {t: rows + found[t] if t in found else rows for t, rows in own.items()}


def sums_of_relations(
    graph: Any, h: Mapping[str, Tensor], weights: Mapping[EType, Tensor]
) -> Iterator[tuple[EType, Tensor]]:
    """For each relation the sums, by destination, of its source rows times its matrix; collective.

    A matrix that makes rows narrower is multiplied first. Else the relations out of one node type
    are summed together, where that spares messages.

    ``h``: [num_src, width] by node type; ``weights``: [width, out], in an order that ranks share.
    """
    ready: dict[EType, Tensor] = {}
    for etype, weight in weights.items():
        x = h[etype[0]]
        if weight.shape[0] > weight.shape[1]:
            yield etype, graph.aggregate(x @ weight, etype=etype)
            continue
        if etype not in ready:
            ready |= _sums(graph, x, [e for e in weights if e[0] == etype[0]])
        yield etype, ready.pop(etype) @ weight


def _sums(graph: Any, x: Tensor, etypes: list[EType]) -> dict[EType, Tensor]:
    if not isinstance(graph, GraphView) or graph.group.size == 1 or len(etypes) == 1:
        return {etype: graph.aggregate(x, etype=etype) for etype in etypes}
    relations = {graph.scope(etype).relation: etype for etype in etypes}
    rows = reduce_jointly(graph._store, dict.fromkeys(relations, "sum"), x, graph.policy)  # type: ignore[arg-type]
    return {relations[relation]: part for relation, part in rows.items()}
