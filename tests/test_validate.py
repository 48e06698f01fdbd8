"""`sar.validate`: models of both libraries and of one's own, right ones and ones that are wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays

dgl = pytest.importorskip("dgl")
pyg = pytest.importorskip("torch_geometric")

import dgl.function as fn  # noqa: E402
import dgl.nn as dnn  # noqa: E402
import torch_geometric.nn as pnn  # noqa: E402
from torch_geometric.data import Data, HeteroData  # noqa: E402

N, E, W = 120, 600, 6
TYPES = [("a", "likes", "b"), ("b", "knows", "a"), ("b", "with", "b")]


@cache
def arrays() -> GraphArrays:
    rng = torch.Generator().manual_seed(0)
    ends = torch.randint(N, (2, E), generator=rng)
    columns = {
        "feat": torch.randn(N, W, generator=rng), "label": torch.randint(4, (N,), generator=rng),
        "train_mask": torch.rand(N, generator=rng) < 0.4,
    }  # fmt: skip
    edges = {"weight": torch.rand(E, generator=rng) + 0.5, "feat": torch.rand(E, 3, generator=rng)}
    return GraphArrays(
        "small", {NTYPE_HOMO: N}, {ETYPE_HOMO: (ends[0], ends[1])}, {NTYPE_HOMO: columns},
        {ETYPE_HOMO: edges},
    )  # fmt: skip


@cache
def of_dgl() -> Any:
    graph = dgl.graph(arrays().edges[ETYPE_HOMO], num_nodes=N)
    graph.ndata.update(arrays().node_data[NTYPE_HOMO])
    graph.edata.update(arrays().edge_data[ETYPE_HOMO])
    return graph


@cache
def of_pyg() -> Any:
    nodes, edges = arrays().node_data[NTYPE_HOMO], arrays().edge_data[ETYPE_HOMO]
    return Data(
        nodes["feat"], torch.stack(arrays().edges[ETYPE_HOMO]), edges["feat"], nodes["label"],
        edge_weight=edges["weight"], train_mask=nodes["train_mask"],
    )  # fmt: skip


@cache
def typed_pyg() -> Any:
    rng, data = torch.Generator().manual_seed(1), HeteroData()
    data["a"].x, data["b"].x = torch.randn(50, W), torch.randn(70, W)
    for etype in TYPES:
        sizes = [data[kind].num_nodes for kind in etype[::2]]
        data[etype].edge_index = torch.stack(
            [torch.randint(size, (250,), generator=rng) for size in sizes]
        )
    return data


@cache
def typed_dgl() -> Any:
    data = typed_pyg()
    ends = {etype: tuple(data[etype].edge_index) for etype in TYPES}
    graph = dgl.heterograph(ends, num_nodes_dict={"a": 50, "b": 70})
    for ntype in ("a", "b"):
        graph.nodes[ntype].data["feat"] = data[ntype].x
    return graph


class Between(nn.Module):
    """Two layers with something between them, of either library."""

    def __init__(self, first: nn.Module, between: Any, last: nn.Module) -> None:
        super().__init__()
        self.first, self.last = first, last
        if isinstance(between, nn.Module):
            self.between = between
        else:
            self.function = between

    def middle(self, h: Tensor) -> Tensor:
        return self.between(h) if hasattr(self, "between") else self.function(h)


class OfDgl(Between):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.last(graph, F.dropout(self.middle(self.first(graph, x)).relu()))


class OfPyg(Between):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.last(F.dropout(self.middle(self.first(x, edge_index)).relu()), edge_index)


def fused(between: Any) -> tuple[nn.Module, Any]:
    zero = {"allow_zero_in_degree": True}
    return OfDgl(dnn.SAGEConv(W, 8, "mean"), between, dnn.GATConv(8, 4, 2, **zero)), of_dgl()


def plain(between: Any) -> tuple[nn.Module, Any]:
    zero = {"allow_zero_in_degree": True}
    return OfDgl(dnn.SAGEConv(W, 8, "pool"), between, dnn.DotGatConv(8, 4, 2, **zero)), of_dgl()


def fused_pyg(between: Any) -> tuple[nn.Module, Any]:
    return OfPyg(pnn.GCNConv(W, 8), between, pnn.GATConv(8, 4, 2, dropout=0.3)), of_pyg()


def plain_pyg(between: Any) -> tuple[nn.Module, Any]:
    return OfPyg(pnn.TransformerConv(W, 8), between, pnn.PNAConv(
        8, 4, ["mean", "std"], ["identity"], torch.tensor([0, 9, 9, 9]))), of_pyg()  # fmt: skip


class Own(nn.Module):
    """A layer of one's own on sharded graphs."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(W, 8), nn.Linear(8, 3)
        self.between = between if isinstance(between, nn.Module) else None
        self.function = between

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        h = graph.aggregate(self.first(x), "max")
        h = self.function(h) if self.between is None else self.between(h)
        return self.last(graph.aggregate(h.tanh(), "mean"))


