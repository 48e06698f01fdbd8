"""What users of PyG's layers see of the choice of code: tables, traces, activations, errors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_threads
from harness.graphs import mixed, shop
from harness.parts import Cutter
from torch import Tensor, nn
from torch_geometric import __version__
from torch_geometric import nn as pyg
from torch_geometric.utils import add_self_loops, softmax

import sar
import sar.pyg
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO

WIDTH = 6
RNG = torch.Generator().manual_seed(1)
X = torch.randn(57, WIDTH, generator=RNG, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = pyg.GATConv(WIDTH, 4, 2), pyg.SAGEConv(8, 3)
        self.conv3 = pyg.SAGEConv(3, 2, aggr="max")

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.conv2(2 * self.conv1(x, edge_index), edge_index)
        return self.conv3(x, edge_index)


def on_ranks(cut: Cutter, parts: int, case: Callable[[Any, Any], Any]) -> list[Any]:
    """What ``case(data, group)`` gives on each rank, for PyG's data with rows ``x`` of the test."""
    path = cut(mixed(), parts)

    def run(group: Any) -> Any:
        torch.manual_seed(0)
        loaded = sar.load_partition_data(path)
        data = sar.pyg.construct_full_graph(loaded)
        data.x = X[loaded.node_features[f"{NTYPE_HOMO}/orig_id"].long()]
        return case(data, group)

    return run_threads(parts, run)


WAYS = {
    "in the model's order": lambda model, data: sar.explain(model, data.x, data.edge_index),
    "the graph first": lambda model, data: sar.explain(model, data.edge_index, data.x),
    "random rows": lambda model, data: sar.explain(model, data.edge_index),
    "data": sar.explain,
    "by name": lambda model, data: sar.explain(model, data.x, edge_index=data.edge_index),
}


@pytest.mark.parametrize("way", WAYS)
def test_explain_tells_what_computes_layers(way: str, partitioned: Cutter) -> None:
    table, _ = on_ranks(partitioned, 2, lambda data, _: WAYS[way](Net().double(), data))
    rows = {row.name: row for row in table.rows}
    ways = {name: row.implementation for name, row in rows.items()}
    assert [ways[f"conv{i}"] for i in (1, 2, 3)] == ["fused", "fused", "extreme"]
    assert "'max' has no fused form" in rows["conv3"].why_not_fused
    assert all(rows[f"conv{i}"].sent_bytes > 0 for i in (1, 2, 3))
    assert all(row.saved_bytes is not None for row in rows.values())


class TakesData(Net):
    def forward(self, data: Any) -> Tensor:
        return super().forward(data.x, data.edge_index)


def test_models_of_data_are_prepared_and_explained(partitioned: Cutter) -> None:
    def case(data: Any, _: Any) -> Any:
        return sar.explain(sar.prepare(TakesData().double(), data), data)

    rows = {row.name: row.implementation for row in on_ranks(partitioned, 2, case)[0].rows}
    assert [rows[f"conv{i}"] for i in (1, 2, 3)] == ["fused", "fused", "extreme"]


_ONE_TRACES = threading.Lock()


@pytest.mark.skipif(__version__.startswith("2.6."), reason="its to_hetero fails on this torch")
def test_several_types_are_explained(partitioned: Cutter) -> None:
    """The relation between nodes of one type is fused in a model that ``to_hetero`` made."""

    def run(group: Any) -> Any:
        torch.manual_seed(0)
        data = sar.pyg.construct_full_graph(sar.load_partition_data(partitioned(shop(), 2)))
        for ntype in data.node_types:
            data[ntype].x = torch.randn(data[ntype].num_nodes, WIDTH)
        with _ONE_TRACES:  # torch's tracer changes modules for all threads
            model = pyg.to_hetero(pyg.GraphSAGE(WIDTH, 8, 2, 3), data.metadata())
        return sar.explain(sar.prepare(model, data), data)

    table, _ = run_threads(2, run)
    rows = {row.name: row.implementation for row in table.rows}
    assert rows["convs.0.user__follows__user"] == "fused"
    assert rows["convs.0.user__buys__item"] == "sum"


def gradients(model: nn.Module, data: Any) -> list[Tensor]:
    x = data.x.clone().requires_grad_()
    model(x, data.edge_index).square().sum().backward()
    return [x.grad, *(param.grad for param in model.parameters())]  # type: ignore[misc]


@pytest.mark.parametrize("activations", ["recompute", "offload", "donate"])
def test_activations_change_no_gradient(activations: str, partitioned: Cutter) -> None:
    def case(data: Any, _: Any) -> None:
        model = Net().double()
        expected = gradients(copy.deepcopy(model), data)
        if activations == "donate":
            sar.optimize(model, donate=True)
        else:
            sar.set_activations(model, activations)
        torch.testing.assert_close(gradients(model, data), expected)

    on_ranks(partitioned, 2, case)


def test_traces_have_the_layers_of_a_model(partitioned: Cutter) -> None:
    def case(data: Any, _: Any) -> list[dict[str, Any]]:
        model = Net().double()
        with sar.trace(model=model) as traced:
            gradients(model, data)
        return traced.summary()

    sent = {(row["layer"], row["pass"]): row["sent"] for row in on_ranks(partitioned, 2, case)[0]}
    for name in ("conv1", "conv2", "conv3"):
        assert sent[name, "forward"] > 0 and sent[name, "backward"] > 0


def test_a_wrong_number_of_edge_weights_is_said_on_every_rank(partitioned: Cutter) -> None:
    def case(data: Any, group: Any) -> None:
        rows = data.edge_index.graph.num_edges() - group.rank
        with pytest.raises(ValueError, match="edge_weight"):
            pyg.GCNConv(WIDTH, 2).double()(data.x, data.edge_index, torch.ones(rows).double())

    on_ranks(partitioned, 2, case)


