"""Lazy edge tensors: what they record, what they refuse, and that nothing edge-sized is made."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
from dgl.nn.functional import edge_softmax
from harness import run_threads
from harness.graphs import looped, mixed, to_dgl
from harness.parts import Cutter
from harness.rows import Part, compare
from harness.watch import Largest, dense_graph
from torch import Tensor, nn
from torch.nn import functional as F

import sar
from sar.tracing.lazy import EdgeTensor

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
    "transposed": lambda e: (e.T * 2).T + (e.view(-1, 2, 3).mT * 3).mT.flatten(1),
    "adjoint": lambda e: (e.H * 2).H.real,
    "named results": lambda e: e.sort(1).values + e.max(1, keepdim=True).values,
}


def of_edges(graph: Any, x: Tensor) -> Tensor:
    """An edge column computed from both ends; lazy on a sharded graph."""
    graph.srcdata["x"], graph.dstdata["y"] = x, x * x
    graph.apply_edges(fn.u_sub_v("x", "y", "e"))
    return graph.edata["e"]


def edge_tensor(group: Any, path: str) -> tuple[Any, Tensor]:
    """A rank's graph and such a column."""
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    return graph, of_edges(graph, data.node_features["_N/feat"].double())


def reduced(graph: Any, values: Tensor) -> Tensor:
    graph.edata["m"] = values
    graph.update_all(fn.copy_e("m", "m"), fn.sum("m", "out"))
    return graph.dstdata["out"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_torch_functions_are_recorded(name: str, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        values = PROGRAMS[name](of_edges(graph, x))
        if not isinstance(graph, dgl.DGLGraph):
            assert isinstance(values, EdgeTensor), "the program became eager"
        return reduced(graph, values)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(run, partitioned, 6, block_bytes=4096)


WRITES: dict[str, Callable[[Tensor, nn.Parameter], Any]] = {
    "column": lambda h, _: h.mul_(3),
    "parameter": lambda _, weight: weight.add_(1),
}


class Gate(nn.Module):
    """A message function that captures a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.factor = 1.0

    def message(self, edges: Any) -> dict[str, Tensor]:
        return {"e": edges.src["x"] * self.weight * self.factor}

    def forward(self, edges: Any) -> dict[str, Tensor]:
        return self.message(edges)


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("kernel", [False, True])
def test_what_was_written_since_is_refused(what: str, kernel: bool, partitioned: Cutter) -> None:
    """An edge tensor whose column or parameter has changed would have other values."""

    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, gate = sar.construct_full_graph(data), Gate()
        h = data.node_features["_N/feat"].double()[:, :6].clone()
        for early in (True, False):
            graph.srcdata["x"] = h
            graph.apply_edges(gate.message)
            values = graph.edata["e"]
            if kernel:
                graph.srcdata["v"] = torch.ones(len(h), 6, 1, dtype=torch.float64)
                graph.edata["a"] = edge_softmax(graph, values.unsqueeze(-1))
            if early:
                values.materialize()
            with torch.no_grad():
                WRITES[what](h, gate.weight)
            if early and not kernel:
                assert len(values.materialize()) == graph.num_edges()
                continue
            with pytest.raises(sar.NotSupportedError, match="was written in place after"):
                graph.update_all(
                    fn.u_mul_e("v", "a", "m") if kernel else fn.copy_e("e", "m"), fn.sum("m", "o")
                )

    path = partitioned(mixed(), 2, "random")
    run_threads(2, case)


@pytest.mark.parametrize("whole", [False, True])
def test_a_method_sees_its_object_as_it_was(whole: bool, partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        gate, kept = Gate(), []
        graph.ndata["x"] = x
        for gate.factor in (1.0, 2.0, 3.0):
            graph.apply_edges(gate if whole else gate.message)
            kept.append(graph.edata["e"])
        return reduced(graph, kept[0] - 3 * kept[1] + kept[2] * kept[1])

    compare(run, partitioned, 6)


def test_sums_with_softmax_weights_run_in_inference_mode(partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        values = of_edges(graph, x)
        return reduced(graph, edge_softmax(graph, values.sum(-1, keepdim=True)) * values)

    def case(group: Any) -> tuple[Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        x = data.node_features["_N/feat"].double()[:, :6]
        with torch.inference_mode():
            out = run(sar.construct_full_graph(data), x)
        return out.clone(), data.node_features["_N/orig_id"]

    path, want = partitioned(looped(), 2, "random"), to_dgl(looped())
    whole = run(want, want.ndata["feat"].double()[:, :6])
    for out, ids in run_threads(2, case):
        torch.testing.assert_close(out, whole[ids], rtol=1e-11, atol=1e-11)


def test_positions_of_edges_are_checked(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        graph = sar.construct_full_graph(sar.load_dgl_partition_data(path, group.rank, "cpu"))
        graph.ndata["x"] = torch.ones(graph.num_nodes(), 1)
        wrong = torch.ones(graph.num_edges(), dtype=torch.bool), [3.7], ([1], [0]), 3
        for edges in wrong:
            with pytest.raises(TypeError, match="edges: got .*, expected int positions"):
                graph.apply_edges(fn.copy_u("x", "e"), edges=edges)
        for edges in ([-1], [0, graph.num_edges()]):
            with pytest.raises(ValueError, match="edges: got positions"):
                graph.apply_edges(fn.copy_u("x", "e"), edges=edges)
        graph.apply_edges(fn.copy_u("x", "e"), edges=[])

    path = partitioned(mixed(), 2, "random")
    run_threads(2, case)


def test_the_mean_of_an_edge_tensor_has_its_gradient(partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        values = of_edges(graph, x)
        if isinstance(values, EdgeTensor):
            return sar.global_mean(values.exp())
        return values.exp().mean()

    def case(group: Any) -> Any:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        x = data.node_features["_N/feat"].double()[:, :6].requires_grad_()
        mean = run(sar.construct_full_graph(data), x)
        mean.backward()
        return mean.detach(), x.grad, data.node_features["_N/orig_id"]

    path, graph = partitioned(mixed(), 3, "random"), to_dgl(mixed())
    x = graph.ndata["feat"].double()[:, :6].requires_grad_()
    want = run(graph, x)
    want.backward()
    for mean, grad, ids in run_threads(3, case):
        torch.testing.assert_close(mean, want.detach(), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(grad, x.grad[ids], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["cumsum", "median", "sort"])
def test_what_mixes_edges_becomes_eager_with_a_warning(name: str, partitioned: Cutter) -> None:
    functions = {
        "cumsum": lambda e: e.cumsum(0),
        "median": lambda e: e.median(),
        "sort": lambda e: e.sort(0)[0],
    }

    def case(group: Any) -> bool:
        graph, e = edge_tensor(group, partitioned(mixed(), 1, "random"))
        with pytest.warns(UserWarning, match="held in memory"):
            got = functions[name](e)
        torch.testing.assert_close(got, functions[name](e.materialize()))
        return isinstance(got, EdgeTensor)

    assert run_threads(1, case) == [False]


def test_writing_into_an_edge_tensor(partitioned: Cutter) -> None:
    """Rows that are written are there for later functions, too."""

    def case(group: Any) -> None:
        graph, e = edge_tensor(group, partitioned(mixed(), 1, "random"))
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

    compare(run, partitioned, 6)


def test_shapes_that_do_not_broadcast_name_both_columns(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(partitioned(mixed(), 2, "random"), group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.srcdata["x"] = torch.ones(graph.num_nodes(), 3)
        graph.dstdata["y"] = torch.ones(graph.num_nodes(), 4)
        with pytest.raises(ValueError, match=r"u\.x \(3,\) and v\.y \(4,\)"):
            graph.apply_edges(fn.u_add_v("x", "y", "e"))

    run_threads(2, case)


class OfEdges(nn.Module):
    """A layer that gets the graph's edge feature."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.layer(graph, x, graph.edata["e"])


class Typed(nn.Module):
    """A layer that gets node and edge types."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        ntypes, etypes = torch.arange(len(x)) % 2, torch.arange(graph.num_edges()) % 3
        if isinstance(self.layer, dgl.nn.HGTConv):
            return self.layer(graph, x, ntypes, etypes)
        return self.layer(graph, x, etypes)


class OfUser(nn.Module):
    """Attention in a function of the user's own, with dropout on its weights."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(12, HEADS), nn.Linear(12, HEADS * out)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        def message(edges: Any) -> dict[str, Tensor]:
            ends = torch.cat([edges.src["x"], edges.dst["x"]], 1)
            return {"z": self.score(ends).tanh(), "v": self.value(ends).view(len(ends), HEADS, -1)}

        with graph.local_scope():
            graph.ndata["x"] = x
            graph.apply_edges(message)
            a = F.dropout(edge_softmax(graph, graph.edata["z"]), 0.2)
            return reduced(graph, graph.edata["v"] * a.unsqueeze(-1)).flatten(1)


HEADS = 4
LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "GATConv": lambda o: dgl.nn.GATConv(6, o, HEADS),
    "GATv2Conv": lambda o: dgl.nn.GATv2Conv(6, o, HEADS),
    "DotGatConv": lambda o: dgl.nn.DotGatConv(6, o, HEADS),
    "AGNNConv": lambda o: dgl.nn.AGNNConv(),
    "EdgeGATConv": lambda o: OfEdges(dgl.nn.EdgeGATConv(6, 3, o, HEADS)),
    "CFConv": lambda o: OfEdges(dgl.nn.CFConv(6, 3, 16, o)),
    "GINEConv": lambda o: OfEdges(dgl.nn.GINEConv(nn.Linear(3, o))),
    "HGTConv": lambda o: Typed(dgl.nn.HGTConv(6, o, HEADS, 2, 3)),
    "RelGraphConv": lambda o: Typed(dgl.nn.RelGraphConv(6, o * HEADS, 3, "basis", 2)),
    "user's": OfUser,
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_make_nothing_edge_sized(kind: str, tmp_path: Path) -> None:
    """60 edges a node: a tensor of all edges times heads would be larger than any of the nodes'.

    What is left are the feature itself, edge types, blocks, and the structure, built in the first
    pass.
    """
    nodes, edges, width = 400, 24_000, 8
    layer, saved = LAYERS[kind](width), []
    graph = dense_graph(nodes, edges, tmp_path)
    assert len(graph.scope().relation.keys) == edges  # part of the structure, where used
    graph.edata["e"] = feature = torch.randn(edges, 3)
    x = torch.randn(nodes, 3 if kind == "GINEConv" else 6, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() != feature.data_ptr() and tensor.is_floating_point():
            saved.append(tensor.numel())
        return tensor

    with Largest() as largest, warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(graph, x).square().sum().backward()
    reads_feature = isinstance(layer, OfEdges)
    block = graph.policy.block_bytes // 4  # what a block saves lives until its gradient is added
    assert max(saved) <= (
        edges * HEADS // 2 if reads_feature else max(block, nodes * HEADS * width)
    )
    packed = 2 * nodes * HEADS * width  # keys and values side by side
    at_most = feature.numel() if reads_feature else max(edges, packed)
    assert largest.elements <= at_most < edges * HEADS


# What leaves the tensors.

ESCAPES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda e: e[:, :1].item(),
    "tolist": lambda e: e.tolist(),
    "numpy": lambda e: e.numpy(),
    "asarray": lambda e: np.asarray(e),
    "iteration": lambda e: list(e),
    "if": lambda e: 1 if (e == 1) else 2,
    "in": lambda e: 1.5 in e,
    "float": lambda e: float(e),
    "deepcopy": lambda e: copy.deepcopy(e),
    "pickle": lambda e: pickle.dumps(e),
    "save": lambda e: torch.save({"e": e}, io.BytesIO()),
    "equal": lambda e: torch.equal(e, e),
    "allclose": lambda e: torch.allclose(e, e),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_values_do_not_leave_unless_they_exist(name: str, partitioned: Cutter) -> None:
    """Also on one rank alone, where a communication would wait for the others for ever."""

    def case(group: Any) -> None:
        graph, e = edge_tensor(group, path)
        if group.rank == 1:
            with pytest.raises(NotImplementedError, match="materialize") as caught:
                ESCAPES[name](e)
            assert f"({graph.num_edges()}, " in str(caught.value)
        values = e.materialize()
        assert e.tolist() == values.tolist() and torch.equal(e, values)
        assert np.array_equal(np.asarray(e), values.numpy())
        assert torch.equal(copy.deepcopy(e), values)

    path = partitioned(mixed(), 2, "random")
    run_threads(2, case)


def test_one_warning_an_operation_and_an_error_above_the_budget(partitioned: Cutter) -> None:
    def case(group: Any) -> list[str]:
        graph, e = edge_tensor(group, path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                e.cumsum(0)
                e.flip(0)
        size = graph.num_edges() * 6 * 8
        strict = graph.with_policy(sar.Policy(memory_budget=size // 2))
        e = of_edges(strict, graph.srcdata["x"])
        with pytest.raises(NotImplementedError, match=f"cumsum.*{size} bytes.*{size // 2}"):
            e.cumsum(0)
        return [str(warning.message) for warning in caught]

    path = partitioned(mixed(), 1, "random")
    (messages,) = run_threads(1, case)
    assert len(messages) == 2
    for message, name in zip(messages, ("cumsum", "flip"), strict=True):
        assert name in message and f"{to_dgl(mixed()).num_edges() * 48} bytes" in message


def test_names_that_do_not_exist_and_shapes_that_do_not_fit(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.edata["weight"] = torch.ones(graph.num_edges())
        with pytest.raises(KeyError, match="no column 'w' .* there are: .*weight"):
            graph.edata["w"]
        with pytest.raises(KeyError, match="no column 'h' .* there are: feat"):
            graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "x"))
        with pytest.raises(KeyError, match="'w'"):
            graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "x"))
        with pytest.raises(ValueError, match="unknown 'buys', expected one of .*_E"):
            graph["buys"]
        e = of_edges(graph, data.node_features["_N/feat"].double())
        sent = group.counters.collectives
        for wrong in (
            lambda: e + torch.ones(5), lambda: e.unflatten(1, (4, 2)), lambda: e.sum(4),
            lambda: torch.cat([e, e[:, 0]], 1), lambda: e @ torch.ones(5, 2), lambda: e.nothing(),
        ):  # fmt: skip
            with pytest.raises((ValueError, IndexError, AttributeError)):
                wrong()
        with pytest.raises(ValueError, match=r"add on an edge tensor \(\d+, \d+\): .*broadcast"):
            e + torch.ones(5)
        assert group.counters.collectives == sent, "something was sent"

    path = partitioned(mixed(), 2, "random")
    run_threads(2, case)


def test_running_statistics_do_not_see_trial_runs(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        graph, e = edge_tensor(group, path)
        norm, plain = nn.BatchNorm1d(6).double(), nn.BatchNorm1d(6).double()
        with pytest.warns(UserWarning, match="batch_norm .* local edges alone"):
            norm(e)
        plain(e.materialize())
        assert torch.equal(norm.running_mean, plain.running_mean)

    path = partitioned(mixed(), 1, "random")
    run_threads(1, case)


def test_what_is_recorded_without_gradients_gets_none(partitioned: Cutter) -> None:
    def run(graph: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = edge_softmax(graph, of_edges(graph, x).tanh())
        return reduced(graph, weights * of_edges(graph, x))

    compare(run, partitioned, 6)


def test_copies_of_rows_are_those_of_their_time(partitioned: Cutter) -> None:
    """Made without gradients they have none; of rows that were written since they are refused."""

    def run(graph: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            graph.srcdata["x"] = x
            graph.apply_edges(fn.copy_u("x", "c"))
        return reduced(graph, graph.edata["c"]) * x

    def written(group: Any) -> None:
        graph = Part(group, path).graph
        graph.ndata["x"] = x = torch.ones(graph.num_nodes(), 2)
        graph.apply_edges(fn.copy_u("x", "c"))
        x.mul_(2)
        with pytest.raises(sar.NotSupportedError, match="column 'x' was written in place after"):
            reduced(graph, graph.edata["c"])

    compare(run, partitioned, 6)
    path = partitioned(mixed(), 2, "random")
    run_threads(2, written)