def own(between: Any) -> tuple[nn.Module, Any]:
    return Own(between), arrays()


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Remembers(nn.Module):
    before: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.before = self.before, x.detach().mean(0)
        return x if before is None else x - before


MODELS = [fused, plain, fused_pyg, plain_pyg, own]
RIGHT: list[Any] = [nn.LayerNorm(8), nn.Dropout(), lambda x: x.softmax(1)]
WRONG: dict[str, tuple[Any, str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(8), "a norm of each rank's rows"),
    "mean": (lambda: Function(lambda x: x - x.mean(0)), "a mean"),
    "number": (lambda: Function(lambda x: x * (100 / len(x))), "len(x)"),
    "sum": (lambda: Function(lambda x: x * x.softmax(0)), "a sum"),
    "order": (lambda: Function(lambda x: x + x.cumsum(0) / 50), "the order"),
    "sort": (lambda: Function(lambda x: x + x.sort(0)[0]), "the order"),
    "random": (lambda: Function(lambda x: x + torch.randn_like(x)), "random"),
    "state": (Remembers, "from one call to the next"),
}


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("between", RIGHT, ids=range(len(RIGHT)))
def test_right_models_are_right(make: Any, between: Any) -> None:
    found = sar.validate(*make(between))
    assert found.ok, str(found)
    assert found.reference == {Own: "one rank", OfDgl: "dgl", OfPyg: "pyg"}[type(make(None)[0])]


@pytest.mark.parametrize(
    "name, make",
    [(name, MODELS[(at + more) % 5]) for at, name in enumerate(WRONG) for more in (0, 2)],
)
def test_the_module_and_the_reason_are_named(make: Any, name: str) -> None:
    between, why = WRONG[name]
    found = sar.validate(*make(between()))
    assert not found.ok and found.first is not None
    assert found.first.name == "between" and why in found.first.why, str(found)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_what_a_model_does_itself_is_between_modules(make: Any) -> None:
    model, graph = make(lambda x: x / (1 + x.abs().max()))
    found = sar.validate(model, graph, parts=3)
    assert found.first is not None and found.first.name == type(model).__name__, str(found)
    assert "a mean" in found.first.why
    assert "last" in found.first.where or "first" in found.first.where


