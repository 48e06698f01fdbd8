"""Edge features that ask for a gradient, edge softmax in all its forms, and reversed graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import models, run_threads
from harness.compare import assert_gradients_close
from harness.graphs import ETYPE_HOMO, GraphArrays, mixed, sample, to_dgl
from harness.parts import Cutter
from torch import Tensor, nn

import sar

Run = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (graph, x, weight, edge types) -> rows
WIDTH = 6
LAYERS = [
    "GraphConv-both-weighted", "SAGEConv-mean-weighted", "RelGraphConv-bdd", "GATConv-weighted",
    "EdgeGATConv", "EdgeGATConv-sides", "EGATConv", "EGATConv-sides",
    "EGNNConv", "GINEConv", "NNConv", "CFConv", "GMMConv", "EdgeWeightNorm-both",
    "EdgeWeightNorm-right",
]  # fmt: skip


def of_layer(name: str) -> tuple[Run, nn.Module]:
    layer = models.layers()[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = layer.build(models.HIDDEN if layer.project else WIDTH, models.HIDDEN).double()

    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        if layer.project:
            x = torch.cat([x, x[:, :1]], dim=1)
        return layer.call(module, graph, x, {"weight": weight, "type": kind}, x)

    return run, module


def by_global_id(rows: Tensor) -> Tensor:
    """A smooth loss that weights every element differently."""
    rows = rows.reshape(len(rows), -1)
    return torch.sin(rows + torch.arange(rows.shape[1])).sum(1)


def reference(arrays: GraphArrays, run: Run, module: nn.Module | None) -> dict[str, Tensor]:
    graph = to_dgl(arrays)
    return gradients(
        run, module, graph, graph.ndata["feat"], graph.edata["weight"], graph.edata["type"]
    )


def gradients(
    run: Run, module: nn.Module | None, graph: Any, feat: Tensor, weight: Tensor, kind: Tensor
) -> dict[str, Tensor]:
    x, w = feat.double().requires_grad_(), weight.double().requires_grad_()
    if module is not None:
        module.zero_grad()
    rows = run(graph, x, w, kind)
    by_global_id(rows).sum().backward()
    found = {"rows": rows.detach(), "x": x.grad, "w": w.grad}
    if module is not None:
        found |= {
            name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
        }
    return {key: value for key, value in found.items() if value is not None}


def on_ranks(
    path: str, size: int, run: Callable[[], tuple[Run, nn.Module | None]], **policy: Any
) -> dict[str, Tensor]:
    """Rows, gradients of nodes and edges in original order, and summed parameter gradients."""

    def case(group: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(**policy))
        nodes, edges = data.node_features, data.edge_features
        prefix = next(iter(edges)).rsplit("/", 1)[0]
        found = gradients(
            *runs[group.rank],
            graph,
            nodes["_N/feat"],
            edges[f"{prefix}/weight"],
            edges[f"{prefix}/type"],
        )
        return found, nodes["_N/orig_id"], edges[f"{prefix}/orig_eid"]

    runs = [run() for _ in range(size)]
    ranks = run_threads(size, case)
    joined = {}
    for key in ranks[0][0]:
        if key in ("rows", "x", "w"):
            ids = torch.cat([rank[2 if key == "w" else 1] for rank in ranks])
            values = torch.cat([rank[0][key] for rank in ranks])
            joined[key] = torch.empty_like(values).index_copy_(0, ids, values)
        else:
            joined[key] = sum(rank[0][key] for rank in ranks)
    return joined


def assert_exact(
    arrays: GraphArrays,
    make: Callable[[], tuple[Run, nn.Module | None]],
    partitioned: Cutter,
    sizes: tuple[int, ...] = (1, 3),
    **policy: Any,
) -> None:
    want = reference(arrays, *make())
    for size in sizes:
        got = on_ranks(partitioned(arrays, size, "random"), size, make, **policy)
        assert_gradients_close(got, want, torch.float64, f"{size} ranks:")


@pytest.mark.parametrize("name", LAYERS)
def test_edge_inputs_get_their_gradient(name: str, partitioned: Cutter) -> None:
    arrays = sample(models.sample_graph(name))
    assert_exact(arrays, lambda: of_layer(name), partitioned, block_bytes=2048)


def in_sequence(nodes: Any) -> dict[str, Tensor]:
    return {"out": nodes.mailbox["m"].cumsum(1).sin().sum(1) * nodes.data["third"]}


@pytest.mark.filterwarnings("ignore:reduce function")
@pytest.mark.parametrize("reduce", [fn.sum("m", "out"), in_sequence], ids=["blocks", "mailbox"])
@pytest.mark.parametrize("size", [1, 3])
def test_rows_of_two_types_and_of_columns_first_get_gradients(
    size: int, reduce: Any, partitioned: Cutter
) -> None:
    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        graph.srcdata["first"], graph.srcdata["second"] = x.float(), x[:, :1]
        graph.dstdata["third"] = x.t().contiguous().t()

        def message(edges: Any) -> dict[str, Tensor]:
            product = edges.src["first"].double() * edges.src["second"]
            return {"m": torch.tanh(product) * edges.dst["third"]}

        graph.update_all(message, reduce)
        return graph.dstdata["out"]

    want = reference(mixed(), run, None)
    path = partitioned(mixed(), size, "random")
    got = on_ranks(path, size, lambda: (run, None), block_bytes=2048)
    for name, bound in (("rows", 1e-12), ("x", 1e-6)):  # float32's gradient is added up in float32
        apart = (got[name] - want[name]).abs().max() / want[name].abs().max()
        assert apart < bound, f"{name}: {apart:.1e}"


def rows_times_weight(op: Any) -> Run:
    """A sum or mean of rows of two axes, each times the number of its edge."""

    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        graph.srcdata["x"], graph.edata["w"] = x.view(len(x), 2, -1), weight.view(-1, 1, 1)
        graph.update_all(fn.e_mul_u("w", "x", "m"), op("m", "out"))
        return graph.dstdata["out"]

    return run


@pytest.mark.parametrize("op", [fn.sum, fn.mean], ids=["sum", "mean"])
@pytest.mark.parametrize("policy", [{}, {"rounds": 1}, {"rematerialize": False}], ids=str)
def test_weights_of_whole_rows_learn_by_a_kernel(
    op: Any, policy: dict, partitioned: Cutter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sar.tracing.reducing.run_messages", None)  # not block by block
    assert_exact(mixed(), lambda: (rows_times_weight(op), None), partitioned, (1, 3, 4), **policy)


# Softmax.


def normalized(norm_by: str) -> Run:
    """Attention whose logits depend on both ends and the edge; some are far below the others."""

    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        graph.srcdata["x"], graph.dstdata["y"], graph.edata["w"] = x, x * x, weight * 40 - 20
        graph.apply_edges(fn.u_mul_v("x", "y", "z"))
        graph.apply_edges(fn.e_add_u("w", "x", "s"))
        z = graph.edata["z"] * 3 + graph.edata["w"].unsqueeze(1) - graph.edata["s"]
        graph.edata["a"] = edge_softmax(graph, z, norm_by=norm_by)
        graph.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
        return graph.dstdata["out"]

    return run


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("rounds", [1, 2, None])
def test_softmax_over_the_edges_of_a_node(
    norm_by: str, rounds: int | None, partitioned: Cutter
) -> None:
    def make() -> tuple[Run, None]:
        return normalized(norm_by), None

    assert_exact(sample("mixed"), make, partitioned, (1, 2, 4), rounds=rounds, block_bytes=2048)


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_softmax_among_some_edges(norm_by: str, partitioned: Cutter) -> None:
    """The chosen edges are those of type 1, wherever they are."""

    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        chosen = (kind == 1).nonzero().view(-1)
        a = edge_softmax(graph, weight[chosen].unsqueeze(1) * 9, chosen, norm_by=norm_by)
        graph.edata["a"] = torch.zeros(len(weight), 1).double().index_copy(0, chosen, a)
        graph.srcdata["x"] = x
        graph.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
        return graph.dstdata["out"]

    assert_exact(sample("mixed"), lambda: (run, None), partitioned)


def test_a_wrong_softmax_is_refused(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        with pytest.raises(ValueError, match="norm_by: got 'row', expected 'dst' or 'src'"):
            edge_softmax(graph, torch.zeros(graph.num_edges(), 1), norm_by="row")
        with pytest.raises(ValueError, match="logits: got 3 rows, expected 2"):
            edge_softmax(graph, torch.zeros(3, 1), torch.tensor([0, 1]))

    path = partitioned(sample("mixed"), 2, "random")
    run_threads(2, case)


# Reversed graphs.

REVERSED: dict[str, Run] = {}


def reversed_run(run: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    REVERSED[run.__name__] = lambda graph, x, weight, kind: run(dgl.reverse(graph), x, weight)


@reversed_run
def copied(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    graph.srcdata["x"] = x
    graph.update_all(fn.copy_u("x", "m"), fn.mean("m", "out"))
    return graph.dstdata["out"]


@reversed_run
def attending(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    graph.srcdata["x"], graph.dstdata["y"] = x, x * x
    graph.apply_edges(fn.u_sub_v("x", "y", "z"))
    graph.edata["a"] = edge_softmax(graph, graph.edata["z"] + weight.unsqueeze(1))
    graph.update_all(fn.u_mul_e("x", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


@reversed_run
def by_function(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    graph.srcdata["x"], graph.dstdata["y"], graph.edata["w"] = x, x * x, weight
    graph.update_all(
        lambda e: {"m": torch.tanh(e.src["x"] - e.dst["y"]) * e.data["w"].unsqueeze(1)},
        fn.sum("m", "out"),
    )
    return graph.dstdata["out"]


@reversed_run
def largest(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    graph.srcdata["x"] = x
    graph.update_all(fn.copy_u("x", "m"), fn.max("m", "out"))
    return graph.dstdata["out"]


@reversed_run
def twice(graph: Any, x: Tensor, weight: Tensor) -> Tensor:
    """Edge values of one direction are used in the other."""
    graph.srcdata["x"] = x
    graph.dstdata["y"] = x * x
    graph.apply_edges(fn.u_sub_v("x", "y", "z"))
    back = dgl.reverse(graph)
    back.edata["m"] = graph.edata["z"] * weight.unsqueeze(1)
    back.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
    return back.dstdata["out"] + graph.in_degrees().unsqueeze(1) * x


@pytest.mark.parametrize("name", REVERSED)
def test_reversed_graphs(name: str, partitioned: Cutter) -> None:
    arrays = sample("mixed")
    assert_exact(arrays, lambda: (REVERSED[name], None), partitioned, (1, 2, 4), block_bytes=2048)


def test_ties_and_infinities_of_a_reversed_maximum(partitioned: Cutter) -> None:
    """The gradient of equal messages goes to the edge of smallest original id, whatever the cut."""
    arrays = sample("mixed")
    src, dst = (torch.as_tensor(end) for end in arrays.edges[ETYPE_HOMO])

    def case(group: Any, path: str) -> tuple[Tensor, Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        ids = data.node_features["_N/orig_id"]
        graph = sar.construct_full_graph(data).reverse()
        graph.ndata["x"] = x = torch.ones(len(ids), 1)
        x[ids == dst[0]] = math.inf
        x[ids == dst[1]] = -math.inf
        x.requires_grad_()
        graph.update_all(fn.copy_u("x", "m"), fn.max("m", "out"))
        out = graph.ndata["out"]
        out.sum().backward()
        return ids, out.detach().view(-1), x.grad.view(-1)

    value = torch.ones(len(arrays.node_data["_N"]["label"]))
    value[dst[0]], value[dst[1]] = math.inf, -math.inf
    want, grad = torch.zeros_like(value), torch.zeros_like(value)
    for node in src.unique():
        ends = dst[src == node]
        winner = ends[value[ends].argmax()]  # the first of equal ones
        want[node] = value[winner]
        grad[winner] += 1
    for size in (1, 4):
        for ids, out, dx in run_threads(size, case, partitioned(arrays, size, "random")):
            assert torch.equal(out, want[ids]) and torch.equal(dx, grad[ids])


def test_a_reversed_graph_has_dgl_s_columns(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.ndata["x"] = torch.ones(graph.num_nodes())
        graph.edata["w"] = torch.ones(graph.num_edges())
        back = dgl.reverse(graph)
        assert "x" in back.ndata and "w" not in back.edata
        assert "w" in dgl.reverse(graph, copy_ndata=False, copy_edata=True).edata
        assert "x" not in dgl.reverse(graph, copy_ndata=False).ndata
        back.ndata["y"] = back.ndata["x"]
        assert "y" not in graph.ndata
        assert torch.equal(back.in_degrees(), graph.out_degrees())
        with pytest.raises(ValueError, match="add_self_loop: got a reversed graph"):
            back.add_self_loop()

    path = partitioned(sample("mixed"), 2, "random")
    run_threads(2, case)


def test_label_propagation(partitioned: Cutter) -> None:
    arrays = sample("mixed")
    whole = to_dgl(arrays)
    mask = whole.ndata["train_mask"].bool()
    hot = torch.nn.functional.one_hot(whole.ndata["label"])
    layers = [
        dgl.nn.LabelPropagation(3, 0.7),
        dgl.nn.LabelPropagation(2, 0.4, "row", clamp=False, normalize=True, reset=True),
    ]

    def case(group: Any, path: str) -> tuple[list[Tensor], Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        nodes, graph = data.node_features, sar.construct_full_graph(data)
        ids = nodes["_N/orig_id"]
        return [layer(graph, hot[ids], nodes["_N/train_mask"].bool()) for layer in layers], ids

    wanted = [layer(whole, hot, mask) for layer in layers]
    for size in (1, 3):
        for rows, ids in run_threads(size, case, partitioned(arrays, size, "random")):
            for got, want in zip(rows, wanted, strict=True):
                torch.testing.assert_close(got, want[ids], rtol=1e-5, atol=1e-6)


SHORT = [name for name in LAYERS if not name.startswith("EdgeWeightNorm")] + ["EdgeWeightNorm-both"]


@pytest.mark.parametrize("name", SHORT)
def test_edge_rows_of_a_wrong_length_are_refused_on_every_rank(
    name: str, partitioned: Cutter
) -> None:
    """With the argument, what came, and what was expected."""
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> str:
        data = sar.load_partition_data(path)
        graph = sar.construct_full_graph(data)
        run, module = of_layer(name)
        x = data.node_features["_N/feat"].double()
        prefix = next(iter(data.edge_features)).rsplit("/", 1)[0]
        weight, kind = (data.edge_features[f"{prefix}/{name}"] for name in ("weight", "type"))
        keep = graph.num_edges() - group.rank
        with pytest.raises(ValueError) as caught:
            run(graph, x, weight[:keep].double(), kind[:keep])
        told = f"got shape ({graph.num_edges() - 1}", f"expected {graph.num_edges()} rows"
        assert group.rank == 0 or all(part in str(caught.value) for part in told)
        return str(caught.value)

    first, second = run_threads(2, case)
    assert first == second and first.startswith(f"rank 1: {name.partition('-')[0]}: ")


def test_rows_with_axes_turned_get_gradients(partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor, weight: Tensor, kind: Tensor) -> Tensor:
        graph.dstdata["v"] = x.view(-1, 2, 3).transpose(1, 2)
        graph.update_all(lambda edges: {"m": edges.dst["v"].sin()}, fn.sum("m", "out"))
        return graph.dstdata["out"]

    assert_exact(mixed(), lambda: (run, None), partitioned, block_bytes=2048)
