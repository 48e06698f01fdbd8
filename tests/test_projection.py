"""Scores projected from the rows that attention sums: found, and their gradients passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from sar.frontends.dgl.projection import find_projection
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.kernels.attention import add_projected_grads
from sar.kernels.attention_loops import FEW
from sar.ops import attention as ops

HEADS, WIDTH = 3, 4


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, FEW, 3 * FEW + 5])
@pytest.mark.parametrize("count", [1, 2])
def test_projected_grads_equal_autograd(
    count: int, size: int, dtype: torch.dtype, threads: int
) -> None:
    generator = torch.Generator().manual_seed(size)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    width = 128 if threads > 1 else WIDTH  # few numbers are not worth a thread
    rows, drows = drawn(size, HEADS * width), drawn(size, HEADS * width)
    vectors = [drawn(HEADS * width) for _ in range(count)]
    grads = [drawn(size, HEADS) for _ in range(count)]
    leaves = [t.double().requires_grad_() for t in (rows, *vectors)]
    by_head = leaves[0].view(size, HEADS, width)
    scores = [(by_head * v.view(1, HEADS, width)).sum(-1) for v in leaves[1:]]
    want = torch.autograd.grad(scores, leaves, [g.double() for g in grads])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, added = add_projected_grads(total := drows.clone(), rows, grads, vectors), total
    finally:
        torch.set_num_threads(before)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, torch.stack(want[1:]), rtol=bound, atol=bound * max(1, size))
    torch.testing.assert_close(added.double(), drows + want[0], rtol=bound, atol=bound)


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[bool]]]:
    """For each backward pass, whether gradients of keys and of queries went to the rows."""
    seen: list[list[bool]] = []
    original = ops._pass_on

    def spy(*args: Any) -> list[Tensor | None]:
        vectors = original(*args)
        seen.append([vector is not None for vector in vectors])
        return vectors

    monkeypatch.setattr(ops, "_pass_on", spy)
    yield seen


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these tests count as DGL's."""
    monkeypatch.setattr("sar.frontends.dgl.projection.layer_of_dgl", lambda: nn.Identity())


class Layer(nn.Module):
    """Attention as GATConv writes it; ``look`` is shown the scores of the sources."""

    def __init__(self, look: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight, self.left, self.right = (
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator))
            for shape in ((5, HEADS * WIDTH), (1, HEADS, WIDTH), (HEADS, WIDTH))
        )
        self.look = look

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        rows = (x[:, :5] @ self.weight).view(-1, HEADS, WIDTH)
        left = (rows * self.left).sum(dim=-1).unsqueeze(-1)
        if self.look:
            self.look(left)
        with graph.local_scope():
            graph.srcdata.update({"ft": rows, "el": left})
            graph.dstdata["er"] = (self.right * rows).sum(2, keepdim=True)
            graph.apply_edges(fn.u_add_v("el", "er", "e"))
            graph.edata["a"] = edge_softmax(graph, F.leaky_relu(graph.edata.pop("e"), 0.2))
            graph.update_all(fn.u_mul_e("ft", "a", "m"), fn.sum("m", "out"))
            return graph.dstdata["out"]


def trained(graph: Any, x: Tensor, ids: Tensor, layer: Layer) -> list[Tensor]:
    """Gradients of a loss: of the rows of ``x``, then of the parameters."""
    x = x.clone().requires_grad_()
    weights = torch.cos(torch.arange(HEADS * WIDTH) + ids.view(-1, 1)).view(-1, HEADS, WIDTH)
    (layer(graph, x) * weights).sum().backward()
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]  # type: ignore


def in_one(layer: Layer) -> list[Tensor]:
    graph = mixed()
    (src, dst), (size,) = next(iter(graph.edges.values())), graph.num_nodes.values()
    x = next(iter(graph.node_data.values()))["feat"].double()
    return trained(dgl.graph((src, dst), num_nodes=size), x, torch.arange(size), layer)


