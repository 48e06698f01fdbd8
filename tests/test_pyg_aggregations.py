"""PyG's aggregations of messages on ranks against the same on the whole graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import pyg
from harness.graphs import homogeneous, looped, mixed
from harness.parts import Cutter
from harness.threads import run_threads
from torch import Tensor

import sar
from sar.partition.arrays import ETYPE_HOMO, GraphArrays

nn = pytest.importorskip("torch_geometric.nn")
pytestmark = pytest.mark.timeout(60)
WIDTH = 6
DEGREES = torch.tensor([3, 10, 20, 10, 3])


def by_destination(graph: GraphArrays) -> GraphArrays:
    """The graph as PyG wants it where it looks at all messages of a node: destinations ascend."""
    src, dst = graph.edges[ETYPE_HOMO]
    order = dst.argsort(stable=True)
    count = next(iter(graph.num_nodes.values()))
    return homogeneous(f"{graph.name}_sorted", count, src[order], dst[order])


def messages(aggr: Any, x: Tensor, edge_index: Any, columns: dict[str, Tensor]) -> Tensor:
    """A function of both ends and of the edge, aggregated."""
    src, dst = edge_index
    rows = torch.tanh(x[src] - 0.5 * x[dst]) + columns["attr"]
    return aggr(rows, dst, dim_size=len(x), dim=-2).flatten(1)


def mlp(*sizes: int, norm: str | None = None) -> Any:
    return nn.MLP(list(sizes), norm=norm, act="tanh")


def linear(width: int) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.Tanh())


A = nn.aggr
CLAMPS = "clamp_min" in inspect.signature(A.PowerMeanAggregation).parameters  # else p's may be NaN
TABLE: dict[str, Callable[[], Any]] = {
    "sum": A.SumAggregation,
    "mean": A.MeanAggregation,
    "max": A.MaxAggregation,
    "min": A.MinAggregation,
    "mul": A.MulAggregation,
    "var": A.VarAggregation,
    "var of semi gradients": lambda: A.VarAggregation(semi_grad=True),
    "std": A.StdAggregation,
    "softmax": A.SoftmaxAggregation,
    "softmax, learned": lambda: A.SoftmaxAggregation(learn=True, channels=WIDTH),
    "softmax of semi gradients": lambda: A.SoftmaxAggregation(semi_grad=True),
    "power mean": lambda: A.PowerMeanAggregation(p=2.0, learn=CLAMPS),
    "median": A.MedianAggregation,
    "quantiles": lambda: A.QuantileAggregation([0.2, 0.7], fill_value=3.0),
    "midpoint": lambda: A.QuantileAggregation(0.4, interpolation="midpoint"),
    "lstm": lambda: A.LSTMAggregation(WIDTH, 5),
    "gru": lambda: A.GRUAggregation(WIDTH, 5, num_layers=2),
    "sort": lambda: A.SortAggregation(k=3),
    "set transformer": lambda: A.SetTransformerAggregation(WIDTH, num_seed_points=2, heads=2),
    "graph multiset": lambda: A.GraphMultisetTransformer(WIDTH, k=2, heads=2),
    "mlp": lambda: A.MLPAggregation(WIDTH, 5, 7, num_layers=2, hidden_channels=8, norm=None),
    "lcm": lambda: A.LCMAggregation(WIDTH, 5),
    "patch": lambda: A.PatchTransformerAggregation(WIDTH, 5, 3, 8, aggr=["mean", "std"]),
    "set2set": lambda: A.Set2Set(WIDTH, processing_steps=2),
    "attentional": lambda: A.AttentionalAggregation(linear(1), mlp(WIDTH, 5)),
    "deep sets": lambda: A.DeepSetsAggregation(mlp(WIDTH, 5), torch.nn.Linear(5, 4)),
    "variance preserving": A.VariancePreservingAggregation,
    "several": lambda: A.MultiAggregation(["mean", "sum", "var", "std", "max", "median"]),
    "several, attended": lambda: A.MultiAggregation(
        ["mean", "mul"], mode="attn", mode_kwargs={"in_channels": 6, "out_channels": 6}
    ),
    "scaled": lambda: A.DegreeScalerAggregation(
        ["mean", "std"], ["identity", "amplification", "inverse_linear"], DEGREES, train_norm=True
    ),
}  # fmt: skip
NAN_WITHOUT_EDGES = ("set transformer", "graph multiset")
CUTS = [(2, "random", sar.Policy(rounds=1)), (4, "adversarial", None)]


def test_the_table_has_every_aggregation() -> None:
    used = {type(part) for make in TABLE.values() for part in make().modules()}
    assert {getattr(A, name) for name in A.classes} - used == {
        A.Aggregation, A.EquilibriumAggregation
    }  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore:reduce function")
def test_aggregations(name: str, partitioned: Cutter) -> None:
    """Rows and all gradients, with isolated nodes; half of them with an empty rank, in rounds."""
    torch.manual_seed(0)
    aggr = TABLE[name]().double()
    graph = by_destination(looped() if name in NAN_WITHOUT_EDGES else mixed())
    x = torch.randn(57, WIDTH, dtype=torch.float64)
    count = len(graph.edges[ETYPE_HOMO][0])
    columns = {"attr": torch.randn(count, WIDTH, dtype=torch.float64)}
    expected = pyg.whole(graph, aggr, messages, x, columns)
    parts, method, policy = CUTS[list(TABLE).index(name) % 2]
    got = pyg.sharded(partitioned(graph, parts, method), parts, aggr, messages, x, columns, policy)
    pyg.compare(expected, got, 1e-9)


class Dense(A.Aggregation):
    """One of a user's own."""

    def forward(self, x: Tensor, index: Any, ptr: Any, dim_size: int, dim: int) -> Tensor:
        return self.to_dense_batch(x, index, ptr, dim_size, dim)[0].logsumexp(1)


