"""Products with a matrix per type inside message functions, and types that are wrong."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from harness.graphs import mixed
from harness.parts import Cutter
from harness.rows import Part
from harness.threads import run_threads
from test_edge_inputs import assert_exact
from torch import Tensor, nn


class Typed(nn.Module):
    """A matrix that is the product's argument as it is, or one that is computed before."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        matrices = torch.linspace(-1, 1, 4 * 6 * 2, dtype=torch.float64).view(4, 6, 2)
        self.matrices, self.computed = nn.Parameter(matrices), computed

    def forward(self, graph: Any, x: Tensor, weight: Tensor, types: Tensor) -> Tensor:
        matrices = self.matrices.sin() if self.computed else self.matrices

        def message(edges: Any) -> dict[str, Tensor]:
            kinds, order = edges.data["t"].sort()
            counts = torch.bincount(kinds, minlength=len(matrices))
            rows = dgl.ops.segment_mm(edges.src["x"][order], matrices, counts)
            return {"m": torch.empty_like(rows).index_copy(0, order, rows)}

        graph.srcdata["x"], graph.edata["t"] = x, types
        graph.update_all(message, dgl.function.sum("m", "out"))
        return graph.dstdata["out"]


@pytest.mark.parametrize("computed", [False, True])
def test_a_captured_matrix_gets_its_gradient(computed: bool, partitioned: Cutter) -> None:
    """Of types with edges, and of one without."""

    def make() -> tuple[Any, nn.Module]:
        layer = Typed(computed)
        return layer, layer

    assert_exact(mixed(), make, partitioned, block_bytes=4096)


def test_a_type_too_many_is_told_by_all_ranks(partitioned: Cutter) -> None:
    def case(group: Any, path: str) -> str:
        part = Part(group, path)
        types = torch.zeros(part.graph.num_edges(), dtype=torch.long)
        types[:1] = 3 * (group.rank == 1)
        layer = dgl.nn.GatedGraphConv(4, 4, 1, 3)
        with pytest.raises(ValueError) as caught:
            layer(part.graph, torch.zeros(len(part.nodes), 4), types)
        return str(caught.value)

    told = run_threads(3, case, partitioned(mixed(), 3, "random"))
    assert all("rank 1: GatedGraphConv: etypes: got 0 to 3, expected 0 to 2" in one for one in told)
