"""Reduce functions over a mailbox: equal to DGL's on every rank, in blocks, in DGL's order."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dgl
import dgl.function as fn
import numpy as np
import pytest
import torch
from harness import WorkerPool, assert_close, assert_gradients_close, run_threads
from harness.graphs import ETYPE_HOMO, GraphArrays, homogeneous, mixed, sample, to_dgl
from harness.parts import Cutter
from harness.rows import Part, join_edges, join_nodes, whole
from harness.watch import Largest, dense_graph
from test_edge_inputs import assert_exact
from torch import Tensor, nn
from torch.autograd import Function

import sar

pytestmark = pytest.mark.filterwarnings("ignore:reduce function")
WIDTH = 6
Reduce = Callable[["Net", Any], dict[str, Tensor]]


class Scaled(Function):
    """x times the sum of a weight: a parameter that no torch function shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight.sum(), (grad * x).sum().expand_as(weight)


class Net(nn.Module):
    """Parameters for the functions below, and a message function that reads every side."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 3, batch_first=True)
        self.linear = nn.Linear(WIDTH, 4)
        self.derived: Any = None
        self.behind: Any = None

    def message(self, edges: Any) -> dict[str, Tensor]:
        rows = edges.src["u"] * torch.tanh(edges.dst["v"]) + edges.data["e"]
        return {"m": torch.sin(self.linear(rows)).repeat(1, 2)[:, :WIDTH], "u": edges.src["u"]}


def lstm(net: Net, nodes: Any) -> dict[str, Tensor]:
    _, (last, _) = net.lstm(nodes.mailbox["m"])
    return {"out": last.squeeze(0)}


def deviations(net: Net, nodes: Any) -> dict[str, Tensor]:
    rows = nodes.mailbox["u"]
    centred = rows - rows.mean(1, keepdim=True)
    return {
        "out": (centred.square().mean(1) + 1e-3).sqrt() * nodes.data["v"],
        "high": rows.amax(1),
        "middle": rows.median(1).values,
        "degree": torch.full((nodes.batch_size(),), rows.shape[1]),
        "len": rows.new_full((len(nodes), 1), float(len(rows) == len(nodes))),
    }


def in_order(net: Net, nodes: Any) -> dict[str, Tensor]:
    rows = nodes.mailbox["m"]
    places = torch.arange(1.0, rows.shape[1] + 1, dtype=rows.dtype).view(1, -1, 1)
    return {"out": (rows * places).sum(1), "first": rows[:, 0], "last": rows[:, -1]}


def captured(net: Net, nodes: Any) -> dict[str, Tensor]:
    """Parameters of both functions, a tensor computed from one outside, hidden ones."""
    rows = torch.tanh(net.linear(nodes.mailbox["m"]) * net.derived)
    rows = Scaled.apply(Scaled.apply(rows, net.linear.bias), net.behind)
    return {"out": rows.sum(1) * nodes.data["v"][:, :1]}


FUNCTIONS: dict[str, Reduce] = {
    function.__name__: function for function in (lstm, deviations, in_order, captured)
}
MESSAGES = {
    "udf": lambda net: net.message,
    "copy_u": lambda net: fn.copy_u("u", "m"),
    "copy_e": lambda net: fn.copy_e("e", "m"),
    "u_mul_v": lambda net: fn.u_mul_v("u", "v", "m"),
    "lazy": lambda net: fn.copy_e("z", "m"),
}


def passed(graph: Any, net: Net, message: str, reduce: Reduce, u: Any, e: Any) -> dict:
    """All results, and a sum of them that weighs every element differently."""
    net.derived = net.linear.weight.square().sum(1)
    net.behind = net.linear.bias.exp()
    with graph.local_scope():
        graph.srcdata["u"], graph.dstdata["v"], graph.edata["e"] = u, u.cos(), e
        if message == "lazy":
            graph.apply_edges(fn.u_add_v("u", "v", "z"))
            graph.edata["z"] = torch.tanh(graph.edata["z"])
        before = set(graph.dstdata)
        graph.update_all(MESSAGES[message](net), lambda nodes: reduce(net, nodes))
        return {name: graph.dstdata[name] for name in set(graph.dstdata) - before}


def loss_of(results: dict[str, Tensor]) -> Tensor:
    scores = [rows.sin().sum() for name, rows in sorted(results.items()) if rows.requires_grad]
    return torch.stack(scores).sum()


def graph_of(name: str) -> GraphArrays:
    """A sample graph, or one of several blocks of edges: the smallest block has 256."""
    return mixed(400, 2) if name == "several blocks" else sample(name)


def inputs_of(graph: Any) -> tuple[Tensor, Tensor]:
    count = len(graph.edges[ETYPE_HOMO][0])
    return whole(graph.total_nodes, (WIDTH,), 3), whole(count, (WIDTH,), 4)


def grad_of(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def case(
    group: Any, path: str, net: Net, message: str, reduce: str, name: str, policy: sar.Policy
) -> dict:
    part, net = Part(group, path, policy), copy.deepcopy(net)
    nodes, edges = inputs_of(graph_of(name))
    u, e = part.node_rows(nodes), part.edge_rows(edges)
    results = passed(part.graph, net, message, FUNCTIONS[reduce], u, e)
    loss_of(results).backward()
    sar.gather_grads(net)
    found = {name: rows.detach() for name, rows in results.items()}
    found |= {"du": grad_of(u), "de": grad_of(e), "nodes": part.nodes, "edges": part.edges}
    return found | {"params": {n: p.grad for n, p in net.named_parameters()}}


def check(name: str, ranks: list[dict], net: Net, message: str, reduce: str) -> None:
    graph = graph_of(name)
    nodes, edges = (rows.requires_grad_() for rows in inputs_of(graph))
    net = copy.deepcopy(net)
    want = passed(to_dgl(graph), net, message, FUNCTIONS[reduce], nodes, edges)
    loss_of(want).backward()
    for key, rows in want.items():
        assert_close(join_nodes(ranks, key, len(nodes)), rows, key, torch.float64)
    du, de = join_nodes(ranks, "du", len(nodes)), join_edges(ranks, "de", len(edges))
    assert_close(du, grad_of(nodes), "gradient of u", torch.float64)
    assert_close(de, grad_of(edges), "gradient of e", torch.float64)
    wanted = {n: p.grad for n, p in net.named_parameters()}
    for rank in ranks:
        got = {n: g if wanted[n] is not None else None for n, g in rank["params"].items()}
        assert_gradients_close(got, wanted, torch.float64)


def make_net() -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


@pytest.mark.parametrize(
    ("message", "reduce"),
    [("udf", reduce) for reduce in FUNCTIONS]
    + [(message, "in_order") for message in MESSAGES if message != "udf"]
    + [("copy_u", "lstm"), ("lazy", "captured")],
)
@pytest.mark.parametrize(
    ("size", "policy"),
    [
        (1, {"block_bytes": 1}),
        (3, {"block_bytes": 1, "rounds": 2, "rematerialize": False}),
        (4, {"block_bytes": 1, "rounds": 1}),
    ],
)
def test_reduce_function_equals_dgl(
    message: str, reduce: str, size: int, policy: dict, partitioned: Cutter
) -> None:
    graph, net = "several blocks", make_net()
    path = partitioned(graph_of(graph), size, "random")
    ranks = run_threads(size, case, path, net, message, reduce, graph, sar.Policy(**policy))
    check(graph, ranks, net, message, reduce)


# Order, odd graphs, ranks that have nothing.


@pytest.mark.parametrize(
    ("graph", "size", "method"),
    [
        ("repeated", 3, "random"),
        ("star", 4, "adversarial"),
        ("no_edges", 2, "random"),
        ("mostly_isolated", 4, "contiguous"),
        ("loops", 3, "contiguous"),
        ("ring", 4, "contiguous"),
        ("crossing", 2, "contiguous"),
    ],
)
@pytest.mark.parametrize("rematerialize", [True, False])
def test_odd_graphs(
    graph: str, size: int, method: str, rematerialize: bool, partitioned: Cutter
) -> None:
    """Parts without nodes or edges, no edge at all, nothing but duplicates or self loops."""
    path, net = partitioned(sample(graph), size, method), make_net()
    policy = sar.Policy(rematerialize=rematerialize)
    ranks = run_threads(size, case, path, net, "udf", "in_order", graph, policy)
    if graph == "no_edges":  # DGL stores no column there
        assert all(not rank["out"].any() and not rank["du"].any() for rank in ranks)
    else:
        check(graph, ranks, net, "udf", "in_order")


@pytest.mark.parametrize("rematerialize", [True, False])
def test_only_some_ranks_ask_for_gradients(rematerialize: bool, partitioned: Cutter) -> None:
    """The others take part in backward, and gradients through their rows arrive."""
    path, net = partitioned(mixed(), 3, "random"), make_net()

    def case(group: Any, asking: tuple[int, ...]) -> dict:
        part = Part(group, path, sar.Policy(rematerialize=rematerialize))
        nodes, edges = inputs_of(mixed())
        asks = group.rank in asking
        u, e = part.node_rows(nodes, asks), part.edge_rows(edges, False)
        out = passed(part.graph, net.requires_grad_(False), "udf", FUNCTIONS["in_order"], u, e)
        assert out["out"].requires_grad, "this rank would miss backward"
        loss_of(out).backward()
        assert (u.grad is not None) == asks
        return {"du": grad_of(u), "nodes": part.nodes}

    net.requires_grad_(False)
    everyone = run_threads(3, case, (0, 1, 2))
    for rank, (got, want) in enumerate(zip(run_threads(3, case, (0, 2)), everyone)):
        if rank != 1:
            assert_close(got["du"], want["du"], f"gradient on rank {rank}", torch.float64)


def test_nothing_is_kept_where_nobody_asks(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 2, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        part.graph.ndata["h"] = whole(57, (3,), 0)[part.nodes]
        part.graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
        assert not part.graph.ndata["o"].requires_grad
        before = group.counters.sent_bytes
        part.graph.update_all(
            fn.copy_u("h", "m"), lambda nodes: {"n": torch.ones(nodes.batch_size())}
        )
        assert group.counters.sent_bytes == before, "rows that nobody reads were sent"
        assert torch.equal(part.graph.ndata["n"] > 0, part.graph.in_degrees() > 0)

    run_threads(2, case)


@pytest.mark.parametrize("rematerialize", [True, False])
@pytest.mark.parametrize("rounds", [1, 2])
def test_traffic(rounds: int, rematerialize: bool, partitioned: Cutter) -> None:
    """Rows come once in forward, gradients go home once, rows come again or are kept."""
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path, sar.Policy(rounds=rounds, rematerialize=rematerialize))
        x, count = part.node_rows(whole(57, (3,), 0)), group.counters
        part.graph.ndata["h"] = x
        halo = sum(part.graph._store.relations[ETYPE_HOMO].plan.recv_counts) * 3 * 8
        own = sum(part.graph._store.relations[ETYPE_HOMO].plan.send_counts) * 3 * 8
        marks = [(count.received_bytes, count.sent_bytes)]
        part.graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].amax(1)})
        marks.append((count.received_bytes, count.sent_bytes))
        part.graph.ndata["o"].sum().backward()
        marks.append((count.received_bytes, count.sent_bytes))
        forward, backward = ([b - a for a, b in zip(*pair)] for pair in zip(marks, marks[1:]))
        again = 1 if rematerialize else 0
        assert forward == [halo, own]
        assert backward == [own + again * halo, halo + again * own]

    run_threads(3, case)


def test_typed_messages_get_their_edges_sorted(partitioned: Cutter) -> None:
    """Layers that were told so multiply rows of a type together."""

    def make() -> tuple[Any, nn.Module]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            linear = dgl.nn.TypedLinear(WIDTH, 4, 3).double()

        def run(graph: Any, x: Tensor, w: Tensor, types: Tensor) -> Tensor:
            graph.ndata["h"], graph.edata["t"] = x, types
            graph.update_all(
                lambda edges: {"m": linear(edges.src["h"], edges.data["t"], sorted_by_type=True)},
                lambda nodes: {"o": nodes.mailbox["m"].cumsum(1).square().sum(1)},
            )
            return graph.ndata["o"]

        return run, linear

    assert_exact(sample("typed"), make, partitioned)


# Random numbers.


def case_dropout(group: Any, path: str) -> Tensor:
    """sum(out) - <x, d sum(out) / dx>: zero when both passes draw the same masks."""
    part = Part(group, path, sar.Policy(block_bytes=1 << 12))
    x = part.node_rows(whole(57, (WIDTH,), 0))

    def message(edges: Any) -> dict[str, Tensor]:
        return {"m": nn.functional.dropout(edges.src["h"], 0.4)}

    def reduce(nodes: Any) -> dict[str, Tensor]:
        return {"o": nn.functional.dropout(nodes.mailbox["m"], 0.5).sum(1)}

    part.graph.ndata["h"] = x
    torch.manual_seed(group.rank)
    part.graph.update_all(message, reduce)
    out, expected = part.graph.ndata["o"], torch.rand(1)
    torch.manual_seed(12)  # backward must not depend on it
    out.sum().backward()
    total = torch.stack([out.sum(), (x * x.grad).sum(), out.abs().sum()]).detach()
    assert not torch.equal(expected, torch.rand(1))
    return group.all_reduce(total)


@pytest.mark.parametrize("size", [1, 2])
def test_dropout_is_replayed(size: int, partitioned: Cutter, processes: WorkerPool) -> None:
    path = partitioned(mixed(), size, "random")
    for total, back, scale in (t.tolist() for t in processes.run(size, case_dropout, path)):
        assert scale > 1 and abs(total - back) < 1e-10 * scale


def test_blocks_of_mailboxes_draw_random_numbers_of_their_own(partitioned: Cutter) -> None:
    path = partitioned(graph_of("several blocks"), 1, "random")

    def case(group: Any) -> None:
        graph = Part(group, path, sar.Policy(block_bytes=1)).graph
        graph.ndata["h"] = torch.ones(graph.num_nodes(), 1)
        draw = partial(torch.rand, dtype=torch.float64)
        graph.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": draw(len(nodes))})
        drawn = graph.ndata["o"][graph.in_degrees() > 0]
        assert len(drawn.unique()) == len(drawn)

    run_threads(1, case)


# Blocks.


@pytest.mark.parametrize("kind", ["sum", "lstm", "PNAConv"])
def test_nothing_edge_sized_is_made(kind: str, tmp_path: Path) -> None:
    """60 edges a node: any tensor of a value per edge has more elements than allowed here."""
    nodes, edges, saved, boxes = 400, 24_000, [], []
    graph = dense_graph(nodes, edges, tmp_path).with_policy(sar.Policy(block_bytes=1 << 15))
    x = torch.randn(nodes, 6, requires_grad=True)
    if kind == "PNAConv":
        layer: Any = dgl.nn.PNAConv(6, 8, ["mean", "max"], ["identity"], 2.0, num_towers=2)
    elif kind == "lstm":
        layer = dgl.nn.SAGEConv(6, 8, "lstm")
        layer.lstm.register_forward_pre_hook(lambda _, args: boxes.append(args[0].nbytes))
    else:
        layer = Summed()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = layer(graph, x)
        out.square().sum().backward()
    if kind == "lstm":  # its own workspace is hundreds of numbers for each that it is given
        assert 1 << 12 < max(boxes) < 1 << 15
    else:
        assert max(saved) <= nodes * 30
        assert largest.elements <= edges  # the structure's arrays are built in the first pass


class Summed(nn.Module):
    def forward(self, graph: Any, x: Tensor) -> Tensor:
        with graph.local_scope():
            graph.ndata["h"] = x
            graph.update_all(
                lambda edges: {"m": edges.src["h"] * edges.dst["h"]},
                lambda nodes: {"o": nodes.mailbox["m"].sum(1)},
            )
            return graph.ndata["o"]


# Warnings.


def test_the_halo_is_warned_of_once(partitioned: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sar.ops.mailbox._warned", set())
    path = partitioned(mixed(), 2, "random")

    def summed(nodes: Any) -> dict[str, Tensor]:
        return {"o": nodes.mailbox["m"].sum(1)}

    def case(group: Any) -> int:
        part = Part(group, path)
        for width in (3, 5):
            part.graph.ndata["h"] = whole(57, (width,), 0)[part.nodes]
            for _ in range(2):
                part.graph.update_all(fn.copy_u("h", "m"), summed)
        return sum(part.graph._store.relations[ETYPE_HOMO].plan.recv_counts)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counts = run_threads(2, case)
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2, texts
    for text, width in zip(texts, (3, 5)):
        assert "summed" in text and "halo" in text
        assert any(f"{count} rows, {count * width * 8} bytes" in text for count in counts)


# What is refused.

WRONG: dict[str, tuple[Callable[[Any], Any], type, str]] = {
    "not a dict": (lambda nodes: nodes.mailbox["m"].sum(1), TypeError, "returned Tensor"),
    "not a tensor": (lambda nodes: {"o": 3}, ValueError, "'o' as int"),
    "no row per destination": (
        lambda nodes: {"o": nodes.mailbox["m"].sum(1)[:1]},
        ValueError,
        r"'o' as shape \(1, 3\), expected a tensor with a row for each of \d+ nodes",
    ),
    "a row per message": (
        lambda nodes: {"o": nodes.mailbox["m"].flatten(0, 1)[1:]},
        ValueError,
        "row for each",
    ),
    "no such message": (lambda nodes: {"o": nodes.mailbox["x"]}, KeyError, "there are: m"),
    "no such column": (lambda nodes: {"o": nodes.data["x"]}, KeyError, "there are: .*h, label"),
    "width of the in-degree": (
        lambda nodes: {"o": nodes.mailbox["m"].flatten(1)},
        ValueError,
        "as for another in-degree",
    ),
    "a dict for small in-degrees only": (
        lambda nodes: {"o": nodes.mailbox["m"].sum(1)} if nodes.mailbox["m"].shape[1] < 4 else 0,
        TypeError,
        "returned int",
    ),
    "rows for small in-degrees only": (
        lambda nodes: {"o": nodes.mailbox["m"].sum(1)[: 9 - nodes.mailbox["m"].shape[1]]},
        ValueError,
        "row for each",
    ),
    "a column for large in-degrees only": (
        lambda nodes: (
            {"o": nodes.mailbox["m"].sum(1)}
            if nodes.mailbox["m"].shape[1] < 4
            else {"o": nodes.data["h"]}
        ),
        KeyError,
        "blank rows",
    ),
    "names of the in-degree": (
        lambda nodes: {f"o{nodes.mailbox['m'].shape[1]}": nodes.mailbox["m"].sum(1)},
        ValueError,
        "as for others",
    ),
    "its own error": (lambda nodes: 1 / 0, ZeroDivisionError, "division"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_are_refused_on_every_rank(name: str, partitioned: Cutter) -> None:
    function, error, text = WRONG[name]
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        part.graph.ndata["h"] = whole(57, (3,), 0)[part.nodes]
        with pytest.raises(error, match=text):
            part.graph.update_all(fn.copy_u("h", "m"), function)
        part.graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))  # ranks are still in step

    run_threads(3, case)


def test_an_error_on_one_rank_is_raised_on_all(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 3, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        part.graph.ndata["h"] = torch.full((part.graph.num_nodes(), 3), float(group.rank == 1))
        part.graph.ndata["mine"] = part.graph.ndata["h"]

        def reduce(nodes: Any) -> dict[str, Tensor]:
            if (nodes.data["mine"] > 0).any():
                raise ArithmeticError("only here")
            return {"o": nodes.mailbox["m"].sum(1)}

        with pytest.raises(ArithmeticError, match="only here"):
            part.graph.update_all(fn.copy_u("h", "m"), reduce)
        if group.rank == 2:
            part.graph.ndata.pop("mine")
        with pytest.raises(KeyError, match="mine"):
            part.graph.update_all(fn.copy_u("h", "m"), reduce)

    run_threads(3, case)


def test_what_is_no_reduce_function(partitioned: Cutter) -> None:
    path = partitioned(mixed(), 1, "random")

    def case(group: Any) -> None:
        part = Part(group, path)
        part.graph.ndata["h"] = whole(57, (3,), 0)[part.nodes]
        with pytest.raises(TypeError, match="reduce function: got str"):
            part.graph.update_all(fn.copy_u("h", "m"), "sum")
        with pytest.raises(KeyError, match="no column 'x'"):
            part.graph.update_all(fn.copy_u("x", "m"), lambda nodes: {})

    run_threads(1, case)


# Constant in-degree: what depends on it may be returned.


def test_a_width_that_depends_on_one_in_degree(partitioned: Cutter) -> None:
    """Five neighbours each, as in a nearest-neighbour graph; the function wants as many."""
    rng = np.random.default_rng(0)
    graph = homogeneous("five", 20, rng.integers(0, 20, 100), np.repeat(np.arange(20), 5))

    def run(graph: Any, x: Tensor, w: Tensor, _: Tensor) -> Tensor:
        graph.ndata["h"] = x
        graph.update_all(
            fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].topk(4, 1)[0].flatten(1)}
        )
        return graph.ndata["o"]

    assert_exact(graph, lambda: (run, None), partitioned, (1, 4))
