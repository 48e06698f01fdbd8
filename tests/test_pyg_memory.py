"""PyG's layers hold no row of an edge, send what they have to, and are recorded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.graphs import mixed
from harness.parts import Cutter
from harness.threads import run_threads
from harness.watch import Largest
from torch import Tensor

import sar
from sar.comm.meter import LayerNotes
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.tracing import recording

nn = pytest.importorskip("torch_geometric.nn")
pytestmark = pytest.mark.timeout(60)
NODES, EDGES, WIDTH = 200, 24_000, 6
DEGREES = torch.zeros(300, dtype=torch.long).index_fill_(0, torch.tensor([200]), NODES)


class Own(nn.MessagePassing):
    """A layer of one's own: a function of both ends and of the edge."""

    def __init__(self) -> None:
        super().__init__(aggr="mean")
        self.linear = torch.nn.Linear(2 * WIDTH, 5)

    def forward(self, x: Tensor, edge_index: Any, weight: Any) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x_i, x_j - x_i], -1))) * weight.view(-1, 1)


def plain(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index)


def weighted(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index, data.weight)


def typed(layer: Any, data: Any) -> Tensor:
    return layer(data.x, data.edge_index, data.type)


# By name: the layer, its call, and how many numbers of each edge there may be, as its column has.
LAYERS: dict[str, tuple[Callable[[], Any], Callable, int]] = {
    "GCN": (lambda: nn.GCNConv(WIDTH, 5), plain, 0),
    "GCN of weights": (lambda: nn.GCNConv(WIDTH, 5), weighted, 1),
    "GAT": (lambda: nn.GATConv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "GATv2": (lambda: nn.GATv2Conv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "Transformer": (lambda: nn.TransformerConv(WIDTH, 4, heads=2, dropout=0.5), plain, 0),
    "SAGE": (lambda: nn.SAGEConv(WIDTH, 5), plain, 0),
    "SAGE of extremes": (lambda: nn.SAGEConv(WIDTH, 5, aggr="max"), plain, 0),
    "PNA": (
        lambda: nn.PNAConv(WIDTH, 4, ["mean", "max", "min", "std"], ["amplification"], DEGREES),
        plain,
        0,
    ),
    "RGCN": (lambda: nn.RGCNConv(WIDTH, 5, 3), typed, 1),
    "FastRGCN": (lambda: nn.FastRGCNConv(WIDTH, 5, 3), typed, 1),
    "one's own": (Own, weighted, 1),
}  # fmt: skip


def dense() -> GraphArrays:
    """Few nodes, so that a tensor of all edges would stand out."""
    drawn = torch.Generator().manual_seed(0)
    src, dst = torch.randint(NODES, (2, EDGES), generator=drawn)
    columns = {
        "weight": torch.rand(EDGES, generator=drawn),
        "type": torch.randint(3, (EDGES,), generator=drawn),
    }
    x = {"feat": torch.randn(NODES, WIDTH, generator=drawn)}
    return GraphArrays(
        "dense", {NTYPE_HOMO: NODES}, {ETYPE_HOMO: (src, dst)}, {NTYPE_HOMO: x},
        {ETYPE_HOMO: columns},
    ).with_orig_ids()  # fmt: skip


def passes(make: Callable, call: Callable, data: Any, count: int) -> list[int]:
    """The most numbers that any operation gave out in each of some passes of a layer."""
    torch.manual_seed(0)
    layer, found = make(), []
    data.x = data.x.clone().requires_grad_()
    for _ in range(count):
        with Largest() as watch:
            call(layer, data).square().sum().backward()
        found.append(watch.elements)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_no_tensor_has_a_row_for_every_edge(name: str, partitioned: Cutter) -> None:
    make, call, each = LAYERS[name]
    path = partitioned(dense(), 2, "random")

    def run(group: Any) -> tuple[int, int]:
        policy = sar.Policy(block_bytes=1 << 15)
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path), policy)
        return passes(make, call, data, 2)[-1], data.edge_index.size(1)

    for found, edges in run_threads(2, run):
        assert found < (each or 0.9) * (edges + NODES) + 1, (found, edges)


