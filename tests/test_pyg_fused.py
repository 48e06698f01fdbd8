"""PyG's layers on the fused functions: all are exact, and those that are not fused say why."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import pyg as compared
from harness.graphs import loopless, mixed
from harness.parts import Cutter
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops

import sar
import sar.pyg
from sar.graph import GraphArgument
from sar.partition.arrays import ETYPE_HOMO, GraphArrays

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


def doubled(what: str, layer: Any, x: Tensor, *given: Any) -> Tensor:
    getattr(layer, f"register_{what}_forward_hook")(lambda module, args, out: 2 * out)
    return plain(layer, x, *given)


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
    "gat, no features": lambda: pyg.GATConv(WIDTH, 2, heads=2, edge_dim=3),
    "gat, edges as they are": lambda: pyg.GATConv(WIDTH, 2, add_self_loops=False, bias=False),
    "gatv2": lambda: pyg.GATv2Conv(WIDTH, 5, heads=2, residual=True),
    "gatv2, shared": lambda: pyg.GATv2Conv(WIDTH, 5, heads=2, share_weights=True, concat=False),
}


def compare(
    make: Callable[[], nn.Module], cutter: Cutter, parts: int, case: Any = plain,
    others: Any = None, used: tuple[str, ...] = (), policy: Any = None, cut: str = "random",
    dtype: torch.dtype = torch.float64, graph: GraphArrays | None = None,
) -> None:  # fmt: skip
    """``others``: the case of the ranks, where it is another."""
    torch.manual_seed(0)
    layer, columns = make().to(dtype), {name: COLUMNS[name] for name in used}
    graph = graph or mixed()
    expected = compared.whole(graph, layer, case, X.to(dtype), columns)
    path = cutter(graph, parts, cut)
    got = compared.sharded(path, parts, layer, others or case, X.to(dtype), columns, policy)
    compared.compare(expected, got, EXACT if dtype == torch.float64 else 1e-5)


def strictly(case: Any) -> Any:
    def call(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
        return case(sar.optimize(layer, strict=True), x, edges, columns)

    return call


@pytest.mark.parametrize("kind", FUSED)
def test_fused_layers_are_exact(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 3, others=strictly(plain))
    one_shot = sar.Policy(rounds=1)
    compare(FUSED[kind], partitioned, 4, others=strictly(plain), policy=one_shot, cut="adversarial")


@pytest.mark.parametrize("kind", ["sage, narrower", "gcn, wider", "gat", "gin"])
def test_one_rank_is_as_many(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 1, others=strictly(plain))


@pytest.mark.parametrize("kind", ["gcn", "gat"])
@pytest.mark.parametrize("hooked", [set(), {0}], ids=["fused", "one"])
def test_graphs_without_loops_get_them(kind: str, hooked: set[int], partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 2, others=looked_into(hooked), graph=loopless())


@pytest.mark.parametrize("kind", ["sage, narrower", "gcn, wider", "gatv2", "gin"])
def test_single_precision(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 2, others=strictly(plain), dtype=torch.float32)


def looped(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
    return layer(x, add_self_loops(edges, num_nodes=len(x))[0])


@pytest.mark.parametrize("kind", ["sage", "gcn", "gat"])
def test_edges_that_users_add_are_there(kind: str, partitioned: Cutter) -> None:
    compare(FUSED[kind], partitioned, 2, looped, strictly(looped))


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


class Doubled(nn.Linear):
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
    "own method of one": (
        lambda: changed(pyg.GINConv(mlp(4)), message=lambda x_j: 3 * x_j), plain, (), "of its own",
    ),
    "message hook": (
        lambda: pyg.SAGEConv(WIDTH, 4), partial(doubled, "message"), (), "hook looks into",
    ),
    "edge hook": (
        lambda: pyg.GATConv(WIDTH, 4), partial(doubled, "edge_update"), (), "hook looks into",
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
    state = pyg.SAGEConv(WIDTH, 4).state_dict()

    def twice(layer: Any, x: Tensor, edges: Any, columns: dict[str, Tensor]) -> Tensor:
        layer(x, edges)
        layer.load_state_dict(state)
        return sar.optimize(layer, strict=isinstance(edges, GraphArgument))(x, edges)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PyG has others on 3.13
        compare(lambda: pyg.SAGEConv(-1, 4), partitioned, 2, twice, dtype=torch.float32)
