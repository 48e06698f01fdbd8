"""PyG's layers on the fused functions: all are exact, and those that are not fused say why."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import pyg as compared
from harness import run_threads
from harness.graphs import mixed
from harness.parts import Cutter
from torch import Tensor, nn

import sar
import sar.pyg
from sar.graph import GraphArgument
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO

pyg = pytest.importorskip("torch_geometric.nn")
WIDTH, EXACT = 6, 1e-9
NUM_EDGES = len(mixed().edges[ETYPE_HOMO][0])
RNG = torch.Generator().manual_seed(1)
X = torch.randn(57, WIDTH, generator=RNG, dtype=torch.float64)
COLUMNS = {
    "weight": torch.rand(NUM_EDGES, generator=RNG, dtype=torch.float64) + 0.5,
    "attr": torch.randn(NUM_EDGES, 3, generator=RNG, dtype=torch.float64),
}


def plain(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer(x, edges)


def on(column: str, layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer(x, edges, columns[column])


def pairs(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer((x, 2 * x), edges)


def weighing(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer(x, edges, return_attention_weights=True)[0]


def turned(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer(x, edges.flip(0))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh())


FUSED: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: pyg.SAGEConv(WIDTH, WIDTH),
    "sage, narrower": lambda: pyg.SAGEConv(WIDTH, 3),
    "sage, wider": lambda: pyg.SAGEConv(WIDTH, 9, bias=False),
    "sage, sums": lambda: pyg.SAGEConv(WIDTH, 4, aggr="sum", normalize=True),
    "sage, no edge": lambda: pyg.SAGEConv((WIDTH, WIDTH), 4, aggr=pyg.MeanAggregation()),
    "graph": lambda: pyg.GraphConv(WIDTH, 4),
    "graph, means": lambda: pyg.GraphConv(WIDTH, 8, aggr="mean"),
    "gcn": lambda: pyg.GCNConv(WIDTH, WIDTH),
    "gcn, narrower": lambda: pyg.GCNConv(WIDTH, 3),
    "gcn, wider": lambda: pyg.GCNConv(WIDTH, 9, bias=False),
    "gcn, edges as they are": lambda: pyg.GCNConv(WIDTH, 4, add_self_loops=False),
    "gin": lambda: pyg.GINConv(mlp(5), eps=0.5, train_eps=True),
    "gin, means": lambda: pyg.GINConv(mlp(5), aggr="mean"),
    "gat": lambda: pyg.GATConv(WIDTH, 5, heads=2),
    "gat, mean of heads": lambda: pyg.GATConv(WIDTH, 5, heads=3, concat=False, residual=True),
    "gat, edges as they are": lambda: pyg.GATConv(WIDTH, 2, add_self_loops=False, bias=False),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 5, heads=2, residual=True),
    "gatv2, shared": lambda: pyg.GATv2Conv(WIDTH, 5, heads=2, share_weights=True, concat=False),
}


def compare(
    make: Callable[[], nn.Module], cut: Cutter, parts: int, case: Any = plain, others: Any = None,
    used: tuple[str, ...] = (), policy: Any = None,
) -> None:  # fmt: skip
    """``others``: the case of the ranks, where it is another."""
    torch.manual_seed(0)
    layer, columns = make().double(), {name: COLUMNS[name] for name in used}
    expected = compared.whole(mixed(), layer, case, X, columns)
    path = cut(mixed(), parts)
    got = compared.sharded(path, parts, layer, others or case, X, columns, policy)
    compared.compare(expected, got, EXACT)


def strictly(case: Any) -> Any:
    def call(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
        return case(sar.optimize(layer, strict=True), x, edges, columns)

    return call


@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_are_exact(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 3, others=strictly(plain))
    one_shot = sar.Policy(rounds=1)
    compare(FUSED[kind], partitioned, 2, others=strictly(plain), policy=one_shot)


@pytest.mark.parametrize("kind", ["sage, narrower", "gcn, wider", "gat", "gin"])
def test_one_rank_is_as_many(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 1, others=strictly(plain))


def looked_into(ranks: set[int], case: Any = plain) -> Any:
    """The layer's own code runs on some ranks, as somebody looks into it there."""

    def call(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
        if edges.sharded_graph.group.rank in ranks:
            layer.register_message_forward_hook(lambda *_: None)
        return case(layer, x, edges, columns)

    return call


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("ranks", [{0}, {0, 1}], ids=["one", "all"])
def test_ranks_choose_each_for_itself(kind: str, ranks: set[int], partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 2, others=looked_into(ranks))


@pytest.mark.parametrize("kind", ["gat", "gatv2"])
def test_dropped_weights_do_not_depend_on_the_choice(kind: str, partitioned: Cutter) -> None:
    torch.manual_seed(0)
    layer = FUSED[kind]().double()
    layer.dropout = 0.5

    def seeded(case: Any) -> Any:
        def call(*args: Any) -> Tensor:
            sar.manual_seed(3)
            return case(*args)

        return call

    path = partitioned(mixed(), 2)
    found = [
        compared.sharded(path, 2, layer, seeded(case), X, {})
        for case in (strictly(plain), looked_into({0}), looked_into({0, 1}))
    ]
    for other in found[1:]:
        compared.compare(found[0], other, EXACT)
    assert not torch.equal(found[0]["output"], found[0]["output"].round())


# -- what is not fused ---------------------------------------------------------------------------


class OwnMessage(pyg.SAGEConv):
    def message(self, x_j: Tensor) -> Tensor:
        return 2 * x_j


class OwnUpdate(pyg.GATConv):
    def update(self, inputs: Tensor) -> Tensor:
        return inputs.tanh()


class OwnPropagate(pyg.GCNConv):
    def propagate(self, edge_index: Any, **given: Any) -> Tensor:
        return 3 * super().propagate(edge_index, **given)


class OwnEdges(pyg.GATv2Conv):
    def edge_updater(self, edge_index: Any, **given: Any) -> Tensor:
        return super().edge_updater(edge_index, **given).square()


class OwnForward(pyg.GINConv):
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return super().forward(x, edge_index).square()


class Inherits(pyg.GCNConv):
    """All that it has is its base's."""


class Doubled(pyg.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changed(layer: nn.Module, **parts: Any) -> nn.Module:
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


# The layer, how it is called, columns that it gets, and why it is not fused.
OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...], str]] = {
    "improved": (lambda: pyg.GCNConv(WIDTH, 4, improved=True), plain, (), "improved"),
    "not normalized": (lambda: pyg.GCNConv(WIDTH, 4, normalize=False), plain, (), "normalize"),
    "cached": (lambda: pyg.GCNConv(WIDTH, 4, cached=True), plain, (), "cached"),
    "weights": (lambda: pyg.GCNConv(WIDTH, 4), partial(on, "weight"), ("weight",), "edge_weight"),
    "weighted sums": (
        lambda: pyg.GraphConv(WIDTH, 4), partial(on, "weight"), ("weight",), "edge_weight",
    ),
    "features": (
        lambda: pyg.GATConv(WIDTH, 2, 2, edge_dim=3), partial(on, "attr"), ("attr",), "edge_attr",
    ),
    "weights returned": (lambda: pyg.GATConv(WIDTH, 2, 2), weighing, (), "return_attention"),
    "backwards": (
        lambda: pyg.SAGEConv(WIDTH, 4, flow="target_to_source"), plain, (), "from destinations",
    ),
    "turned edges": (lambda: pyg.GCNConv(WIDTH, 4), turned, (), "from destinations"),
    "two kinds of rows": (lambda: pyg.SAGEConv((WIDTH, WIDTH), 4), pairs, (), "rows of their own"),
    "projections": (lambda: pyg.GATConv((WIDTH, WIDTH), 2), pairs, (), "projections of their own"),
    "decomposed": (lambda: pyg.GCNConv(WIDTH, 4, decomposed_layers=2), plain, (), "decomposes"),
    "projected": (lambda: pyg.SAGEConv(WIDTH, 4, project=True), plain, (), "projects"),
    "largest": (lambda: pyg.GraphConv(WIDTH, 4, aggr="max"), plain, (), "aggregation 'max'"),
    "another part": (
        lambda: changed(pyg.SAGEConv(WIDTH, 4), lin_l=Doubled(WIDTH, 4)), plain, (),
        "lin_l is a Doubled",
    ),
    "a bias more": (
        lambda: changed(pyg.SAGEConv(WIDTH, 4), lin_r=pyg.Linear(WIDTH, 4)), plain, (), "a bias",
    ),
    "own message": (lambda: OwnMessage(WIDTH, 4), plain, (), "OwnMessage.message"),
    "own update": (lambda: OwnUpdate(WIDTH, 4), plain, (), "OwnUpdate.update"),
    "own propagate": (lambda: OwnPropagate(WIDTH, 4), plain, (), "OwnPropagate.propagate"),
    "own edges": (lambda: OwnEdges(WIDTH, 4), plain, (), "OwnEdges.edge_updater"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_are_exact_and_say_why(kind: str, partitioned: Cutter) -> None:
    make, case, used, reason = OTHERS[kind]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*its own code runs, not the fused layer")
        compare(make, partitioned, 2, case, used=used)
    with pytest.raises(sar.NotSupportedError, match=f"Conv|Own.*: not fused.*{reason}"):
        compare(make, partitioned, 1, case, strictly(case), used)


def test_own_code_warns_once(partitioned: Cutter) -> None:
    with pytest.warns(UserWarning, match="^OwnMessage: its own code runs, not the") as caught:
        compare(lambda: OwnMessage(WIDTH, 4), partitioned, 1)
    assert len([one for one in caught if "not the fused layer" in str(one.message)]) == 1


def test_a_class_that_changes_nothing_is_fused(partitioned: Cutter) -> None:
    """Also behind ``super().forward``."""
    compare(lambda: Inherits(WIDTH, 4), partitioned, 2, others=strictly(plain))
    compare(lambda: OwnForward(mlp(4)), partitioned, 2)


def test_lazy_layers_are_fused_once_they_have_weights(partitioned: Cutter) -> None:
    state = pyg.SAGEConv(WIDTH, 4).double().state_dict()

    def twice(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
        layer(x, edges)
        layer.load_state_dict(state)
        return sar.optimize(layer, strict=isinstance(edges, GraphArgument))(x, edges)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(lambda: pyg.SAGEConv(-1, 4), partitioned, 2, twice)


# -- what users see of the choice ----------------------------------------------------------------


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
