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
from pyg_convs import CONVS, WIDTH
from torch import Tensor

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
    "three ranks": Setting(graphs.mixed, 3, "metis", ONE_SHOT),
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
    """Each layer in one setting, some in half of them; the other pairs run with --full."""
    found = []
    pairs = product(enumerate(CONVS), enumerate(SETTINGS))
    for (number, name), (place, setting) in pairs:
        if (name, setting) not in NEVER:
            is_chosen = name in ALWAYS and place % 2 or number % len(SETTINGS) == place
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


def compare(name: str, setting: Setting, dtype: torch.dtype, cutter: Cutter) -> None:
    make, call = CONVS[name]
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
    compare(name, SETTINGS[setting], torch.float64, partitioned)


@pytest.mark.filterwarnings("ignore:.*on an edge tensor cannot be streamed")
@pytest.mark.parametrize("name", list(CONVS)[::6])
def test_layers_are_exact_in_float32(name: str, partitioned: Cutter) -> None:
    compare(name, SETTINGS["three ranks"], torch.float32, partitioned)
