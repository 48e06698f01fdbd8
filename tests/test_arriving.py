"""Rows of the input of an attention layer travel before they are projected, and equal DGL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dgl
import dgl.nn
import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, check_all
from harness.rows import whole as whole_rows
from torch import Tensor, nn

import sar

WIDTH, HEADS, FEATURES = 5, 3, 6
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "gat": dgl.nn.GATConv,
    "gatv2": dgl.nn.GATv2Conv,
    "dot": dgl.nn.DotGatConv,
}
SENT = {"gat": FEATURES, "gatv2": FEATURES, "dot": HEADS * WIDTH}  # dot: made before its scope
# Bytes of rows where backward of additive scores is computed at the sources, there and back; and
# of what is told once for it.
BACK, TOLD = {HEADS * (WIDTH + 4) * 8, HEADS * 8}, {4, 8}


def make(kind: str, width: int = WIDTH, **options: Any) -> nn.Module:
    generator = torch.Generator().manual_seed(7)  # ranks are threads
    options = {} if kind == "dot" else options
    layer = LAYERS[kind](FEATURES, width, HEADS, allow_zero_in_degree=True, **options).double()
    for parameter in layer.parameters():  # a bias begins with zeros
        parameter.data.normal_(generator=generator)
    return layer


def trained(graph: Any, x: Tensor, ids: Tensor, layer: nn.Module) -> dict[str, Tensor]:
    """Result and gradients of parameters of a loss that differs from node to node."""
    out = layer(graph, x)
    weights = torch.cos(torch.arange(out.shape[1:].numel()) + ids.view(-1, 1).double()).view_as(out)
    (out * weights).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **grads}


def whole(layer: nn.Module) -> dict[str, Tensor]:
    x = next(iter(mixed().node_data.values()))["feat"].double()
    return trained(to_dgl(mixed()), x, torch.arange(len(x)), layer)


def on_ranks(
    path: str,
    size: int,
    make_layer: Callable[[int], nn.Module],
    run: Callable[..., list] = run_threads,
    **policy: Any,
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """What :func:`whole` returns, and the bytes of a row of each exchange on rank 0."""

    def case(group: Any) -> tuple[dict[str, Tensor], Tensor, list[int]]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(**policy))
        ids = next(rows for name, rows in data.node_features.items() if "orig" in name)
        x, layer = data.node_features["_N/feat"].double(), make_layer(group.rank)
        sent: list[int] = []
        exchange = group.exchange

        def noted(recv: Tensor, send: Tensor, *counts: Any) -> Any:
            sent.append(send[:1].nbytes if len(send) else send.new_empty(1, send.shape[1]).nbytes)
            return exchange(recv, send, *counts)

        group.exchange = noted
        return trained(graph, x, ids, layer), ids, sent

    ranks = run(size, case)
    order = torch.cat([ids for _, ids, _ in ranks]).argsort()
    joined = {"out": torch.cat([each["out"] for each, *_ in ranks])[order]}
    for name in ranks[0][0]:
        if name != "out":
            joined[name] = sum(each[name] for each, *_ in ranks)  # type: ignore[assignment]
    return joined, [sent for *_, sent in ranks]


@by_pairs(kind=LAYERS, size=[1, 2, 4], policy=[{}, {"rounds": 1}, {"rematerialize": False}])
def test_layers_equal_dgl_and_send_their_input(
    kind: str, size: int, policy: dict, partitioned: Cutter
) -> None:
    path = partitioned(mixed(), size, "random")
    got, sent = on_ranks(path, size, lambda rank: make(kind), **policy)
    check_all(got, whole(make(kind)))
    passes = 2 if policy.get("rematerialize", True) else 1
    passes += SENT[kind] > FEATURES  # gradients home
    rounds = min(policy.get("rounds", size - 1), size - 1)
    assert sent == [[SENT[kind] * 8] * (passes * rounds)] * size


OPTIONS: list[dict[str, Any]] = [
    {"residual": True, "activation": torch.tanh},
    {"bias": False},
    {"negative_slope": 1.0},
]


@pytest.mark.parametrize(
    ("options", "cut"),
    [(OPTIONS[0], "contiguous"), (OPTIONS[1], "adversarial"), (OPTIONS[2], "adversarial")],
    ids=["residual", "no bias", "no slope"],  # DGL takes no residual of a part without nodes
)
@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_options_of_layers(kind: str, options: dict, cut: str, partitioned: Cutter) -> None:
    """Parts of one node and of none among the cuts."""
    path = partitioned(mixed(), 3, cut)
    got, sent = on_ranks(path, 3, lambda rank: make(kind, **options), structure="one")
    check_all(got, whole(make(kind, **options)))
    assert {size for each in sent for size in each} == {FEATURES * 8}


def test_a_projection_with_a_bias(partitioned: Cutter) -> None:
    def biased(_: int = 0) -> nn.Module:
        layer, generator = make("gat"), torch.Generator().manual_seed(8)
        layer.fc = nn.Linear(FEATURES, HEADS * WIDTH).double()
        for parameter in layer.fc.parameters():
            parameter.data.normal_(generator=generator)
        return layer

    got, sent = on_ranks(partitioned(mixed(), 3, "random"), 3, biased)
    check_all(got, whole(biased()))
    assert {size for each in sent for size in each} == {FEATURES * 8}


def look(layer: nn.Module) -> nn.Module:
    layer.fc.register_forward_hook(lambda *seen: None)  # type: ignore[union-attr]
    return layer


@pytest.mark.parametrize("ranks", [[0], [1, 2], [0, 1, 2]], ids=str)
def test_ranks_that_look_into_a_layer(ranks: list[int], partitioned: Cutter) -> None:
    """Where one of them sees what a part of a layer gets, all send what DGL's code reads."""
    path = partitioned(mixed(), 3, "random")
    make_layer = lambda rank: look(make("gat")) if rank in ranks else make("gat")  # noqa: E731
    got, sent = on_ranks(path, 3, make_layer)
    check_all(got, whole(make("gat")))
    assert {size for each in sent for size in each} == {(WIDTH + 1) * HEADS * 8, *BACK, *TOLD}


