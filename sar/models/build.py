"""The model that options describe."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sar.graph import GraphView
from sar.models.calling import Call, read_call
from sar.models.convs import GATConv, GINConv, GraphConv, SAGEConv
from sar.models.own import build_own, expect_logits
from sar.models.stack import RelationalStack, Stack
from sar.nn import DistributedBN1D
from sar.partition.arrays import NTYPE_HOMO
from sar.run_options import ModelOptions


def call_of(options: ModelOptions, model: nn.Module) -> Call:
    """How the model that these options made is called."""
    return read_call(model, options.call, options.front_end) if options.is_own else Call()


def prepare_graph(graph: Any, options: ModelOptions) -> Any:
    """GCN and GAT want one self loop at each node (arXiv 1609.02907, 1710.10903)."""
    if options.model not in ("gcn", "gat"):
        return graph
    return graph.remove_self_loop().add_self_loop()


def build_model(
    options: ModelOptions,
    in_feats: int | dict[str, int],
    num_classes: int,
    *,
    graph: GraphView | None = None,
    target_type: str = NTYPE_HOMO,
) -> nn.Module:
    """The model that ``options`` describe, with fresh parameters from torch's generator.

    Args:
        in_feats: columns of the features; in a graph of several types by node type.
        graph: this rank's; ``rgcn`` asks for it, and a model of one's own may.
        target_type: the node type that the logits are of.

    Raises ``ValueError`` where the model is not for such a graph, or one's own cannot be made.
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
        return RelationalStack(
            graph, by_type, num_classes, target_type, layers=options.layers, hidden=options.hidden,
            dropout=options.dropout, batch_norm=options.batch_norm,
        )  # fmt: skip
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


class Attention(nn.Module):
    """A :class:`GATConv` whose heads lie side by side, or are averaged where they give logits."""

    def __init__(self, conv: nn.Module, average: bool) -> None:
        super().__init__()
        self.conv, self.average = conv, average

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        heads = self.conv(graph, x)
        return heads.mean(1) if self.average else heads.flatten(1)


def _conv(options: ModelOptions, in_feats: int, out_feats: int, last: bool = False) -> nn.Module:
    if options.model == "gat":
        width, heads = out_feats if last else out_feats // options.heads, options.heads
        return Attention(GATConv(in_feats, width, heads), last)
    if options.model == "sage":
        relu = None if last or options.batch_norm else F.relu  # in the layer: less memory
        return SAGEConv(in_feats, out_feats, relu)
    if options.model == "gcn":
        return GraphConv(in_feats, out_feats)
    perceptron = nn.Sequential(
        nn.Linear(in_feats, out_feats), nn.ReLU(), nn.Linear(out_feats, out_feats)
    )
    return GINConv(perceptron)
