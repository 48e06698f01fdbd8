"""Global poolings, readouts and reductions over edges: one row for the rows of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import dgl
import dgl.function as fn
import pytest
import torch
from harness import run_threads
from harness.compare import assert_gradients_close
from harness.graphs import sample, to_dgl
from harness.parts import Cutter
from harness.rows import made
from harness.training import gathered
from torch import Tensor, nn

import sar

WIDTH = 6


class Classifier(nn.Module):
    """A convolution, a pooling to one row, and a layer that every rank applies to its copy."""

    def __init__(self, pool: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.conv = dgl.nn.GraphConv(WIDTH, WIDTH, allow_zero_in_degree=True)
        self.pool, self.last = pool, nn.Linear(width, 3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        return self.last(self.pool(graph, torch.tanh(self.conv(graph, x))))


class Back(nn.Module):
    """The pooled row goes back to the nodes: its gradient differs from rank to rank."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.pool, self.last = pool, nn.Linear(WIDTH, 3)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        pooled = self.last(self.pool(graph, x))
        return torch.tanh(x[:, :3] * dgl.broadcast_nodes(graph, pooled))


class Readout(nn.Module):
    """A function of DGL's over columns ``h`` of nodes and ``e`` of edges."""

    def __init__(self, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.read, self.scale = read, nn.Parameter(torch.tensor(1.5))

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"], graph.ndata["w"] = x, x[:, :1].square()
            graph.apply_edges(fn.u_mul_v("h", "h", "e"))
            graph.edata["e"] = graph.edata["e"] * self.scale
            return self.read(graph)


def attention() -> nn.Module:
    return dgl.nn.GlobalAttentionPooling(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "SumPooling": lambda: Classifier(dgl.nn.SumPooling()),
    "AvgPooling": lambda: Classifier(dgl.nn.AvgPooling()),
    "MaxPooling": lambda: Classifier(dgl.nn.MaxPooling()),
    "GlobalAttentionPooling": lambda: Classifier(attention()),
    "WeightAndSum": lambda: Classifier(dgl.nn.WeightAndSum(WIDTH)),
    "SortPooling": lambda: Classifier(dgl.nn.SortPooling(5), 5 * WIDTH),
    "SortPooling-padded": lambda: Classifier(dgl.nn.SortPooling(70), 70 * WIDTH),
    "Set2Set": lambda: Classifier(dgl.nn.Set2Set(WIDTH, 3, 1), 2 * WIDTH),
    "back": lambda: Back(dgl.nn.AvgPooling()),
    "back-max": lambda: Back(dgl.nn.MaxPooling()),
    "sum_nodes": lambda: Readout(lambda g: dgl.sum_nodes(g, "h", "w")),
    "softmax_nodes": lambda: Readout(lambda g: dgl.softmax_nodes(g, "h") * g.ndata["w"]),
    "topk_nodes": lambda: Readout(
        lambda g: dgl.topk_nodes(g, "h", 4, descending=False, sortby=1)[0][0]
    ),
    "sum_edges": lambda: Readout(lambda g: dgl.sum_edges(g, "e")),
    "mean_edges": lambda: Readout(lambda g: dgl.mean_edges(g, "e")),
    "max_edges": lambda: Readout(lambda g: dgl.max_edges(g, "e")),
    "softmax_edges": lambda: Readout(lambda g: at_nodes(g, dgl.softmax_edges(g, "e"))),
}


def at_nodes(graph: Any, rows: Tensor) -> Tensor:
    graph.edata["r"] = rows
    graph.update_all(fn.copy_e("r", "m"), fn.sum("m", "out"))
    return graph.ndata["out"]


def loss_rows(rows: Tensor) -> Tensor:
    return torch.sin(rows + torch.arange(rows.shape[-1])).sum(-1)


def compare(
    make: Callable[[], nn.Module],
    partitioned: Cutter,
    sizes: tuple[int, ...] = (1, 2, 4),
    convert: bool = False,
) -> None:
    """Rows, loss, gradients of inputs and parameters, with the loss every model has here."""
    arrays, model = sample("mixed"), made(make)
    whole = to_dgl(arrays)
    x = whole.ndata["feat"].double().requires_grad_()
    want = model(whole, x)
    loss_rows(want).mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}

    def case(group: Any, path: str) -> tuple[Tensor, Tensor, dict, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data, sar.Policy(block_bytes=2048))
        mine = models[group.rank]
        rows = data.node_features["_N/feat"].double().requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = mine(graph, rows)
        sar.global_mean(loss_rows(out)).backward()
        sar.gather_grads(mine)
        own = {name: p.grad for name, p in mine.named_parameters()}
        return out.detach(), rows.grad, own, data.node_features["_N/orig_id"]

    for size in sizes:
        models = [made(make) for _ in range(size)]  # seeds are the process'
        models = [sar.convert_batch_norm(model) if convert else model for model in models]
        ranks = run_threads(size, case, partitioned(arrays, size, "random"))
        ids = [rank[3] for rank in ranks]
        for out, _, own, own_ids in ranks:
            expected = want[own_ids] if len(want) == len(x) else want
            assert_gradients_close({"rows": out}, {"rows": expected.detach()}, torch.float64, "")
            assert_gradients_close(own, grads, torch.float64, f"{size} ranks:")
        got = gathered([rank[1] for rank in ranks], ids)
        assert_gradients_close({"x": got}, {"x": x.grad}, torch.float64, f"{size} ranks:")


@pytest.mark.parametrize("name", MODELS)
def test_readouts_equal_dgl(name: str, partitioned: Cutter) -> None:
    compare(MODELS[name], partitioned)


EDGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda e: e.sum(0),
    "sum of all": lambda e: e.sum().view(1),
    "mean": lambda e: torch.mean(e, dim=0, keepdim=True),
    "mean of all": lambda e: e.mean().view(1),
    "mean of some": lambda e: e.view(-1, 2, 3).mean((0, 2)),
    "max": lambda e: e.amax(0),
    "max of all": lambda e: e.max().view(1),
    "min": lambda e: torch.amin(e, (0, 1)).view(1),
    "standardized": lambda e: (e - e.mean(0)) / (e - e.mean(0)).square().mean(0).sqrt(),
    "softmax": lambda e: torch.softmax(e, 0),
    "std": lambda e: e.std(0),
    "std of all": lambda e: e.std().view(1),
    "std of all, biased": lambda e: e.std(False).view(1),
    "std of some": lambda e: torch.std(e.view(-1, 2, 3), (0, 2), True, True),
    "var": lambda e: torch.var(e, dim=0, keepdim=True),
    "var, biased": lambda e: e.var(0, False),
    "var by correction": lambda e: torch.var(e, (0, 1), correction=3).view(1),
    "var, unbiased=": lambda e: e.var(unbiased=False).view(1),
    "std without any": lambda e: (e * 0).std(0) + e.std(1).sum(),
    "normalized": lambda e: (e - e.mean(0)) / e.std(0, unbiased=False),
}


@pytest.mark.parametrize("name", EDGES)
def test_reductions_over_edges_equal_those_of_one_process(name: str, partitioned: Cutter) -> None:
    def read(graph: Any) -> Tensor:
        rows = EDGES[name](graph.edata["e"].tanh())
        return at_nodes(graph, rows) if len(rows) == graph.num_edges() else rows.view(1, -1)

    compare(lambda: Readout(read), partitioned)


def test_whether_any_or_all_edges(partitioned: Cutter) -> None:
    def case(group: Any) -> list[bool]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.ndata["h"] = (data.node_features["_N/orig_id"] == 0).double()
        graph.apply_edges(fn.copy_u("h", "e"))
        e = graph.edata["e"]
        found = [(e > 0).any(), torch.all(e < 1), (e > 2).any(), torch.all(e < 2)]
        assert int((e > 0).sum()) == float(e.sum()) == found_edges
        return [bool(value) for value in found]

    found_edges = int(to_dgl(sample("mixed")).out_degrees(0))
    path = partitioned(sample("mixed"), 3, "random")
    assert run_threads(3, case) == [[True, False, False, True]] * 3


def test_a_graph_without_nodes_on_a_rank(partitioned: Cutter) -> None:
    """The last rank has no node, the one before it one."""
    arrays = sample("star")
    want = to_dgl(arrays).ndata["feat"]

    def case(group: Any) -> list[Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"]
        pools = (dgl.nn.SumPooling(), dgl.nn.AvgPooling(), dgl.nn.MaxPooling())
        return [pool(graph, x) for pool in pools]

    path = partitioned(arrays, 4, "adversarial")
    for total, mean, largest in run_threads(4, case):
        torch.testing.assert_close(total[0], want.sum(0))
        torch.testing.assert_close(mean[0], want.mean(0))
        assert torch.equal(largest[0], want.amax(0))


class Normed(nn.Module):
    """A batch norm over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.apply_edges(fn.u_mul_v("h", "h", "e"))
            return at_nodes(graph, torch.tanh(self.norm(graph.edata["e"])))


def test_batch_norm_over_edges(partitioned: Cutter) -> None:
    """Rows, gradients and running statistics are those of one process; nothing is edge-sized."""
    compare(Normed, partitioned, convert=True)
    whole, one = to_dgl(sample("mixed")), made(Normed)
    one(whole, whole.ndata["feat"].double())
    models = [sar.convert_batch_norm(made(Normed)) for _ in range(3)]

    def case(group: Any) -> nn.Module:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, model, saved = sar.construct_full_graph(data), models[group.rank], []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(len(tensor) if tensor.dim() else 0)
            return tensor

        x = data.node_features["_N/feat"].double().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(graph, x).sum().backward()
        assert saved and graph.num_edges() not in saved
        return model.norm

    path = partitioned(sample("mixed"), 3, "random")
    for norm in run_threads(3, case):
        torch.testing.assert_close(norm.running_mean, one.norm.running_mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, one.norm.running_var, rtol=1e-12, atol=1e-12)


def test_readouts_of_edges_that_cannot_run_say_so(partitioned: Cutter) -> None:
    def case(group: Any) -> None:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        graph.edata["e"] = torch.ones(graph.num_edges(), 2)
        with pytest.raises(NotImplementedError, match="topk"):
            dgl.topk_edges(graph, "e", 2, sortby=0)
        with pytest.raises(ValueError, match="reducer: got 'prod'"):
            rows = torch.ones(graph.num_nodes(), 1)
            dgl.ops.segment_reduce(graph.batch_num_nodes(), rows, "prod")

    path = partitioned(sample("mixed"), 2, "random")
    run_threads(2, case)


def test_pools_in_bfloat16(partitioned: Cutter) -> None:
    path, pools = partitioned(sample("mixed"), 3, "coarsen"), (dgl.nn.SumPooling, dgl.nn.MaxPooling)
    graph = to_dgl(sample("mixed"))
    want = [pool()(graph, graph.ndata["feat"].bfloat16().double()) for pool in pools]

    def case(group: Any) -> list[Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph, x = sar.construct_full_graph(data), data.node_features["_N/feat"].bfloat16()
        return [pool()(graph, x).double() for pool in pools]

    for found in run_threads(3, case):
        torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
