"""Every layer of PyG over ranks that are threads, against the whole graph in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from harness import graphs, pyg
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import Cutter
from pyg_convs import CONVS, WIDTH, Call, made, plain
from torch import Tensor, nn
from torch_geometric import nn as layers
from torch_geometric import utils

import sar


def large() -> GraphArrays:
    """More edges on each of two ranks than a block has."""
    return graphs.mixed(260, seed=3)


class Setting(NamedTuple):
    """A graph, how many ranks have it, by which cut, and how its rows stream."""

    graph: Callable[[], GraphArrays]
    parts: int
    cut: str | list[int] = "random"
    policy: sar.Policy = sar.Policy()


ONE_SHOT, STRICT = sar.Policy(rounds=1), sar.Policy(block_bytes=1024)
KEPT = sar.Policy(rounds=1, rematerialize=False)
# The second rank has nodes without edges into them, the third has no node.
NO_EDGES = [0] * 52 + [1] * 5
SETTINGS = {
    "one rank": Setting(graphs.mixed, 1),
    "two ranks, blocks": Setting(large, 2, "random", STRICT),
    "three ranks": Setting(graphs.mixed, 3, "coarsen", ONE_SHOT),
    "four ranks, one empty": Setting(graphs.mixed, 4, "adversarial"),
    "no edges on a rank": Setting(graphs.mixed, 3, NO_EDGES, ONE_SHOT),
    "four ranks, kept": Setting(graphs.looped, 4, "random", KEPT),
    "no loops": Setting(graphs.loopless, 3, "random", STRICT),
    "isolated": Setting(graphs.mostly_isolated, 2),
    "loops alone": Setting(graphs.loops, 2),
    "no edges": Setting(graphs.no_edges, 2),
    "multi-edges": Setting(graphs.repeated, 2, "contiguous", STRICT),
    "a node each": Setting(graphs.ring, 4, [0, 1, 2, 3]),
}
ALWAYS = {"GCN", "SAGE max", "GAT attributes", "PNA", "Edge"}  # in several settings
# Reshaped or joined where a rank has no edge, or no node.
ALSO = {("FeaSt", "four ranks, one empty"), ("Cheb unscaled", "four ranks, one empty")}
NEVER = {("Hypergraph attention of edges", "no edges")}  # attributes of hyperedges, of which are 0


def chosen() -> list[Any]:
    """Each layer in one setting, some in a quarter of them; the other pairs run with --full."""
    found = []
    pairs = product(enumerate(CONVS), enumerate(SETTINGS))
    for (number, name), (place, setting) in pairs:
        if (name, setting) not in NEVER:
            is_chosen = name in ALWAYS and place % 4 == 3 or number % len(SETTINGS) == place
            is_chosen = is_chosen or (name, setting) in ALSO
            marks = () if is_chosen else pytest.mark.slow
            found.append(pytest.param(name, setting, marks=marks))
    return found


@cache
def inputs(make: Callable[[], GraphArrays]) -> tuple[Tensor, dict[str, Tensor]]:
    graph = make()
    num_nodes, num_edges = graph.num_nodes[NTYPE_HOMO], len(graph.edges[ETYPE_HOMO][0])
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(num_nodes, WIDTH, generator=rng, dtype=torch.float64)
    columns = {
        "weight": torch.rand(num_edges, generator=rng, dtype=torch.float64) + 0.5,
        "attr": torch.randn(num_edges, 3, generator=rng, dtype=torch.float64),
        "type": torch.randint(3, (num_edges,), generator=rng),
    }
    return x, columns


class Used(dict):
    """Columns, and the names of those that were asked for."""

    def __init__(self, columns: dict[str, Tensor]) -> None:
        super().__init__(columns)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.names.add(name)
        return super().__getitem__(name)


def compare(
    case: tuple[Callable[[], nn.Module], Call], setting: Setting, dtype: torch.dtype, cutter: Cutter
) -> None:
    make, call = case
    torch.manual_seed(0)
    layer = make().to(dtype)
    graph, used = setting.graph(), set[str]()
    x, columns = inputs(setting.graph)
    x = x.to(dtype)
    columns = {n: c.to(dtype) if c.is_floating_point() else c for n, c in columns.items()}

    def noting(layer: Any, x: Tensor, edges: Any, given: dict[str, Tensor]) -> Tensor:
        found = Used(given)
        out = call(layer, x, edges, found)
        used.update(found.names)
        return out

    want = pyg.whole(graph, layer, noting, x, columns)
    columns = {n: c for n, c in columns.items() if n in used}
    want = {n: v for n, v in want.items() if not n.startswith("column") or n[7:] in used}
    path = cutter(graph, setting.parts, setting.cut)
    got = pyg.sharded(path, setting.parts, layer, call, x, columns, setting.policy)
    pyg.compare(want, got, 1e-9 if dtype == torch.float64 else 1e-5)


@pytest.mark.filterwarnings("ignore:.*on an edge tensor cannot be streamed")
@pytest.mark.parametrize(("name", "setting"), chosen())
def test_layers_are_exact(name: str, setting: str, partitioned: Cutter) -> None:
    compare(CONVS[name], SETTINGS[setting], torch.float64, partitioned)


@pytest.mark.filterwarnings("ignore:.*on an edge tensor cannot be streamed")
@pytest.mark.parametrize("name", list(CONVS)[::12])
def test_layers_are_exact_in_float32(name: str, partitioned: Cutter) -> None:
    compare(CONVS[name], SETTINGS["three ranks"], torch.float32, partitioned)


# -- layers of users -----------------------------------------------------------------------------


class Own(layers.MessagePassing):
    """Called with rows and edges alone; parts differ in the classes below."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lin = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))


