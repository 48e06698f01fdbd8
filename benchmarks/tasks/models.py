"""Stacks of unmodified layers of ``dgl.nn`` that contenders train, the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HIDDEN, CLASSES, HEADS = 3, 256, 16, 4


class Block(nn.Module):
    """A graph layer with what follows it: from one layer's input to that of the next."""

    def __init__(self, conv: nn.Module, *then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.then = conv, then

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        x = self.conv(graph, x)
        for step in self.then:
            x = step(x)
        return x


class Stack(nn.Module):
    """Three layers of a kind: sage (of means), gcn (normalized on both sides), gat or gatv2, whose
    heads are concatenated, those of the last averaged."""

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__()
        *hidden, last = zip([num_features, *[HIDDEN] * (LAYERS - 1)], [*[HIDDEN] * 2, CLASSES])
        self.heads = kind in ("gat", "gatv2")
        if kind == "sage":
            layers = [dgl.nn.SAGEConv(*size, "mean", activation=F.relu) for size in hidden]
            layers.append(dgl.nn.SAGEConv(*last, "mean"))
        elif kind == "gcn":
            layers = [Block(dgl.nn.GraphConv(*size), F.relu) for size in hidden]
            layers.append(dgl.nn.GraphConv(*last))
        else:
            layer = {"gat": dgl.nn.GATConv, "gatv2": dgl.nn.GATv2Conv}[kind]
            flat = partial(torch.flatten, start_dim=1)
            layers = [
                Block(layer(width, HIDDEN // HEADS, HEADS), flat, F.elu) for width, _ in hidden
            ]
            layers.append(layer(*last, HEADS))
        self.layers = nn.ModuleList(layers)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        """``graph``: one for all layers, or a list with one for each."""
        for layer, one in zip(self.layers, graph if isinstance(graph, list) else [graph] * LAYERS):
            x = layer(one, x)
        return x.mean(1) if self.heads else x