def hetero() -> GraphArrays:
    """Two types of few nodes, with many edges in three relations."""
    drawn = torch.Generator().manual_seed(1)
    counts = {"item": 120, "user": 150}
    relations = [("item", "to", "user"), ("user", "back", "item"), ("user", "knows", "user")]
    edges = {
        (src, name, dst): tuple(
            torch.randint(counts[ntype], (EDGES // 3,), generator=drawn) for ntype in (src, dst)
        )
        for src, name, dst in relations
    }
    rows = {n: {"feat": torch.randn(c, WIDTH, generator=drawn)} for n, c in counts.items()}
    return GraphArrays("dense_types", counts, edges, rows).with_orig_ids()


def test_layers_of_several_types_hold_no_rows_of_edges(partitioned: Cutter) -> None:
    path = partitioned(hetero(), 2, "random")

    def run(group: Any) -> tuple[int, int]:
        policy = sar.Policy(block_bytes=1 << 15)
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path), policy)
        layer = nn.HGTConv(WIDTH, 8, data.metadata(), heads=2)
        for _ in range(2):
            with Largest() as watch:
                out = layer(data.x_dict, data.edge_index_dict)
                sum(rows.square().sum() for rows in out.values()).backward()
        return watch.elements, sum(e.size(1) for e in data.edge_index_dict.values())

    for found, edges in run_threads(2, run):
        assert found <= 2 * edges, (found, edges)  # a number for each head


def rows_sent(make: Callable, call: Callable, path: str, policy: sar.Policy) -> list[int]:
    """Bytes that ranks send in forward and in backward."""

    def run(group: Any) -> list[int]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path), policy)
        torch.manual_seed(0)
        layer, counts = make(), []
        data.x = data.x.clone().requires_grad_()
        for _ in range(2):
            counts = [group.counters.sent_bytes]
            out = call(layer, data)
            counts.append(group.counters.sent_bytes)
            out.square().sum().backward()
            counts.append(group.counters.sent_bytes)
        return [after - before for before, after in zip(counts, counts[1:], strict=False)]

    return [sum(each) for each in zip(*run_threads(3, run), strict=True)]


def cached(layer: Any, data: Any) -> Tensor:
    """Weights of edges are made in an evaluation, once."""
    if layer._cached_edge_index is None:
        with torch.no_grad():
            plain(layer, data)
    return plain(layer, data)


SCALED = {
    "APPNP, cached without gradients": (lambda: nn.APPNP(1, 0.1, cached=True), cached, 1),
    "LGConv": (nn.LGConv, plain, 1),
    "TAGConv": (lambda: nn.TAGConv(WIDTH, 5, K=2), plain, 2),
    "APPNP": (lambda: nn.APPNP(2, 0.1), plain, 2),
    "GCN2Conv": (lambda: nn.GCN2Conv(WIDTH, 0.1), lambda l, d: l(d.x, d.x, d.edge_index), 1),
    "ARMAConv": (lambda: nn.ARMAConv(WIDTH, WIDTH), plain, 1),
    "GraphConv": (lambda: nn.GraphConv(WIDTH, 5), weighted, 1),
    "SAGEConv of powers": (lambda: nn.SAGEConv(WIDTH, 5, aggr="var"), plain, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_rows_times_numbers_are_sent_as_rows_are(name: str, partitioned: Cutter) -> None:
    """Once forward and once home for each sum, and no number with them."""
    make, call, sums = SCALED[name]
    path, policy = partitioned(mixed(), 3, "random"), sar.Policy(exchange="pull")
    once = rows_sent(lambda: nn.SimpleConv("sum"), plain, path, policy)
    assert once[0] == once[1] > 0
    assert rows_sent(make, call, path, policy) == [sums * size for size in once]


ATTENTION = [
    lambda: nn.GATConv(WIDTH, 4, heads=2, dropout=0.5),
    lambda: nn.GATv2Conv(WIDTH, 4, heads=2, dropout=0.5),
    lambda: nn.TransformerConv(WIDTH, 4, heads=2, dropout=0.5),
    nn.AGNNConv,
]


@pytest.mark.parametrize("make", ATTENTION)
def test_attention_in_torchs_words_has_the_kernel(make: Callable, partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def run(group: Any) -> list[str]:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        layer = make()
        layer.register_message_forward_hook(lambda *_: None)  # PyG's own code, not a fused function
        group.meter.notes = LayerNotes()
        plain(layer, data)
        return [what for _, what, _ in group.meter.notes.ways]

    for ways in run_threads(2, run):
        assert "attention kernel" in ways and "edge program" not in ways


@pytest.mark.parametrize("name", ["GATv2", "Transformer", "PNA", "FastRGCN", "one's own"])
def test_a_layer_is_recorded_once(
    name: str, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls on other tensors find nothing out anew."""
    make, call, _ = LAYERS[name]
    found = []

    def run(group: Any) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(partitioned(mixed(), 1)))
        layer = make()
        layer.register_message_forward_hook(lambda *_: None)  # PyG's own code, not a fused function
        call(layer, data).sum().backward()
        call(layer, data).sum().backward()
        first = len(found)
        call(layer, data).sum().backward()
        assert first > 0 and len(found) == first

    original = recording._infer
    monkeypatch.setattr(recording, "_infer", lambda *a: (found.append(a), original(*a))[1])
    run_threads(1, run)
