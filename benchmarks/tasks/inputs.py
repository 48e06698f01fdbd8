"""GraphSAGE whose input layer is kept or sent anew, and whose few labels need few rows or all."""

from __future__ import annotations

import torch

from benchmarks.tasks.sage import LAYERS, Sage, Sar


class Inputs(Sar):
    """One partition; the model is that of :class:`benchmarks.tasks.sage.Sar`.

    Args:
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
    ) -> None:
        self.saved, self.blocks = 0.0, None
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

    def make_model(self, num_features: int) -> torch.nn.Module:
        return OnBlocks(num_features, self.blocks)

    def saved_work(self) -> float:
        """Share of the whole graph's work that the blocks leave out."""
        return self.saved


class OnBlocks(Sage):
    """The same layers, each on its block where there are some."""

    def __init__(self, num_features: int, blocks: list | None) -> None:
        super().__init__(num_features)
        self.blocks = blocks

    def forward(self, graph, x):  # type: ignore[no-untyped-def]
        for layer, block in zip(self.layers, self.blocks or [graph] * LAYERS):
            x = layer(block, x)
        return x
