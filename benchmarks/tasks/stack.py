"""Stacks of layers that compute on edges; nothing here imports a library that is compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.sage import CLASSES, HIDDEN, LAYERS, Block

HEADS = 4


class Stack(nn.Module):
    """Three unmodified ``dgl.nn`` layers; heads are concatenated, those of the last averaged."""

    def __init__(self, kind: str, num_features: int) -> None:
        super().__init__()
        widths = [num_features, *[HIDDEN] * (LAYERS - 1)]
        layer = {"gat": dgl.nn.GATConv, "gatv2": dgl.nn.GATv2Conv}[kind]
        convs = [layer(width, HIDDEN // HEADS, HEADS) for width in widths[:-1]]
        convs = [Block(conv, partial(torch.flatten, start_dim=1), F.elu) for conv in convs]
        convs.append(layer(widths[-1], CLASSES, HEADS))
        self.convs = nn.ModuleList(convs)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(graph, x)
        return self.convs[-1](graph, x).mean(1)
