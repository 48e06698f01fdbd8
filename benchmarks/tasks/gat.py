"""The two-layer graph attention network of Velickovic et al. on a partition of a citation graph."""

from __future__ import annotations

from typing import Any

import dgl.nn
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.real import Citation

HEADS, HIDDEN, DROPOUT = 8, 8, 0.6


class Gat(nn.Module):
    """Unmodified ``dgl.nn.GATConv`` layers; dropout on their inputs and on the attention."""

    def __init__(self, num_features: int, num_classes: int, out_heads: int) -> None:
        super().__init__()
        drops = {"feat_drop": DROPOUT, "attn_drop": DROPOUT}
        self.first = dgl.nn.GATConv(num_features, HIDDEN, HEADS, activation=F.elu, **drops)
        self.second = dgl.nn.GATConv(HIDDEN * HEADS, num_classes, out_heads, **drops)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, self.first(graph, x).flatten(1)).mean(1)


class GatCitation(Citation):
    """A rank that trains on one data set after the other."""

    def fit_gat(
        self, seed: int, epochs: int, out_heads: int, rate: float, decay: float
    ) -> dict[str, Any]:
        """Loss of every epoch and test accuracy after the last, both of the whole graph."""
        self.sar.manual_seed(seed)
        model = self.sar.convert_dropout(Gat(self.features.shape[1], self.classes, out_heads))
        return self.train_model(model, seed, epochs, rate, decay)
