"""Lazy edge tensors: what they record, what they refuse, and that nothing edge-sized is made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import mixed, to_dgl
from harness.parts import Cutter
from harness.watch import Largest, dense_graph
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.graph.lazy import EdgeTensor

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda e: (2 * e - 1) / (e.abs() + 1) ** 2,
    "activation": lambda e: F.leaky_relu(e, 0.1) + torch.tanh(e).sigmoid(),
    "sum over features": lambda e: e.sum(-1, keepdim=True) * e,
    "view": lambda e: e.view(-1, 2, 3).mean(1).repeat(1, 2),
    "view with the count": lambda e: e.view(len(e), 2, 3).flatten(1),
    "cat": lambda e: torch.cat([e, e.exp()], dim=-1),
    "chunk": lambda e: e.chunk(2, dim=1)[0] * e.chunk(2, dim=1)[1],
    "softmax over features": lambda e: e.softmax(-1),
    "in place": lambda e: (e * 1).add_(1).mul_(e),
    "slice": lambda e: e[:, 1:3],
    "matmul": lambda e: e @ torch.arange(12.0, dtype=e.dtype).view(6, 2),
    "where": lambda e: torch.where(e > 0, e, torch.zeros_like(e)),
}


def of_edges(graph: Any, x: Tensor) -> Tensor:
    """An edge column computed from both ends; lazy on a sharded graph."""
    graph.srcdata["x"], graph.dstdata["y"] = x, x * x
    graph.apply_edges(fn.u_sub_v("x", "y", "e"))
    return graph.edata["e"]


def reduced(graph: Any, values: Tensor) -> Tensor:
    graph.edata["m"] = values
    graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


def on_ranks(path: str, size: int, run: Callable[[Any, Tensor], Any], **policy: Any) -> list:
    def case(group: Any) -> Any:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(**policy))
        x = data.node_features["_N/feat"].double()[:, :6].requires_grad_()
        out = run(graph, x)
        (out * out).sum().backward()
        return out.detach(), x.grad, data.node_features["_N/orig_id"]

    return run_threads(size, case)


def reference(run: Callable[[Any, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    graph = to_dgl(mixed())
    x = graph.ndata["feat"].double()[:, :6].requires_grad_()
    out = run(graph, x)
    (out * out).sum().backward()
    return out.detach(), x.grad


def assert_same(ranks: list, want: tuple[Tensor, Tensor]) -> None:
    for out, grad, ids in ranks:
        torch.testing.assert_close(out, want[0][ids], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(grad, want[1][ids], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_functions_are_recorded(name: str, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        values = PROGRAMS[name](of_edges(graph, x))
        if not isinstance(graph, dgl.DGLGraph):
            assert isinstance(values, EdgeTensor), "the program became eager"
        return reduced(graph, values)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks = on_ranks(partitioned(mixed(), 3, "random"), 3, run, block_bytes=4096)
    assert_same(ranks, reference(run))


@pytest.mark.parametrize("name", ["cumsum", "median", "sort"])
def test_what_mixes_edges_becomes_eager_with_a_warning(name: str, partitioned: Cutter) -> None:
    functions = {
        "cumsum": lambda e: e.cumsum(0),
        "median": lambda e: e.median(),
        "sort": lambda e: e.sort(0)[0],
    }

    def case(group: Any) -> bool:
        data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
        graph = sar.construct_full_graph(data)
        e = of_edges(graph, data.node_features["_N/feat"].double())
        with pytest.warns(UserWarning, match="held in memory"):
            got = functions[name](e)
        torch.testing.assert_close(got, functions[name](e.materialize()))
        return isinstance(got, EdgeTensor)

    assert run_threads(1, case) == [False]


def test_writing_into_an_edge_tensor(partitioned: Cutter) -> None:
    """Rows that are written are there for later functions, too."""

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(partitioned(mixed(), 1, "random"), 0, "cpu")
        graph = sar.construct_full_graph(data)
        e = of_edges(graph, data.node_features["_N/feat"].double())
        want = e.materialize().clone()
        want[3] = 7
        with pytest.warns(UserWarning, match="held in memory"):
            e[3] = 7
        torch.testing.assert_close((e * 2).materialize(), want * 2)
        torch.testing.assert_close(reduced(graph, e), reduced(graph, want))

    run_threads(1, case)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_a_result_may_be_changed_in_place(reduce: str, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        graph.srcdata["x"], graph.dstdata["y"] = x, x * x
        graph.update_all(fn.u_mul_v("x", "y", "m"), getattr(fn, reduce)("m", "out"))
        out = graph.dstdata["out"]
        out += 1
        return F.leaky_relu(out, 0.1, inplace=True)

    assert_same(on_ranks(partitioned(mixed(), 2, "random"), 2, run), reference(run))


def test_an_edge_tensor_reads_like_a_tensor(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(partitioned(mixed(), 2, "random"), group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        x = data.node_features["_N/feat"].double()
        e = of_edges(graph, x)
        assert e.shape == (graph.num_edges(), x.shape[1]) and len(e) == graph.num_edges()
        assert e.dtype == torch.float64 and e.dim() == 2 and e.size(-1) == x.shape[1]
        eager = e.materialize()
        assert type(eager) is Tensor and eager is e.materialize()

    run_threads(2, case)


def test_shapes_that_do_not_broadcast_name_both_columns(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(partitioned(mixed(), 2, "random"), group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.srcdata["x"] = torch.ones(graph.num_nodes(), 3)
        graph.dstdata["y"] = torch.ones(graph.num_nodes(), 4)
        with pytest.raises(ValueError, match=r"u\.x \(3,\) and v\.y \(4,\)"):
            graph.apply_edges(fn.u_add_v("x", "y", "e"))

    run_threads(2, case)


def attend(graph: Any, x: Tensor, layer: nn.Module, drop: float = 0.0) -> Tensor:
    graph.srcdata["k"], graph.dstdata["q"] = layer(x), x
    graph.apply_edges(fn.u_dot_v("k", "q", "z"))
    weights = F.dropout(edge_softmax(graph, graph.edata["z"]), drop)
    graph.edata["a"] = weights
    graph.update_all(fn.u_mul_e("k", "a", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


@pytest.mark.parametrize("policy", [{"rounds": 1}, {"rounds": 2}, {"block_bytes": 4096}, {}])
def test_dropout_does_not_depend_on_rounds_and_blocks(
    policy: dict[str, int], partitioned: Cutter
) -> None:
    """The mask is replayed in backward, and is a function of the edge."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 6).double()
    path = partitioned(mixed(), 1, "random")

    def case(group: Any, **options: Any) -> tuple[Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, 0, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(**options))
        x = data.node_features["_N/feat"].double()[:, :6].requires_grad_()
        torch.manual_seed(7)
        out = attend(graph, x, layer, 0.5)
        out.square().sum().backward()
        return out.detach(), x.grad

    got, want = run_threads(1, lambda g: case(g, **policy)), run_threads(1, case)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_dropout_keeps_the_share_it_should() -> None:
    from sar.ops.keyed import keyed_dropout, keyed_uniform

    position = torch.arange(20_000, dtype=torch.int32)
    u = keyed_uniform(position, 4, seed=3)
    assert 0 <= float(u.min()) and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.005
    assert float(torch.corrcoef(u.T).fill_diagonal_(0).abs().max()) < 0.03
    kept = keyed_dropout(torch.ones(20_000, 4), position, 5, 0.3)
    assert abs(float((kept > 0).double().mean()) - 0.7) < 0.01
    assert abs(float(kept.mean()) - 1) < 0.02
    some = torch.tensor([17, 3, 900])
    assert torch.equal(keyed_dropout(torch.ones(3, 4), some, 5, 0.3), kept[some])


@pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv", "DotGatConv", "AGNNConv"])
def test_attention_makes_nothing_edge_sized(kind: str, tmp_path: Path) -> None:
    """60 edges a node: a tensor of all edges times heads would be larger than any of the nodes'."""
    nodes, edges, heads, width = 400, 24_000, 4, 8
    layers = {
        "GATConv": lambda: dgl.nn.GATConv(6, width, heads),
        "GATv2Conv": lambda: dgl.nn.GATv2Conv(6, width, heads),
        "DotGatConv": lambda: dgl.nn.DotGatConv(6, width, heads),
        "AGNNConv": lambda: dgl.nn.AGNNConv(),
    }
    layer, saved = layers[kind](), []
    graph = dense_graph(nodes, edges, tmp_path)
    x = torch.randn(nodes, 6, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(graph, x).square().sum().backward()
    assert max(saved) <= nodes * heads * width
    assert largest.elements <= edges  # the structure's own arrays are built in the first pass
