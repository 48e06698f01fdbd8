"""A model of one's own on a bibliography: learned rows, means and maxima of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sar


class Library(nn.Module):
    """Papers from their authors and the largest of what they cite."""

    def __init__(self, graph: Any, in_feats: dict[str, int], out_feats: int, hidden: int = 128):
        super().__init__()
        self.paper = nn.Linear(in_feats["paper"], hidden)
        self.papers = sar.nn.ShardedEmbedding(graph, "paper", hidden)
        self.authors = sar.nn.ShardedEmbedding(graph, "author", hidden)
        self.out = nn.Linear(2 * hidden, out_feats)

    def forward(self, graph: Any, x: dict[str, Tensor]) -> Tensor:
        rows = self.paper(x["paper"]) + self.papers(graph)
        authors = graph.aggregate(self.authors(graph), "mean", etype="writes")
        cited = graph.aggregate(rows, "max", etype="cites")
        return self.out(torch.cat([authors, cited], 1))