@pytest.mark.parametrize("width", [1, 2])
def test_the_narrower_rows_travel(width: int, partitioned: Cutter) -> None:
    """FEATURES are as many as values and scores with width 1, and fewer than those with 2."""
    path = partitioned(mixed(), 2, "random")
    got, sent = on_ranks(path, 2, lambda rank: make("gat", width))
    check_all(got, whole(make("gat", width)))
    assert {size for each in sent for size in each} == {FEATURES * 8}
    _, sent = on_ranks(path, 2, lambda rank: make("gatv2", 1))
    assert {size for each in sent for size in each} == {HEADS * 8}


class Model(nn.Module):
    """A layer whose input asks for a gradient behind one whose input does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = make("gat")
        self.second = dgl.nn.GATConv(HEADS * WIDTH, 20, 1, allow_zero_in_degree=True).double()
        for parameter in self.second.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(8))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.second(graph, torch.tanh(self.first(graph, x).flatten(1)))


def test_inputs_that_ask_for_gradients_are_projected_first(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")
    got, sent = on_ranks(path, 2, lambda rank: Model())
    check_all(got, whole(Model()))
    told = [size / 8 for size in TOLD]
    assert {size / 8 for each in sent for size in each} == {FEATURES, 21, 20 + 4, 1, *told}


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_blocks_of_a_graph(kind: str, partitioned: Cutter) -> None:
    """A block has more sources than destinations, which are the first of them."""
    path, total = partitioned(mixed(), 3, "random"), mixed().total_nodes
    rows, wanted = whole_rows(total, (FEATURES,), seed=1), torch.arange(total) % 4 == 3
    factor = whole_rows(total, (HEADS, WIDTH), seed=2)

    def step(graph: Any, layer: nn.Module, read: Tensor, computed: Tensor) -> list[Tensor]:
        out = layer(graph, rows[read])
        (out * factor[computed]).sum().backward()
        return [p.grad for p in layer.parameters() if p.grad is not None]

    layer = make(kind)
    (layer(to_dgl(mixed()), rows)[wanted] * factor[wanted]).sum().backward()
    want = [p.grad for p in layer.parameters()]

    def case(group: Any) -> None:
        part = Part(group, path)
        seeds = wanted[part.nodes].nonzero().view(-1)
        (block,) = sar.construct_mfgs(part.data, part.graph.ndata["_ID"][seeds], 1)
        before, read = group.counters.sent_bytes, part.nodes[block.input_nodes]
        grads = step(block, make(kind), read, part.nodes[seeds])
        sent = group.counters.sent_bytes - before
        assert sent == 2 * FEATURES * 8 * sum(block._relation(None).plan.send_counts)
        for got, expected in zip(grads, want, strict=True):
            total_grad = group.all_reduce(got.clone())
            torch.testing.assert_close(total_grad, expected, rtol=1e-11, atol=1e-10)

    run_threads(3, case)
