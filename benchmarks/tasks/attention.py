"""Training steps of layers that compute on edges."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from benchmarks.tasks import sage
from benchmarks.tasks.sage import HIDDEN
from benchmarks.tasks.stack import HEADS, Stack


class _Chosen:
    """Trains the model that was named."""

    kind: str
    features: Tensor
    graph: Any
    model: nn.Module
    row_numbers = HIDDEN + HEADS

    def make_model(self, num_features: int) -> nn.Module:
        return Stack(self.kind, num_features)


class Dgl(_Chosen, sage.Dgl):
    """The whole graph in one process, DGL alone."""

    def __init__(self, rank: int, size: int, port: int, kind: str, file: str) -> None:
        self.kind = kind
        super().__init__(rank, size, port, file)


class Sar(_Chosen, sage.Sar):
    """One partition, this library."""

    def __init__(self, rank: int, size: int, port: int, kind: str, **arguments: Any) -> None:
        self.kind = kind
        super().__init__(rank, size, port, **arguments)

    def make_structure(self) -> None:
        self.graph.create_formats_()  # as for DGL

    def plan(self) -> Any:
        """Every row as it is: no rank can compute partial sums for another's softmax."""
        return self.graph._relation(None).plan
