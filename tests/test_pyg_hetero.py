"""PyG's models of several types, unmodified, on ranks: equal to the whole graph in one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.graphs import NUM_FEATURES as WIDTH
from harness.graphs import hetero, shop, sparse_hetero
from harness.parts import Cutter
from harness.pyg import compare
from harness.pyg_hetero import inputs, sharded, whole
from torch import Tensor, nn
from torch_geometric import nn as pyg

import sar

ONCE, STRICT = sar.Policy(rounds=1), sar.Policy(block_bytes=256)
SETTINGS = [  # graph, parts, cut, policy
    (shop, 3, "random", STRICT),
    (hetero, 2, "coarsen", ONCE),
    (sparse_hetero, 4, "adversarial", STRICT),
    (hetero, 4, "adversarial", ONCE),
    (sparse_hetero, 2, "random", ONCE),
    (shop, 1, "random", STRICT),
]


class Message(pyg.MessagePassing):
    """A message of a user's own, between rows of one or of two types."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__(aggr="mean")
        self.ends, self.own = pyg.Linear(width, out), pyg.Linear(width, out)

    def reset_parameters(self) -> None:
        self.ends.reset_parameters()
        self.own.reset_parameters()

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        x = (x, x) if isinstance(x, Tensor) else x
        return self.propagate(edge_index, x=x) + self.own(x[1])

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.tanh(self.ends(x_j - x_i))


class Stack(nn.Module):
    """Two layers with a function of nodes between."""

    def __init__(self, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(WIDTH, 5), make(5, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x, edge_index)), edge_index)


class Dense(nn.Module):
    """Linear layers by type, of dictionaries and of rows of all types, around messages."""

    def __init__(self, metadata: tuple) -> None:
        super().__init__()
        self.into = pyg.HeteroDictLinear(WIDTH, 5, types=metadata[0])
        self.conv = pyg.HeteroConv({e: pyg.SAGEConv(5, 5, aggr="min") for e in metadata[1]})
        self.out = pyg.HeteroLinear(5, 4, len(metadata[0]))

    def forward(self, x_dict: dict, edge_index_dict: dict) -> dict:
        x = self.into(x_dict)
        x |= self.conv(x, edge_index_dict)
        sizes = torch.tensor([len(rows) for rows in x.values()])
        out = self.out(torch.cat([*x.values()]), torch.arange(len(x)).repeat_interleave(sizes))
        return dict(zip(x, out.split(sizes.tolist())))


class Sizes(nn.Module):
    """Layers between two types that are told how many rows there are; some get no destinations."""

    def __init__(self, metadata: tuple) -> None:
        super().__init__()
        makes = (
            lambda: pyg.SAGEConv(BOTH, 4), lambda: pyg.GATv2Conv(BOTH, 4, add_self_loops=False),
            lambda: pyg.GATConv(BOTH, 4, add_self_loops=False), lambda: pyg.GraphConv(BOTH, 4),
            lambda: pyg.TransformerConv(BOTH, 4),
        )  # fmt: skip
        self.layers = nn.ModuleList(makes[i % 5]() for i in range(len(metadata[1])))
        self.etypes = metadata[1]

    def forward(self, x_dict: dict, edge_index_dict: dict) -> dict:
        found: dict = {}
        for layer, etype in zip(self.layers, self.etypes):
            src, dst, edges = x_dict[etype[0]], x_dict[etype[2]], edge_index_dict[etype]
            sizes = {"size": (len(src), len(dst))}
            is_told = isinstance(layer, (pyg.SAGEConv, pyg.GATConv, pyg.GraphConv))
            out = layer((src, dst), edges, **(sizes if is_told else {}))
            if isinstance(layer, (pyg.SAGEConv, pyg.GATConv)):
                out = out + layer((src, None), edges, **sizes)
            found[etype[2]] = found.get(etype[2], 0) + out
        return found


BOTH, HEADS = (WIDTH, WIDTH), {"heads": 2, "add_self_loops": False}


def _each(make: Callable[[], nn.Module], **options: Any) -> Callable[[tuple], nn.Module]:
    return lambda metadata: pyg.HeteroConv({e: make() for e in metadata[1]}, **options)


def _turned(make: Callable[..., nn.Module]) -> Callable[[tuple], nn.Module]:
    return lambda metadata: pyg.to_hetero(Stack(make), metadata)


