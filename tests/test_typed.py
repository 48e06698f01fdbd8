"""Products with a matrix per type inside message functions."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor

import sar
from sar.frontends.dgl import typed
from sar.ops.typed import typed_product

LENGTHS = [2, 0, 3, 0]


def test_gradients_of_types_with_and_without_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((5, 3), (4, 3, 2))
    )
    assert torch.autograd.gradcheck(lambda a, b: typed_product(a, b, LENGTHS), (a, b))
    assert torch.equal(
        typed_product(a, b, LENGTHS), dgl.ops.segment_mm(a, b, torch.tensor(LENGTHS))
    )


def rows_and_matrices(data: Any) -> tuple[Tensor, Tensor, Tensor]:
    key = next(name for name in data.edge_features if name.endswith("/type"))
    x = data.node_features["_N/feat"].double().requires_grad_()
    w = torch.linspace(-1, 1, 3 * 6 * 2, dtype=torch.float64).view(3, 6, 2).requires_grad_()
    return x, w, data.edge_features[key]


@pytest.mark.parametrize("size", [1, 3])
def test_a_captured_matrix_gets_its_gradient(
    size: int, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that is the product's argument as it is, and one that is computed before."""
    path, calls = partitioned(mixed(), size, "random"), []

    def counted(*args: Any) -> Tensor:
        calls.append(len(args))
        return typed_product(*args)

    monkeypatch.setattr(typed, "typed_product", counted)

    def case(group: Any) -> list[Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(block_bytes=4096))
        x, w, kinds = rows_and_matrices(data)
        graph.srcdata["x"], graph.edata["t"] = x, kinds
        found = []
        for matrices in (w, w.sin()):

            def message(edges: Any, matrices: Tensor = matrices) -> dict[str, Tensor]:
                kinds, order = edges.data["t"].sort()
                counts = torch.bincount(kinds, minlength=len(matrices))
                rows = dgl.ops.segment_mm(edges.src["x"][order], matrices, counts)
                return {"m": torch.empty_like(rows).index_copy(0, order, rows)}

            graph.update_all(message, dgl.function.sum("m", "out"))
            found += [*torch.autograd.grad(graph.dstdata["out"].sin().sum(), [x, w])]
        return [*found, orig_ids(data)]

    def orig_ids(data: Any) -> Tensor:
        return next(rows for name, rows in data.node_features.items() if "orig" in name)

    ranks = run_threads(size, case)
    assert calls
    for dx, dw, matrices in ((0, 1, lambda w: w), (2, 3, torch.sin)):
        x, w, src, dst, kinds = whole()
        rows = torch.einsum("ed,edf->ef", x[src], matrices(w)[kinds])
        out = rows.new_zeros(len(x), 2).index_add(0, dst, rows)
        want = torch.autograd.grad(out.sin().sum(), [x, w])
        got = torch.cat([rank[dx] for rank in ranks])
        torch.testing.assert_close(got, want[0][torch.cat([rank[4] for rank in ranks])])
        torch.testing.assert_close(sum(rank[dw] for rank in ranks), want[1])


def whole() -> tuple[Tensor, ...]:
    graph = mixed()
    (src, dst), data = next(iter(graph.edges.values())), next(iter(graph.edge_data.values()))
    x = next(iter(graph.node_data.values()))["feat"].double().requires_grad_()
    w = torch.linspace(-1, 1, 3 * 6 * 2, dtype=torch.float64).view(3, 6, 2).requires_grad_()
    return x, w, src, dst, data["type"]
