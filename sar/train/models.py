"""Stacks of unmodified DGL layers for the command line."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sar.errors import MissingDependencyError
from sar.frontends.dgl import ShardedGraph
from sar.nn import DistributedBN1D, Dropout
from sar.partition.arrays import NTYPE_HOMO
from sar.train.options import ModelOptions
from sar.train.own_model import build_own, expect_logits
from sar.train.relational import RelationalStack


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
        if isinstance(graph, ShardedGraph):
            x = self.dropout(x, graph, rows=graph.srctypes[0])
        else:  # a block that was sampled
            x = F.dropout(x, self.dropout.p, self.training)
        x = self.conv(graph, x)
        if self.norm is not None:
            return self.norm(x, relu=True)
        return F.relu(x, inplace=True) if self.rectifies else x  # nobody saved what it overwrites


def prepare_graph(graph: ShardedGraph, options: ModelOptions) -> ShardedGraph:
    """GCN and GAT want one self loop at each node (arXiv 1609.02907, 1710.10903)."""
    if options.model not in ("gcn", "gat"):
        return graph
    return graph.remove_self_loop().add_self_loop()


def build_model(
    options: ModelOptions,
    in_feats: int | dict[str, int],
    num_classes: int,
    *,
    graph: ShardedGraph | None = None,
    target_type: str = NTYPE_HOMO,
) -> nn.Module:
    """The model that ``options`` describe, with fresh parameters from torch's generator.

    Args:
        in_feats: columns of the features; in a graph of several types by node type.
        graph: this rank's; ``rgcn`` asks for it, and a model of one's own may.
        target_type: the node type that the logits are of.

    Raises ``ValueError`` where the model is not for such a graph, or one's own cannot be made, and
    ``MissingDependencyError`` when DGL, of whose layers the built-in ones are, is not installed.
    """
    if options.is_own:
        widths = {"in_feats": in_feats, "out_feats": num_classes}
        offered = {**widths, "graph": graph, "target_type": target_type}
        model = build_own(options.model, options.args, offered)
        expect_logits(model, options.model, num_classes, target_type)
        return model
    if options.model == "rgcn":
        if graph is None:
            raise ValueError("graph: got None, expected this rank's graph for 'rgcn'")
        by_type = in_feats if isinstance(in_feats, dict) else {target_type: in_feats}
        return RelationalStack(options, graph, by_type, num_classes, target_type)
    if isinstance(in_feats, dict):
        raise ValueError(for_several_types(options.model))
    return _stack(options, in_feats, num_classes)


def for_several_types(model: str) -> str:
    """What to say of a model that takes no graph of several types."""
    return (
        f"model: got {model!r} and a graph of several node or edge types, expected 'rgcn' or a "
        "model of your own, as module:Class"
    )


def _stack(options: ModelOptions, in_feats: int, num_classes: int) -> Stack:
    widths = [in_feats] + [options.hidden] * (options.layers - 1) + [num_classes]
    convs = [_conv(options, a, b) for a, b in zip(widths[:-2], widths[1:-1])]
    convs.append(_conv(options, widths[-2], num_classes, last=True))
    norms: list[nn.Module] = []
    if options.batch_norm:
        norms = [DistributedBN1D(width) for width in widths[1:-1]]
    return Stack(convs, norms, options.dropout)


class _Attention(nn.Module):
    """A ``GATConv`` whose heads lie side by side, or are averaged where they give logits."""

    def __init__(self, conv: nn.Module, average: bool) -> None:
        super().__init__()
        self.conv, self.average = conv, average

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        heads = self.conv(graph, x)
        return heads.mean(1) if self.average else heads.flatten(1)


def _conv(options: ModelOptions, in_feats: int, out_feats: int, last: bool = False) -> nn.Module:
    try:
        from dgl.nn.pytorch import GATConv, GINConv, GraphConv, SAGEConv
    except ImportError as error:
        raise MissingDependencyError(
            "the built-in models are made of DGL's layers: pip install dgl==1.1.3"
        ) from error
    if options.model == "gat":
        width, heads = out_feats if last else out_feats // options.heads, options.heads
        return _Attention(GATConv(in_feats, width, heads, allow_zero_in_degree=True), last)
    if options.model == "sage":
        relu = None if last or options.batch_norm else F.relu  # in the layer: less memory
        return SAGEConv(in_feats, out_feats, "mean", activation=relu)
    if options.model == "gcn":
        return GraphConv(in_feats, out_feats, allow_zero_in_degree=True)
    perceptron = nn.Sequential(
        nn.Linear(in_feats, out_feats), nn.ReLU(), nn.Linear(out_feats, out_feats)
    )
    return GINConv(perceptron, "sum")