def on_ranks(path: str, size: int, make: Callable[[], Layer]) -> list[Tensor]:
    def case(group: Any) -> tuple[list[Tensor], Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        ids = next(rows for name, rows in data.node_features.items() if "orig" in name)
        x = data.node_features["_N/feat"].double()
        return trained(sar.construct_full_graph(data), x, ids, make()), ids

    ranks = run_threads(size, case)
    order = torch.cat([ids for _, ids in ranks]).argsort()
    rows = torch.cat([grads[0] for grads, _ in ranks])[order]
    return [rows, *(sum(each) for each in zip(*(grads[1:] for grads, _ in ranks), strict=True))]


@pytest.mark.parametrize("size", [1, 3])
def test_gradients_of_projected_scores_go_to_the_rows(
    size: int, partitioned: Cutter, passed_on: list, anywhere: None
) -> None:
    got = on_ranks(partitioned(mixed(), size, "random"), size, Layer)
    assert passed_on == [[True, True]] * size
    torch.testing.assert_close(got, in_one(Layer()), rtol=1e-11, atol=1e-11)


def test_layers_of_dgl_are_recognized(partitioned: Cutter, passed_on: list) -> None:
    layer = dgl.nn.GATConv(6, 4, 2, attn_drop=0.5, allow_zero_in_degree=True)
    data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
    x = data.node_features["_N/feat"].float()
    layer(sar.construct_full_graph(data), x).sum().backward()
    assert passed_on == [[True, True]]


def test_gradients_of_scores_that_somebody_holds_are_theirs(
    partitioned: Cutter, passed_on: list, anywhere: None
) -> None:
    kept: list[Tensor] = []
    expected: list[Tensor] = []

    def held(scores: Tensor, by: list[Tensor]) -> None:
        scores.retain_grad()
        by.append(scores)

    layer = Layer(lambda scores: held(scores, kept))
    got = on_ranks(partitioned(mixed(), 1, "random"), 1, lambda: layer)
    want = in_one(Layer(lambda scores: held(scores, expected)))
    assert passed_on == [[False, True]]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for scores in (*kept, *expected):
        assert scores.grad is not None


def test_layers_of_ones_own_keep_their_hooks(partitioned: Cutter, passed_on: list) -> None:
    """Nobody knows who looks at what lies between rows and scores there."""

    def hooked(scores: Tensor) -> None:
        scores._base.register_hook(lambda grad: 2 * grad)  # type: ignore[union-attr]

    got = on_ranks(partitioned(mixed(), 1, "random"), 1, lambda: Layer(hooked))
    assert passed_on == [[False, False]]
    torch.testing.assert_close(got, in_one(Layer(hooked)), rtol=1e-11, atol=1e-11)


def test_parameters_that_get_other_memory_before_backward(partitioned: Cutter) -> None:
    """As averages of weights do it; DGL's backward sees what they are by then."""

    def run(graph: Any, x: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        layer = dgl.nn.GATConv(6, 4, 2, allow_zero_in_degree=True).double()
        out = layer(graph, x)
        layer.attn_l.data = layer.attn_l.data * 2
        out.square().sum().backward()
        return [parameter.grad for parameter in layer.parameters()]  # type: ignore[misc]

    data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
    got = run(sar.construct_full_graph(data), data.node_features["_N/feat"].double())
    (src, dst), (size,) = next(iter(mixed().edges.values())), mixed().num_nodes.values()
    x = next(iter(mixed().node_data.values()))["feat"].double()
    want = run(dgl.graph((src, dst), num_nodes=size), x)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "other rows": lambda rows: (rows.clone() * leaf(HEADS, WIDTH)).sum(-1, keepdim=True),
    "a computed vector": lambda rows: (rows * leaf(HEADS, WIDTH).exp()).sum(-1, keepdim=True),
    "a weight for each row": lambda rows: (rows * leaf(WIDTH, HEADS, 1)).sum(-1, keepdim=True),
    "one for all columns": lambda rows: (rows * leaf(HEADS, 1)).sum(-1, keepdim=True),
    "another axis": lambda rows: (rows * leaf(HEADS, WIDTH)).sum(1).unsqueeze(-1),
    "two axes": lambda rows: (rows * leaf(HEADS, WIDTH)).sum((-1, 0)),
    "more than a product": lambda rows: (rows * leaf(HEADS, WIDTH) + 1).sum(-1, keepdim=True),
    "scaled": lambda rows: 2 * (rows * leaf(HEADS, WIDTH)).sum(-1, keepdim=True),
    "no sum": lambda rows: rows * leaf(HEADS, WIDTH),
    "its square": lambda rows: (rows * rows).sum(-1, keepdim=True),
    "a constant": lambda rows: (rows * torch.ones(HEADS, WIDTH)).sum(-1, keepdim=True),
    "no gradient": lambda rows: torch.ones(WIDTH, HEADS, 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_scores_are_not_taken_for_projections(name: str, anywhere: None) -> None:
    rows = leaf(WIDTH, HEADS, WIDTH).sin()  # as many rows as columns: shapes alone do not tell
    assert find_projection(OTHERS[name](rows), rows) is None
    made = (rows * (vector := leaf(HEADS, WIDTH))).sum(-1, keepdim=True)
    found = find_projection(made, rows)
    assert found is not None and found.vector is vector


def test_constant_rows_are_not_taken_for_each_other(anywhere: None) -> None:
    rows, others = torch.ones(5, HEADS, WIDTH), torch.zeros(5, HEADS, WIDTH)
    scores = (others * leaf(HEADS, WIDTH)).sum(-1, keepdim=True)
    assert find_projection(scores, rows) is None
