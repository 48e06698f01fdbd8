"""The GAT that IntelLabs SAR runs, with its own replacement of DGL's softmax over edges."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.tasks import sage
from benchmarks.tasks.stack import Stack


class OriginalGat(sage.Original):
    """One partition, the checkout of IntelLabs SAR that comes first on the import path."""

    def __init__(self, rank: int, size: int, port: int, **arguments: Any) -> None:
        import sar

        sar.patch_dgl()
        super().__init__(rank, size, port, **arguments)

    def make_model(self, num_features: int) -> nn.Module:
        return Stack("gat", num_features)
