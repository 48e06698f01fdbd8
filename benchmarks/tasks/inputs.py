"""Models whose input layer is kept or sent anew, and whose few labels need few rows or all."""

from __future__ import annotations

from typing import Any

import dgl.nn
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.sage import CLASSES, HIDDEN, LAYERS, Sage, Sar
from benchmarks.tasks.stack import Stack


class Inputs(Sar):
    """One partition.

    Args:
        model: sage, that of :class:`benchmarks.tasks.sage.Sar`; gcn or gat, as many layers.
        constant_inputs: of the policy.
        every: one training node in so many keeps its label.
        blocks: train on the rows that reach the loss.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        port: int,
        parts: str,
        constant_inputs: str,
        every: int = 1,
        blocks: bool = False,
        model: str = "sage",
    ) -> None:
        self.kind, self.saved, self.blocks = model, 0.0, None
        super().__init__(rank, size, port, parts, 1)
        policy = self.sar.Policy(rounds=1, constant_inputs=constant_inputs)
        self.graph = self.graph.with_policy(policy)
        self.train = self.train[::every]
        if blocks:
            self.use_blocks()
        self.start()

    def use_blocks(self) -> None:
        """Rows and graphs of training alone take the place of the whole."""
        from sar.graph.layer_blocks import plan_blocks

        plan = plan_blocks(self.graph, self.train, LAYERS)
        self.saved, self.blocks = plan.saved, plan.build()
        self.features = self.features[self.blocks[0].srcdata["_ID"] - self.graph.ndata["_ID"][0]]
        self.labels = self.labels[self.train]
        self.train = torch.arange(len(self.train))

    def make_model(self, num_features: int) -> nn.Module:
        if self.kind == "sage":
            return OnBlocks(num_features, self.blocks)
        return Gcn(num_features) if self.kind == "gcn" else Stack("gat", num_features)

    def saved_work(self) -> float:
        """Share of the whole graph's work that the blocks leave out."""
        return self.saved


class Gcn(nn.Module):
    """Unmodified ``dgl.nn.GraphConv`` layers, normalized on both sides."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = [num_features, *[HIDDEN] * (LAYERS - 1), CLASSES]
        convs = (dgl.nn.GraphConv(*pair) for pair in zip(widths[:-1], widths[1:]))
        self.layers = nn.ModuleList(convs)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(graph, x))
        return self.layers[-1](graph, x)


class OnBlocks(Sage):
    """The same layers, each on its block where there are some."""

    def __init__(self, num_features: int, blocks: list | None) -> None:
        super().__init__(num_features)
        self.blocks = blocks

    def forward(self, graph, x):  # type: ignore[no-untyped-def]
        for layer, block in zip(self.layers, self.blocks or [graph] * LAYERS):
            x = layer(block, x)
        return x
