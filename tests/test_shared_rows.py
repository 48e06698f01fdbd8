"""Modules of a ``HeteroGraphConv`` that read the same rows: equal to DGL, and rows travel once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from dgl import function as fn
from dgl import nn as dglnn
from harness import assert_close, assert_gradients_close, run_threads
from harness.graphs import shop, to_dgl
from harness.parts import Cutter
from harness.rows import whole
from harness.training import train_nodes, typed_graph, whole_blocks
from test_multi_update import by_id, halo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sar

WIDTH, OUT = 3, 4
USERS = ("buys", "follows")  # both out of users
ITEMS = ("bought_by", "carries")  # both out of items
NAMES = (*USERS, *ITEMS, "marks")


class Heads(nn.Module):
    """Attention, which computes on edges, and the mean of its heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = dglnn.GATConv(WIDTH, OUT, 2, allow_zero_in_degree=True)

    def forward(self, graph: Any, x: Any) -> Tensor:
        return self.conv(graph, x).mean(1)


class Twice(nn.Module):
    """Reads its rows by several reductions, once without gradients, and writes into a result."""

    def __init__(self, first: str = "sum") -> None:
        super().__init__()
        self.linear, self.first = nn.Linear(WIDTH, OUT), first

    def forward(self, graph: Any, x: tuple[Tensor, Tensor]) -> Tensor:
        def reduced(op: str) -> Tensor:
            with graph.local_scope():
                graph.srcdata["h"] = x[0]
                graph.update_all(fn.copy_u("h", "m"), getattr(fn, op)("m", "out"))
                return graph.dstdata["out"]

        rows = reduced(self.first)
        rows += 1
        with torch.no_grad():
            constant = reduced("mean")
        return self.linear(rows + reduced("mean") * constant + reduced("max"))


