"""The library's own layers and models: against sums written out, and against DGL's where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.commands import trainer_of
from harness.graphs import ETYPE_HOMO, GraphArrays, community
from harness.parts import Cutter
from torch import Tensor, nn

import sar
from sar import registry
from sar.comm import Group, LocalGroup, ThreadGroup
from sar.models import LAYERS as own
from sar.models import (
    Adapter,
    Call,
    GATConv,
    GINConv,
    GraphConv,
    ModelOptions,
    SAGEConv,
    SampledBlock,
    build_model,
    fingerprint,
    read_call,
)
from sar.train.checkpoint import load_model

NODES, WIDTH = 60, 6
LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "sage": SAGEConv,
    "gcn": GraphConv,
    "gin": lambda a, b: GINConv(nn.Linear(a, b)),
    "gat": lambda a, b: GATConv(a, b, 3),
}


def summed(rows: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    return rows.new_zeros(num_dst, *rows.shape[1:]).index_add(0, dst, rows)


def reference(layer: Any, x: Tensor, src: Tensor, dst: Tensor, num_dst: int) -> Tensor:
    """What a layer says of itself, edge by edge."""
    own, ones = x[:num_dst], torch.ones(len(src), dtype=x.dtype)
    degrees = summed(ones, dst, num_dst).clamp(min=1)
    if isinstance(layer, SAGEConv):
        mean = summed(x[src], dst, num_dst) / degrees[:, None]
        return own @ layer.own.t() + layer.bias + mean @ layer.neigh.t()
    if isinstance(layer, GraphConv):
        out = summed(ones, src, len(x)).clamp(min=1)
        rows = x[src] / (out[src] * degrees[dst]).sqrt()[:, None]
        return summed(rows, dst, num_dst) @ layer.weight + layer.bias
    if isinstance(layer, GINConv):
        return layer.apply_func((1 + layer.eps) * own + summed(x[src], dst, num_dst))
    value = (x @ layer.weight.t()).view(len(x), layer.num_heads, -1)
    scores = (value * layer.attn_src).sum(-1)[src]
    scores = F.leaky_relu(scores + (value[:num_dst] * layer.attn_dst).sum(-1)[dst], layer.slope)
    parts = scores.exp()
    parts = parts / summed(parts, dst, num_dst)[dst]
    sums = summed(value[src] * parts[..., None], dst, num_dst)
    return sums + layer.bias.view(1, layer.num_heads, -1)


def with_gradients(
    layer: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Result, and gradients of the rows and of the parameters."""
    x = x.clone().requires_grad_()
    z = run(x)
    (z * torch.sin(z.detach() * 3)).sum().backward()
    return z.detach(), x.grad, [one.grad for one in layer.parameters()]  # type: ignore[return-value]


@pytest.fixture(scope="module", params=[1, 2, 3])
def parts(request: pytest.FixtureRequest, partitioned: Cutter) -> Any:
    arrays = community(NODES, 300, 3, features=WIDTH)
    path = partitioned(arrays, request.param, torch.arange(NODES) % request.param)
    return SimpleNamespace(size=request.param, path=path, ends=arrays.edges[ETYPE_HOMO])


@pytest.mark.parametrize("plain", [[], [0], [0, 1, 2]], ids=["fused", "mixed", "plain"])
@pytest.mark.parametrize("out", [4, 9])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_what_they_say(name: str, out: int, plain: list[int], parts: Any) -> None:
    """Result and all gradients in float64; under autocast, which changes none, by plain code."""
    if plain == [0] and parts.size == 1:
        pytest.skip("one rank, which is the one of plain code")
    x = torch.rand(NODES, WIDTH, dtype=torch.float64)

    def rank(group: Group) -> Any:
        data = sar.load_partition_data(parts.path)
        graph = sar.construct_full_graph(data)
        ids = data.node_features["_N/orig_id"].long()
        layer = made(name, out)
        autocast = group.rank in plain
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            z, dx, grads = with_gradients(layer, x[ids], lambda rows: layer(graph, rows))
        return ids, z, dx, grads

    found = ThreadGroup.run(parts.size, rank)
    layer = made(name, out)
    want = with_gradients(layer, x, lambda rows: reference(layer, rows, *parts.ends, NODES))
    for ids, z, dx, _ in found:
        torch.testing.assert_close(z, want[0][ids])
        torch.testing.assert_close(dx, want[1][ids])
    for i, grad in enumerate(want[2]):
        torch.testing.assert_close(sum(one[3][i] for one in found), grad)


def made(name: str, out: int) -> nn.Module:
    layer = LAYERS[name](WIDTH, out).double()
    generator = torch.Generator().manual_seed(1)  # ranks are threads, which share torch's own
    with torch.no_grad():
        for one in layer.parameters():
            one.copy_(torch.randn(one.shape, generator=generator, dtype=one.dtype))
    return layer