def _shared(make: Callable[..., nn.Module], turned: bool = False) -> Callable[[tuple], nn.Module]:
    return lambda metadata: pyg.to_hetero_with_bases(
        Stack(make), _turned_types(metadata) if turned else metadata, num_bases=2,
        in_channels={"x": WIDTH},
    )  # fmt: skip


def _turned_types(metadata: tuple) -> tuple:
    """With types last that have no incoming relation: more rows of sources than of destinations."""
    aims = {etype[2] for etype in metadata[1]}
    return sorted(metadata[0], key=lambda ntype: ntype not in aims), metadata[1]


def plain(model: Any, x: dict, edges: dict, weights: dict) -> dict:
    return {ntype: out for ntype, out in model(x, edges).items() if out is not None}


def weighted(model: Any, x: dict, edges: dict, weights: dict) -> dict:
    return model(x, edges, edge_weight_dict=weights)


def attributed(model: Any, x: dict, edges: dict, weights: dict) -> dict:
    return model(x, edges, edge_attr_dict={e: w.view(-1, 1) for e, w in weights.items()})


def _case(name: str, make: Callable, call: Callable = plain, *, to_all: bool = False) -> Any:
    """``to_all``: the model wants each type to have an incoming relation."""
    return pytest.param(make, call, to_all, id=name)


MODELS = [
    _case("sage", _each(lambda: pyg.SAGEConv(BOTH, 4))),
    _case("sage-max", _each(lambda: pyg.SAGEConv(BOTH, 4, aggr="max"), aggr="mean")),
    _case("gat", _each(lambda: pyg.GATConv(BOTH, 4, edge_dim=1, **HEADS)), attributed),
    _case("gatv2", _each(lambda: pyg.GATv2Conv(BOTH, 4, **HEADS), aggr="cat")),
    _case("graph", _each(lambda: pyg.GraphConv(BOTH, 4), aggr="max"), weighted),
    _case("transformer", _each(lambda: pyg.TransformerConv(BOTH, 4, edge_dim=1)), attributed),
    _case("gin", _each(lambda: pyg.GINConv(nn.Linear(WIDTH, 4)), aggr=None)),
    _case("own", _each(lambda: Message(WIDTH, 4), aggr="min")),
    _case("to-hetero-sage", _turned(lambda i, o: pyg.SAGEConv((i, i), o)), to_all=True),
    _case("to-hetero-own", _turned(Message), to_all=True),
    _case("bases-sage", _shared(pyg.SAGEConv)),
    _case("bases-own", _shared(Message)),
    _case("bases-gcn", _shared(lambda i, o: pyg.GCNConv(i, o, add_self_loops=False), turned=True)),
    _case("dense", lambda metadata: Dense(metadata)),
    _case("sizes", lambda metadata: Sizes(metadata)),
    _case("hgt-turned", lambda metadata: pyg.HGTConv(WIDTH, WIDTH, _turned_types(metadata))),
    _case("hgt", lambda metadata: pyg.HGTConv(WIDTH, WIDTH, metadata, heads=2)),
    _case("hgt-lazy", lambda metadata: pyg.HGTConv(-1, 8, metadata, heads=4)),
    _case("han", lambda metadata: pyg.HANConv(WIDTH, 8, metadata, heads=2)),
]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Cutter:
    return Cutter(tmp_path_factory.mktemp("parts"))


def _settings(name: str, to_all: bool) -> list:
    first = zlib.crc32(name.encode()) % len(SETTINGS)
    order = [*SETTINGS[first:], *SETTINGS[:first]]
    return [one for one in order if one[0] is shop or not to_all][:2]


@pytest.mark.filterwarnings("ignore:There exist node types")
@pytest.mark.parametrize("make, call, to_all", MODELS)
def test_models_of_several_types_are_exact(
    request: Any, cut: Cutter, make: Callable, call: Callable, to_all: bool
) -> None:
    precisions = (torch.float64, 1e-9), (torch.float32, 1e-5)
    settings = _settings(request.node.callspec.id, to_all)
    for (dtype, tolerance), (graph, parts, method, policy) in zip(precisions, settings):
        arrays = graph()
        torch.manual_seed(1)
        model = make((list(arrays.num_nodes), list(arrays.edges))).to(dtype)
        call(model, *inputs(arrays, dtype))  # makes parameters of widths that were not known
        expected = whole(arrays, model, call, dtype)
        got = sharded(cut(arrays, parts, method), parts, arrays, model, call, policy, dtype)
        compare(expected, got, tolerance)