class Copied(Own):
    """Rows as they are."""


class Gated(Own):
    """Scores of both ends, a softmax over the edges of a node, an update with its row."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Any, size_i: int | None) -> Tensor:
        score = utils.softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)
        return score.unsqueeze(-1) * torch.tanh(x_j)

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + x


class Summed(Own):
    """An aggregate of its own, by scatter in torch's words."""

    def aggregate(self, inputs: Tensor, index: Any, dim_size: int | None = None) -> Tensor:
        at = index.unsqueeze(-1).expand_as(inputs)
        total = inputs.new_zeros(dim_size, inputs.size(-1)).scatter_add_(0, at, inputs)
        largest = utils.scatter(inputs.abs(), index, dim_size=dim_size, reduce="max")
        return torch.cat([total, largest], -1)


class Edged(Own):
    """Rows of edges, computed before they are messages."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.lin(x)
        alpha = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, alpha=alpha, size=(len(x), len(x)))

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid((x_i - x_j).sum(-1, keepdim=True))

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return x_j * alpha


class Wide(Own):
    """Nodes along the first of three dimensions."""

    def __init__(self) -> None:
        super().__init__(aggr="mean", node_dim=0)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x).view(-1, 2, 2)).flatten(1)


class Batched(Own):
    """The same graph for several batches of rows, nodes along the last dimension but one."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        rows = torch.stack([self.lin(x), x[:, :4].sin()])
        return torch.cat(list(self.propagate(edge_index, x=rows)), -1)


class Plain(nn.Module):
    """No layer of PyG's: rows taken and summed by the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        row, col = edge_index
        rows = self.lin(torch.cat([x[row], x[col] - x[row]], -1)).relu()
        out = torch.zeros(len(x), 4, dtype=x.dtype).index_add_(0, col, rows)
        mean = utils.scatter(rows, row, 0, len(x), "mean")
        return out / utils.degree(col, len(x), x.dtype).clamp(min=1).unsqueeze(-1) + mean


class Hooked(Own):
    """Hooks on messages and on what is aggregated."""

    def __init__(self) -> None:
        super().__init__()
        self.register_message_forward_hook(lambda layer, given, out: out * 2)
        self.register_aggregate_forward_hook(lambda layer, given, out: out.tanh())
        self.register_propagate_forward_pre_hook(lambda layer, given: None)


OWN = [Copied, Gated, Summed, Edged, Wide, Batched, Plain, Hooked]


@pytest.mark.parametrize("kind", OWN)
def test_layers_of_users_are_exact(kind: Any, partitioned: Cutter) -> None:
    setting = ("two ranks, blocks", "four ranks, one empty")[OWN.index(kind) % 2]
    compare((kind, plain), SETTINGS[setting], torch.float64, partitioned)


def splines(place: Tensor, sizes: Tensor, is_open: Tensor, degree: int) -> tuple[Tensor, Tensor]:
    """Weights [E, 2] and numbers [E, 2] of kernels, linear along the first axis."""
    at = place[:, 0].clamp(0, 1) * (sizes[0] - 1)
    low = at.detach().floor().clamp(max=int(sizes[0]) - 2)
    return torch.stack([1 - at + low, at - low], 1), torch.stack([low, low + 1], 1).long()


def weigh(x: Tensor, weight: Tensor, basis: Tensor, numbers: Tensor) -> Tensor:
    return (basis.unsqueeze(-1) * torch.einsum("ef,esfo->eso", x, weight[numbers])).sum(1)


@pytest.mark.filterwarnings("ignore:We do not recommend")
def test_splines_are_exact(partitioned: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over functions of torch: those of PyG are in a package of its own."""
    monkeypatch.setattr("torch_geometric.nn.conv.spline_conv.spline_basis", splines)
    monkeypatch.setattr("torch_geometric.nn.conv.spline_conv.spline_weighting", weigh)
    case = (made("SplineConv", WIDTH, 5, dim=3, kernel_size=4), squashed)
    compare(case, SETTINGS["four ranks, one empty"], torch.float64, partitioned)


def squashed(layer: Any, x: Tensor, edges: Any, columns: Any) -> Tensor:
    return layer(x, edges, columns["attr"].sigmoid())