class Many(nn.Module):
    """What its functions say."""

    def __init__(self, run: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.run = nn.ModuleDict(parts), run

    def forward(self, first: Any, second: Any) -> Any:
        return self.run(self.parts, first, second)


def gin(*norm: nn.Module) -> nn.Module:
    return pnn.GINConv(nn.Sequential(nn.Linear(W, 8), *norm, nn.ReLU(), nn.Linear(8, 4)))


def typed(norm: nn.Module) -> nn.Module:
    def run(parts: Any, x: Any, edges: Any) -> Any:
        h = parts["one"](x, edges)
        return parts["two"]({"a": h["a"].relu(), "b": parts["norm"](h["b"]).relu()}, edges)

    convs = [{e: pnn.SAGEConv((i, i), 8) for e in TYPES} for i in (W, 8)]
    one, two = map(pnn.HeteroConv, convs)
    return Many(run, one=one, norm=norm, two=two)


def typed_of_dgl(function: Any) -> nn.Module:
    def run(parts: Any, graph: Any, x: Any) -> Any:
        h = parts["one"](graph, x)
        return parts["two"](graph, {"a": h["a"], "b": function(h["b"])})

    def conv(width: int) -> nn.Module:
        names = [etype[1] for etype in TYPES]
        return dnn.HeteroGraphConv({n: dnn.SAGEConv(width, 8, "mean") for n in names})

    return Many(run, one=conv(W), two=conv(8))


class Messages(pnn.MessagePassing):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__(aggr="add")
        self.lin, self.norm = nn.Linear(2 * W, 8), norm

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.norm(self.lin(torch.cat([x_i, x_j], 1)))


class Averages(nn.Module):
    """Keeps an average that no result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(W))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        self.average = x.detach().mean(0)
        return x


def pooled(parts: Any, graph: Any, x: Tensor) -> Tensor:
    with graph.local_scope():
        graph.ndata["h"] = parts["conv"](graph, x)
        return parts["head"](dgl.mean_nodes(graph, "h"))


def gated(parts: Any, graph: Any, x: Tensor) -> Tensor:
    def message(edges: Any) -> dict:
        both = torch.cat([edges.src["h"], edges.dst["h"]], 1)
        return {"m": parts["lin"](both).sigmoid() * edges.data["weight"].unsqueeze(1)}

    with graph.local_scope():
        graph.ndata["h"] = x
        graph.update_all(message, fn.mean("m", "out"))
        return graph.ndata["out"]


def rounded(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def sage(*_: Any) -> nn.Module:
    return pnn.SAGEConv(W, 4)


def loss(model: nn.Module, data: Any) -> Tensor:
    return F.cross_entropy(model(data.x, data.edge_index), data.y)


def loss_of_all(model: nn.Module, data: Any) -> Any:
    logits = model(data.x, data.edge_index)
    return logits[data.train_mask], sar.cross_entropy(logits, data.y, data.train_mask)


def share(model: nn.Module, data: Any) -> Tensor:
    logits = model(data.x, data.edge_index)[data.train_mask]
    return F.cross_entropy(logits, data.y[data.train_mask], reduction="sum")


def narrow(model: nn.Module, data: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(model(data.x.float(), data.edge_index), data.edge_index)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any, str | None]] = {
    # name: model, graph, call, where it is wrong
    "inside a fused layer": (lambda: gin(nn.BatchNorm1d(8)), of_pyg, None, "nn.1"),
    "inside a fused layer, right": (lambda: gin(nn.LayerNorm(8)), of_pyg, None, None),
    "one type": (lambda: typed(nn.BatchNorm1d(8)), typed_pyg, None, "parts.norm"),
    "several types": (lambda: typed(nn.LayerNorm(8)), typed_pyg, None, None),
    "one type of dgl": (lambda: typed_of_dgl(lambda x: x - x.mean(0)), typed_dgl, None, "Many"),
    "several types of dgl": (lambda: typed_of_dgl(F.relu), typed_dgl, None, None),
    "in a message": (lambda: Messages(nn.BatchNorm1d(8)), of_pyg, None, "norm"),
    "a message": (lambda: Messages(nn.LayerNorm(8)), of_pyg, None, None),
    "a buffer": (Averages, of_dgl, None, "Averages"),
    "pooling": (lambda: Many(pooled, conv=dnn.SAGEConv(W, 4, "gcn"), head=nn.Linear(4, 2)),
                of_dgl, None, None),
    "function of edges": (lambda: Many(gated, lin=nn.Linear(2 * W, 4)), of_dgl, None, None),
    "loss of own rows": (sage, of_pyg, loss, "(call)"),
    "loss of all rows": (sage, of_pyg, loss_of_all, None),
    "a rank's share of a sum": (sage, of_pyg, share, None),
    "a penalty": (sage, of_pyg, lambda m, d: loss_of_all(m, d)[1] + sum(
        p.square().sum() for p in m.parameters()), "lin_l"),
    "float": (lambda: Many(lambda parts, x, edges: parts["conv"](x.float(), edges), conv=sage()),
              of_pyg, None, None),
    "autocast": (lambda: pnn.SAGEConv(W, W), of_pyg, narrow, None),
    "autocast, wrong": (lambda: Many(lambda parts, x, edges: parts["conv"](x - x.mean(0), edges),
                                     conv=pnn.SAGEConv(W, W)), of_pyg, narrow, "Many"),
    "lazy": (lambda: pnn.SAGEConv(-1, 4, aggr="max"), of_pyg, None, None),
    "refused": (lambda: Many(lambda parts, x, edges: parts["pool"](x, edges)[0],
                             pool=pnn.TopKPooling(W)), of_pyg, None, "parts.pool"),
    "ties": (lambda: Many(lambda parts, x, edges: parts["conv"](rounded(parts["lin"](x)), edges),
                          lin=nn.Linear(W, 4), conv=pnn.SAGEConv(4, 4, aggr="max")), of_pyg,
             None, "parts.conv"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_models_of_many_kinds(name: str) -> None:
    make, graph, call, wrong = CASES[name]
    torch.manual_seed(0)
    found = sar.validate(make(), graph(), call)
    got = None if found.first is None else found.first.name
    assert got == wrong, str(found)
    words = {
        "ties": "equal values",
        "a penalty": "once for each rank",
        "float": "in float32",
        "refused": "TopKPooling",
        "a buffer": "buffer",
    }
    assert words.get(name, "") in str(found)


def test_prepared_norms_are_right() -> None:
    model, graph = fused_pyg(nn.BatchNorm1d(8))
    assert sar.validate(model, graph, prepare=True).ok
    assert sar.validate(sar.convert_batch_norm(model), graph).ok
    assert sar.validate(fused_pyg(nn.BatchNorm1d(8))[0].eval(), graph).ok


def test_rows_of_nodes_are_learned() -> None:
    class Learned(nn.Module):
        def __init__(self, graph: Any) -> None:
            super().__init__()
            self.rows = sar.nn.ShardedEmbedding(graph, NTYPE_HOMO, 4)
            self.conv = sar.models.SAGEConv(4, 3)

        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return self.conv(graph, self.rows(graph))

    found = sar.validate(Learned, arrays(), parts=3)
    assert found.ok and found.reference == "one rank", str(found)


def test_nothing_changes() -> None:
    model, graph = fused_pyg(nn.BatchNorm1d(8))
    model.between.eval()
    data, before = graph.clone(), copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    sar.validate(model, data)
    assert torch.equal(states[0], torch.get_rng_state()) and states[2] == random.getstate()
    assert (states[1] == np.random.get_state()[1]).all()
    assert torch.get_default_dtype() == torch.float32
    assert F.dropout(torch.ones(100), 0.5).eq(0).any()
    assert all(p.grad is None for p in model.parameters())
    assert [m.training for m in model.modules()].count(False) == 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert data.keys() == graph.keys() and torch.equal(data.x, graph.x)


def test_a_piece_of_a_large_graph() -> None:
    rng = torch.Generator().manual_seed(0)
    ends = torch.randint(50_000, (2, 200_000), generator=rng)
    data = Data(torch.randn(50_000, W), ends)
    found = sar.validate(OfPyg(pnn.GCNConv(W, 8), nn.Identity(), pnn.GATConv(8, 2)), data)
    assert found.ok and found.num_nodes <= 1_000 and found.num_edges > 200
    assert "50,000 nodes" in str(found)