class Attributed(nn.Module):
    """A user's message over a relation, with parameters and a column of its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, OUT)

    def forward(self, rel: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        def message(edges: Any) -> dict[str, Tensor]:
            joint = self.fc(edges.src["h"] - edges.dst["h"])
            return {"m": torch.tanh(joint) * edges.data["w"]}

        with rel.local_scope():
            rel.srcdata["h"], rel.dstdata["h"] = pair
            rel.apply_edges(fn.u_dot_v("h", "h", "w"))
            rel.update_all(message, fn.max("m", "out"))
            return rel.dstdata["out"]


def graph_conv(norm: str, out: int = OUT) -> nn.Module:
    return dglnn.GraphConv(WIDTH, out, norm=norm)


def sage(kind: str = "mean", **options: Any) -> nn.Module:
    return dglnn.SAGEConv(WIDTH, OUT, kind, **options)


def gin(kind: str) -> nn.Module:
    return dglnn.GINConv(nn.Linear(WIDTH, OUT), kind, learn_eps=True)


# Modules in the order of NAMES, and whose rows travel together.
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[tuple[str, ...], ...]]] = {
    "means": (lambda: [sage() for _ in NAMES], (USERS, ITEMS)),
    "sums and means": (
        lambda: [graph_conv("right"), sage(), gin("sum"), graph_conv("none"), Heads()],
        (USERS, ITEMS),
    ),
    "maxima": (lambda: [gin("max"), gin("max"), gin("max"), gin("mean"), gin("sum")], (USERS,)),
    "several": (lambda: [Twice(), Twice("mean"), Twice(), sage(), graph_conv("both")], ()),
    "others": (
        lambda: [sage("gcn"), Attributed(), dglnn.EdgeConv(WIDTH, OUT), gin("mean"), Attributed()],
        (),
    ),
    "nothing": (
        lambda: [graph_conv("both"), sage("pool"), graph_conv("left"), graph_conv("both"), Heads()],
        (),
    ),
}


def build(name: str, aggregate: str, state: dict | None = None) -> nn.Module:
    modules = dict(zip(NAMES, LAYERS[name][0](), strict=True))
    conv = dglnn.HeteroGraphConv({**modules, "unknown": sage()}, aggregate).double()
    if state is not None:
        conv.load_state_dict(state)
    return conv


def rows_of(graph: Any, ids: dict[str, Tensor]) -> dict[str, Tensor]:
    counts = shop().num_nodes
    return {
        t: whole(counts[t], (WIDTH,), seed)[ids[t]].requires_grad_()
        for seed, t in enumerate(sorted(counts))
    }


def outcome(conv: nn.Module, graph: Any, x: Any, ids: dict, src: dict[str, Tensor]) -> dict:
    """Results of a call, and the gradients of a sum of all of them."""
    out = conv(graph, x)
    parts = [(r * (1 + ids[t]).view(-1, *[1] * (r.dim() - 1))).sum() for t, r in out.items()]
    torch.stack(parts).sum().backward()
    return {
        "dst": ids, "out": {t: r.detach() for t, r in out.items()},
        "x": {t: torch.zeros_like(r) if r.grad is None else r.grad for t, r in src.items()},
    }  # fmt: skip


def case(group: Any, path: str, conv_of: Callable, policy: sar.Policy, block: bool) -> list[dict]:
    """Three calls; all share rows."""
    _, graph, src, dst = typed_graph(path, group.rank, policy, block)
    conv, found = conv_of(), []
    for _ in range(3):
        x = rows_of(graph, src)
        conv.zero_grad()
        found.append(outcome(conv, graph, x, dst, x) | {"src": src})
        sar.gather_grads(conv)
        found[-1]["params"] = {n: p.grad for n, p in conv.named_parameters() if p.grad is not None}
    return found


def check(conv: nn.Module, ranks: list[list[dict]], block: bool) -> None:
    graph = to_dgl(shop())
    if block:
        graph = whole_blocks(graph, train_nodes(graph), 1)[0]
    src = {t: graph.srcnodes[t].data["orig_id"] for t in graph.srctypes}
    dst = {t: graph.dstnodes[t].data["orig_id"] for t in graph.dsttypes}
    x = rows_of(graph, src)
    want = outcome(conv, graph, x, dst, x) | {"src": src}
    params = {n: p.grad for n, p in conv.named_parameters() if p.grad is not None}
    for parts in zip(*ranks, strict=True):
        for key, ids in (("out", "dst"), ("x", "src")):
            for ntype in want[key]:
                total = shop().num_nodes[ntype]
                got, rows = (by_id(list(p), key, ids, ntype, total) for p in (parts, [want]))
                assert_close(got, rows, f"{key} of {ntype}", torch.float64)
        assert_gradients_close(parts[0]["params"], params, torch.float64)


SETTINGS = [
    (1, "coarsen", None, False), (2, "random", 1, True), (3, "coarsen", 2, False),
    (4, "random", None, True), (4, "adversarial", 1, False),
]  # fmt: skip
AGGREGATES = ["sum", "mean", "stack", "max", "min"]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_equals_dgl(name: str, number: int, partitioned: Cutter) -> None:
    """Each set of modules with each aggregation; ranks, cuts, rounds and blocks go round."""
    aggregate = AGGREGATES[number]
    size, method, rounds, block = SETTINGS[(number + list(LAYERS).index(name)) % len(SETTINGS)]
    conv = build(name, aggregate)
    path, make = partitioned(shop(), size, method), partial(build, name, aggregate)
    make = partial(make, state=conv.state_dict())
    check(conv, run_threads(size, case, path, make, sar.Policy(rounds=rounds), block), block)


class Sent:
    """Bytes that a rank sends meanwhile."""

    def __init__(self, group: Any) -> None:
        self.group, self.start = group, group.counters.sent_bytes

    def __call__(self) -> int:
        start, self.start = self.start, self.group.counters.sent_bytes
        return self.start - start


def full_graph(
    group: Any, path: str, policy: sar.Policy | None = None
) -> tuple[Any, dict[str, Tensor]]:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data, policy)
    return graph, {t: torch.randn(graph.num_nodes(t), WIDTH).double() for t in graph.ntypes}


def case_bytes(group: Any, path: str, name: str) -> list[list[int]]:
    """Bytes of the forward and of the backward pass of four calls."""
    graph, x = full_graph(group, path, sar.Policy(exchange="pull"))
    conv, found, sent = build(name, "stack"), [], Sent(group)
    for _ in range(4):
        out = conv(graph, {t: rows.requires_grad_() for t, rows in x.items()})
        found.append([sent()])
        torch.stack([rows.sum() for rows in out.values()]).sum().backward()
        found[-1].append(sent())
    return found


@pytest.mark.parametrize("name", ["means", "sums and means", "maxima", "nothing"])
def test_rows_travel_once(name: str, partitioned: Cutter) -> None:
    """From the second call on (the first agrees on the joint halo) by as much as is shared."""
    path = partitioned(shop(), 4, "random")
    groups = [[e for e in shop().edges if e[1] in names] for names in LAYERS[name][1]]
    calls = torch.tensor(run_threads(4, case_bytes, path, name)).sum(0).tolist()
    saved = sum(
        sum(halo(path, 4, [etype]) for etype in group) - halo(path, 4, group) for group in groups
    )
    row = 8 * WIDTH
    assert (saved > 0) == bool(groups)
    assert calls[1] == calls[2] == calls[3]
    apart = torch.tensor(run_threads(4, case_apart, path, name)).sum(0) - saved * row
    assert calls[1] == apart.tolist()


def case_apart(group: Any, path: str, name: str) -> list[int]:
    """Bytes of the forward and of the backward pass of the same modules, each called by itself."""
    graph, x = full_graph(group, path, sar.Policy(exchange="pull"))
    conv, sent = build(name, "stack"), Sent(group)
    for _ in range(2):
        sent()
        out = [
            conv.mods[etype](graph[etype], (x[src].requires_grad_(), x[dst].requires_grad_())).sum()
            for src, etype, dst in graph.canonical_etypes
        ]
        found = [sent()]
        torch.stack(out).sum().backward()
        found.append(sent())
    return found


def case_history(group: Any, path: str, name: str) -> None:
    """Results and gradients of calls, bit for bit, whatever was computed before them."""
    graph, _ = full_graph(group, path)
    conv = dglnn.HeteroGraphConv(dict(zip(NAMES, LAYERS[name][0](), strict=True)), "sum")
    ids = {t: torch.arange(graph.num_nodes(t)) for t in graph.ntypes}
    found = []
    with torch.no_grad():
        for param in conv.parameters():
            param.copy_(whole(len(param), param.shape[1:], 0))
    for _ in range(3):
        x = {t: r.float().detach().requires_grad_() for t, r in rows_of(graph, ids).items()}
        with torch.no_grad():
            before = conv(graph, x)
        found.append(outcome(conv, graph, x, ids, x) | {"without gradients": before})
    for later in found[1:]:
        for key in ("out", "x", "without gradients"):
            for ntype, rows in found[0][key].items():
                torch.testing.assert_close(later[key][ntype], rows, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["means", "sums and means"])
def test_the_first_call_gives_the_bits_of_all(name: str, partitioned: Cutter) -> None:
    """So that a run which is resumed goes on as if it had never ended."""
    run_threads(3, case_history, partitioned(shop(), 3, "random"), name)


def means(**options: Any) -> nn.Module:
    return dglnn.HeteroGraphConv({name: sage(**options) for name in NAMES}).double()


def case_checkpoint(group: Any, path: str) -> None:
    """Layers that torch runs again in backward save the same tensors both times."""
    graph, x = full_graph(group, path)
    conv, grads = means(), []
    for again in (True, False, True):
        rows = {t: r.clone().requires_grad_() for t, r in x.items()}
        out = checkpoint(conv, graph, rows, use_reentrant=False) if again else conv(graph, rows)
        torch.stack([part.sum() for part in out.values()]).sum().backward()
        grads.append([r.grad for r in rows.values()])
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])


def test_layers_that_run_again(partitioned: Cutter) -> None:
    run_threads(3, case_checkpoint, partitioned(shop(), 3, "random"))