class Sorts(pyg.MessagePassing):
    """Asks what an edge index cannot tell; defined before a graph was made, as the next after."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return x[edge_index[0].sort().indices]


def test_errors_name_the_layers_of_users(partitioned: Cutter) -> None:
    def case(data: Any, _: Any) -> None:
        class Later(Sorts):
            def forward(self, x: Tensor, edge_index: Any) -> Tensor:
                return self.propagate(edge_index, x=x)

            def message(self, x_j: Tensor, edge_index: Any) -> Tensor:
                return x_j * edge_index[0].double()

        for kind in (Sorts, Later):
            with pytest.raises(sar.NotSupportedError, match=f"^{kind.__name__}: "):
                kind()(data.x, data.edge_index)

    on_ranks(partitioned, 1, case)


def test_strict_names_the_layer(partitioned: Cutter) -> None:
    def case(data: Any, _: Any) -> None:
        model = sar.optimize(Net().double(), strict=True)
        with pytest.raises(sar.NotSupportedError, match="SAGEConv: not fused, as strict=True"):
            model(data.x, data.edge_index)

    on_ranks(partitioned, 2, case)


def test_originals_come_back(partitioned: Cutter) -> None:
    from sar.frontends.pyg import patches

    patches.uninstall()
    kinds = [pyg.GATConv, pyg.SAGEConv, pyg.PNAConv, Sorts]
    originals = [kind.forward for kind in kinds]
    try:
        on_ranks(partitioned, 1, lambda data, _: None)
        assert not any(kind.forward is one for kind, one in zip(kinds, originals, strict=True))
        patches.uninstall()
        assert [kind.forward for kind in kinds] == originals
        assert "__init_subclass__" not in vars(pyg.MessagePassing)
    finally:
        patches.install()


class Weighted(pyg.MessagePassing):
    """A layer of the user's that TorchScript compiles; PyG's utilities are called in it."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index)
        weight = softmax(x[edge_index[0], 0], edge_index[1])
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


SCRIPTED = {
    "GCNConv": lambda: pyg.GCNConv(WIDTH, 4), "GraphConv": lambda: pyg.GraphConv(WIDTH, 4),
    "SAGEConv": lambda: pyg.SAGEConv(WIDTH, 4, aggr="max"), "of a user": Weighted,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", SCRIPTED)
def test_torchscript_compiles_layers_once_a_graph_was_made(name: str, partitioned: Cutter) -> None:
    """On edges of one process, as it compiles what PyG wrote."""
    edges = torch.stack(mixed().edges[ETYPE_HOMO])
    layer, x = SCRIPTED[name](), torch.randn(57, WIDTH)
    want = layer(x, edges)
    on_ranks(partitioned, 1, lambda data, _: None)
    torch.testing.assert_close(torch.jit.script(layer)(x, edges), want)


def test_constant_rows_travel_twice_and_their_readers_may_change(partitioned: Cutter) -> None:
    """Sums of a model's input are kept; then a rank runs PyG's own code, with the same results."""
    kinds = [pyg.SAGEConv, pyg.GCNConv, pyg.GATConv, pyg.GATv2Conv]
    layers = [kind(WIDTH, 8) for kind in kinds]

    def case(data: Any, group: Any) -> None:
        for layer in copy.deepcopy(layers):
            layer, outputs, sent = layer.double(), [], []
            for epoch in range(5):
                if epoch == 4 and group.rank == 0:
                    layer.register_message_forward_hook(lambda *_: None)
                before = group.counters.sent_bytes
                outputs.append(layer(data.x, data.edge_index))
                outputs[-1].sum().backward()
                sent.append(group.counters.sent_bytes - before)
            assert sent[0] > 0
            if isinstance(layer, (pyg.SAGEConv, pyg.GCNConv)):
                assert sent[2] == sent[3] == 0
            for out in outputs[1:]:
                torch.testing.assert_close(out, outputs[0])

    on_ranks(partitioned, 2, case)


def test_narrower_rows_travel(partitioned: Cutter) -> None:
    """As all ranks compute layers as a whole, which one rank's hook ends."""
    layers = {"sage": (pyg.SAGEConv(WIDTH, 2), 2), "gcn": (pyg.GCNConv(WIDTH, 9), WIDTH)}

    def case(data: Any, group: Any) -> None:
        for layer, width in copy.deepcopy(layers).values():
            own = WIDTH if width == 2 else 9  # as PyG orders products and sums
            sent = []
            for epoch in range(4):
                if epoch == 2 and group.rank == 0:
                    layer.register_message_forward_hook(lambda *_: None)
                x, before = data.x.clone().requires_grad_(), group.counters.sent_bytes
                layer.double()(x, data.edge_index).sum().backward()
                sent.append(group.counters.sent_bytes - before)
            assert sent[1] * own == sent[3] * width > 0

    on_ranks(partitioned, 2, case)


@pytest.mark.parametrize(
    "kind", ["SAGEConv", "GCNConv", "GATConv", "GATv2Conv", "SGConv", "TAGConv"]
)
def test_evaluation_before_training_leaves_nothing_behind(kind: str, partitioned: Cutter) -> None:
    """What is made of a graph at first is fit for later backward passes."""

    def case(data: Any, _: Any) -> None:
        layer = getattr(pyg, kind)(WIDTH, 4).double()
        with torch.inference_mode():
            expected = layer(data.x, data.edge_index).clone()
        found = layer(data.x.clone().requires_grad_(), data.edge_index)
        found.sum().backward()
        torch.testing.assert_close(found.detach(), expected)

    on_ranks(partitioned, 2, case)