REFUSED = [
    (Dense, {}, "Dense: wants all rows"),
    (lambda: A.EquilibriumAggregation(WIDTH, 5, [8]), {}, "EquilibriumAggregation: takes grad"),
    (lambda: A.MLPAggregation(WIDTH, 5, 7, num_layers=2, hidden_channels=8), {},
     "MLPAggregation: got BatchNorm1d in it"),
    (lambda: A.LSTMAggregation(WIDTH, 5), {"side": 0}, "LSTMAggregation: got sources"),
    (A.SumAggregation, {"has_ptr": True}, "SumAggregation: got ptr"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "told"), REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(
    make: Callable, given: dict, told: str, partitioned: Cutter
) -> None:
    path = partitioned(mixed(), 2, "random")

    def run(group: Any) -> bool:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        rows = data.x[data.edge_index[0]]
        with pytest.raises(sar.NotSupportedError, match=told):
            ptr = torch.arange(len(data.x) + 1) if given.get("has_ptr") else None
            make()(rows, data.edge_index[given.get("side", 1)], ptr, len(data.x))
        return True

    assert run_threads(2, run) == [True, True]


@pytest.mark.filterwarnings("ignore:reduce function")
def test_layers_aggregate_as_their_classes_do(partitioned: Cutter) -> None:
    """What a hook or a subclass makes of an aggregation counts, and a product of scatter's."""

    class Twice(A.LSTMAggregation):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return 2 * super().forward(x - 1, *args, **kwargs)

    def product(layer: Any, x: Tensor, edge_index: Any, columns: dict) -> Tensor:
        from torch_geometric.utils import scatter

        return scatter(x[edge_index[0]], edge_index[1], 0, len(x), reduce="mul")

    hooked = nn.SAGEConv(WIDTH, 4, aggr="max")
    hooked.aggr_module.register_forward_hook(lambda module, given, out: out * out)
    plain = lambda layer, x, edge_index, columns: layer(x, edge_index)  # noqa: E731
    graph = by_destination(mixed())
    x = torch.rand(57, WIDTH, dtype=torch.float64) + 0.5
    for layer, case in (
        (nn.SAGEConv(WIDTH, 4, aggr=Twice(WIDTH, WIDTH)), plain),
        (hooked, plain),
        (torch.nn.Identity(), product),
    ):
        layer = layer.double()
        expected = pyg.whole(graph, layer, case, x, {})
        got = pyg.sharded(partitioned(graph, 2, "random"), 2, layer, case, x, {})
        pyg.compare(expected, got, 1e-9)


def test_rows_written_before_their_sum_are_refused(partitioned: Cutter) -> None:
    """Factors are multiplied when rows are summed, and have to be what they were."""
    path = partitioned(mixed(), 2, "random")

    def run(group: Any) -> None:
        data = sar.pyg.construct_full_graph(sar.load_partition_data(path))
        src, dst = data.edge_index
        x, numbers = data.x.clone(), torch.ones(len(data.x), 1)
        for written in (x, numbers):
            rows = x[src] * numbers[dst]
            written.add_(1)
            with pytest.raises(sar.NotSupportedError, match="written in place"):
                A.SumAggregation()(rows, dst, dim_size=len(x))

    run_threads(2, run)