@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_sampled_blocks(name: str) -> None:
    src = torch.tensor([0, 3, 3, 4, 1])
    dst = torch.tensor([0, 0, 1, 1, 2])
    block = SampledBlock({ETYPE_HOMO: (src, dst)}, {"_N": 5}, {"_N": 3}, LocalGroup())
    layer, x = made(name, 4), torch.rand(5, WIDTH, dtype=torch.float64)
    found = with_gradients(layer, x, lambda rows: layer(block, rows))
    layer.zero_grad()
    want = with_gradients(layer, x, lambda rows: reference(layer, rows, src, dst, 3))
    torch.testing.assert_close(found[:2], want[:2])
    torch.testing.assert_close(block.aggregate(x, "max")[1], x[3:].amax(0))
    weight = torch.rand(5, dtype=torch.float64)
    sums = block.aggregate(x, edge_weight=weight)
    torch.testing.assert_close(sums, summed(x[src] * weight[:, None], dst, 3))
    with pytest.raises(ValueError, match="op: got 'median', expected one of sum, mean, max, min"):
        block.aggregate(x, "median")
    for op in ("sum", "mean", "max"):
        with pytest.raises(ValueError, match="x: got 4 rows, expected 5, one per source row"):
            block.aggregate(x[:4], op)
    with pytest.raises(ValueError, match=r"edge_weight: got \(4,\), expected \[5\], one per edge"):
        block.aggregate(x, edge_weight=weight[:4])
    with pytest.raises(TypeError, match="x: got torch.int64, expected a floating point tensor"):
        block.aggregate(x.long())
    with pytest.raises(TypeError, match="torch.sparse_coo, expected a dense tensor"):
        block.aggregate(x.to_sparse())
    with pytest.raises(ValueError, match="x: got 4 rows, expected 5"):
        layer(block, x[:4])


@pytest.mark.parametrize("out", [4, 9])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_those_of_dgl(name: str, out: int) -> None:
    """The same numbers from the same seed, in the same order, and the same results."""
    dgl = pytest.importorskip("dgl")
    dglnn = pytest.importorskip("dgl.nn")
    theirs = {
        "sage": lambda a, b: dglnn.SAGEConv(a, b, "mean"),
        "gcn": dglnn.GraphConv,
        "gin": lambda a, b: dglnn.GINConv(nn.Linear(a, b)),
        "gat": lambda a, b: dglnn.GATConv(a, b, 3),
    }[name]
    torch.manual_seed(0)
    own = LAYERS[name](WIDTH, out)
    torch.manual_seed(0)
    other = theirs(WIDTH, out)
    for one, two in zip(own.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    src, dst = community(NODES, 300, 3, features=WIDTH).edges[ETYPE_HOMO]
    graph = dgl.add_self_loop(dgl.graph((src, dst), num_nodes=NODES))
    own, other, x = own.double(), other.double(), torch.rand(NODES, WIDTH, dtype=torch.float64)
    found = with_gradients(own, x, lambda rows: reference(own, rows, *graph.edges(), NODES))
    torch.testing.assert_close(found, with_gradients(other, x, lambda rows: other(graph, rows)))


# -- how a model is called ------------------------------------------------------------------------


class ByGraph(nn.Module):
    def forward(self, g: Any, h: Tensor, edge_weight: Tensor, scale: float = 1.0) -> Any: ...


class ByIndex(nn.Module):
    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Any = None) -> Any: ...


class ByDicts(nn.Module):
    def forward(self, x_dict: Any, edge_index_dict: Any) -> Any: ...


class ByRows(nn.Module):
    def forward(self, x: Tensor) -> Any: ...


@pytest.mark.parametrize(
    "kind, text, shown, front_end",
    [
        (ByGraph, None, "(graph, x, edge_weight)", None),
        (ByIndex, None, "(x, edge_index)", "pyg"),
        (ByDicts, None, "(x_dict, edge_index_dict)", "pyg"),
        (ByIndex, "x, edge_index, edge_weight=w", "(x, edge_index, edge_weight=w)", "pyg"),
        (ByRows, "(graph,x)", "(graph, x)", None),
    ],
)
def test_how_a_model_is_called(
    kind: type[nn.Module], text: str | None, shown: str, front_end: str | None
) -> None:
    call = read_call(kind(), text)
    assert str(call) == shown and read_call(kind, text) == call
    assert call.front_end == (front_end or ("dgl" if registry.is_installed("dgl") else "sar"))
    assert read_call(kind, text, "sar").front_end == "sar"


def test_calls_that_cannot_be_told() -> None:
    with pytest.raises(ValueError, match=r"ByRows.forward takes \(x\), expected \(graph, x\) or"):
        read_call(ByRows)
    for text in ("x", "graph,,x", "x,edge_index,=w"):
        with pytest.raises(ValueError, match=f"call: got {text!r}, expected graph or edge_index"):
            read_call(ByRows, text)
    with pytest.raises(ValueError, match="front end: got 'dlg', expected one of .*did you mean"):
        Call(("graph", "x", "w"), (), "dlg").arguments(None, None)
    with pytest.raises(ValueError, match="call: got graph,x, expected none for 'sage'"):
        ModelOptions(call="graph,x")


# -- a model of one's own, on the command line ----------------------------------------------------

SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.lin, self.num_blocks = torch.nn.Linear(in_feats, out_feats), 1

    def forward(self, graph, x, weight):
        if isinstance(graph, list):
            (graph,), (weight,) = graph, weight
        rows = graph.aggregate(x, edge_weight=weight.view(-1))
        return self.lin(rows + x[: graph.num_dst_nodes()])

class ByIndex(torch.nn.Module):
    def __init__(self, in_feats, out_feats):
        super().__init__()
        self.lin = torch.nn.Linear(in_feats, out_feats)

    def forward(self, x, edge_index):
        return self.lin(x)
"""


@pytest.fixture
def weighted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, GraphArrays]:
    """Two parts of a graph with a column of edges, in a folder with a model that takes it."""
    (tmp_path / "weighing.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    arrays = community(NODES, 300, 3, features=WIDTH)
    arrays.edge_data[ETYPE_HOMO] = {"weight": torch.rand(len(arrays.edges[ETYPE_HOMO][0]))}
    return Cutter(tmp_path)(arrays, 2), arrays


def trained(path: str, *words: str) -> Any:
    words = ("--epochs", "1", "--no-progress", "--front-end", "sar", *words)

    def rank(group: Group) -> Any:
        trainer = trainer_of(group, path, "--model", "weighing:Net", *words)
        start = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        return start, [record["loss"] for record in trainer.fit()], str(trainer.call)

    return ThreadGroup.run(2, rank)[0]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_column_of_edges(weighted: tuple[str, GraphArrays], sampled: bool) -> None:
    """By the signature; mini-batches of all neighbors give the same first loss."""
    path, arrays = weighted
    words = ["--sampled", "--fanouts", "-1", "--batch-size", "500"] if sampled else []
    start, losses, call = trained(path, *words)
    assert call == "(graph, x, weight)"
    data, (src, dst) = arrays.node_data["_N"], arrays.edges[ETYPE_HOMO]
    weight = arrays.edge_data[ETYPE_HOMO]["weight"]
    rows = data["feat"] + summed(data["feat"][src] * weight[:, None], dst, NODES)
    logits = rows @ start["lin.weight"].t() + start["lin.bias"]
    mask = data["train_mask"].bool()
    want = F.cross_entropy(logits[mask], data["label"][mask].long())
    assert losses == pytest.approx([float(want)], rel=1e-5)


def test_calls_that_the_graph_has_nothing_for(weighted: tuple[str, GraphArrays]) -> None:
    with pytest.raises(ValueError, match="call: got 'size', expected a column of .*: weight"):
        trained(weighted[0], "--call", "graph,x,size")


def test_a_checkpoint_with_the_names_of_before(tmp_path: Path) -> None:
    """Names have changed, the order has not; another model's tensors are refused."""
    model = build_model(ModelOptions("sage", 2, 4), 3, 2)
    state = {f"old.{i}": one * 0 + i for i, one in enumerate(model.state_dict().values())}
    content = {"config": {"model": "sage"}, "model": state, "epoch": 3}
    assert load_model(model, content) == 3
    assert all(bool((one == i).all()) for i, one in enumerate(model.state_dict().values()))
    for config in ({"model": "mine:Net"}, {}):
        with pytest.raises(ValueError, match="the checkpoint is of another model"):
            load_model(model, content | {"config": config})


def test_a_class_of_ones_own_is_computed_by_its_adapter(partitioned: Cutter) -> None:
    class Doubled(nn.Module):
        def forward(self, graph: Any, x: Tensor) -> Tensor:
            return 2 * graph.aggregate(x, "sum")

    def bind(layer: Any, graph: Any, inputs: Any) -> Any:
        if not inputs["x"].requires_grad:
            return "rows ask for no gradient"
        return lambda: 2 * graph.aggregate(inputs["x"], "sum") + 0.5

    code = {"forward": (fingerprint(Doubled.forward),)}
    own.add(Doubled, Adapter(bind, code))
    with pytest.raises(ValueError, match="Doubled, which has an adapter"):
        own.add(Doubled, Adapter(bind, code))
    path = partitioned(community(NODES, 300), 2, "random")

    def case(group: Group) -> None:
        graph = sar.construct_full_graph(sar.load_partition_data(path, group.rank))
        x = torch.rand(graph.num_nodes(), WIDTH)
        layer = sar.optimize(Doubled())
        fused, plain = layer(graph, x.clone().requires_grad_()), layer(graph, x)
        assert torch.equal(fused, plain + 0.5)
        with pytest.raises(sar.NotSupportedError, match="rows ask for no gradient"):
            sar.optimize(layer, strict=True)(graph, x)

    ThreadGroup.run(2, case)


def test_a_model_gets_the_graph_of_its_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def arguments(names: Any, graph: Any, features: Any) -> list[Any]:
        return [{"graph": ("seen as theirs", graph), "x": features}[name] for name in names]

    theirs = SimpleNamespace(BLOCKS=None, LAYERS=own, arguments=arguments)
    monkeypatch.setitem(registry._ENTRIES, "theirs", (theirs, None))
    x = torch.rand(3)
    got = Call(front_end="theirs")(lambda *given: given, "graph", x)  # type: ignore[arg-type]
    assert got[0] == ("seen as theirs", "graph") and got[1] is x
