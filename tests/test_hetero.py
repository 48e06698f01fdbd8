"""Graphs of several types: what the graph and its slices say, and messages per relation."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from dgl import function as fn
from dgl import nn as dglnn
from harness import WorkerPool, assert_close, assert_gradients_close, run_threads
from harness.graphs import hetero, sample, to_dgl
from harness.parts import Cutter, joined
from harness.rows import whole
from harness.training import Setting, case_train, check, start_state
from torch import Tensor, nn

import sar
from sar.partition.arrays import GraphArrays

BUYS, FOLLOWS = ("user", "buys", "item"), ("user", "follows", "user")
WIDTH = 4


class HeteroPart:
    """One rank's graph of several types and the original ids of its rows."""

    def __init__(self, group: Any, path: str, policy: sar.Policy | None = None) -> None:
        self.data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        self.graph = sar.construct_full_graph(self.data, policy)
        self.ids = {t: self.data.node_features[f"{t}/orig_id"] for t in self.data.book.ntypes}

    def eids(self, etype: tuple[str, str, str]) -> Tensor:
        return self.data.edge_features[":".join(etype) + "/orig_eid"]


def inputs(graph: GraphArrays) -> dict[str, Tensor]:
    return {t: whole(n, (WIDTH,), seed) for seed, (t, n) in enumerate(graph.num_nodes.items())}


def by_type(parts: list[dict], key: str, ntype: str) -> Tensor:
    ids = [p["ids"][ntype] for p in parts]
    return joined([p[key][ntype] for p in parts], ids, hetero().num_nodes[ntype])


def case_relations(group: Any, path: str, policy: sar.Policy) -> dict:
    """Every relation by every reduction, in place and through slices; gradients of all types."""
    part = HeteroPart(group, path, policy)
    graph = part.graph
    x = {t: rows[part.ids[t]].requires_grad_() for t, rows in inputs(hetero()).items()}
    graph.ndata["x"] = x
    total = torch.zeros((), dtype=torch.float64)
    found: dict[str, Any] = {"ids": part.ids, "eids": {}}
    for number, etype in enumerate(graph.canonical_etypes):
        for reduce in ("sum", "mean", "max", "min"):
            if number % 2:
                graph.update_all(
                    fn.u_mul_v("x", "x", "m") if etype[0] == etype[2] else fn.copy_u("x", "m"),
                    getattr(fn, reduce)("m", "out"), etype=etype,
                )  # fmt: skip
                out = graph.dstdata["out"][etype[2]]
            else:
                rel = graph[etype]
                rel.update_all(
                    fn.u_mul_v("x", "x", "m") if etype[0] == etype[2] else fn.copy_u("x", "m"),
                    getattr(fn, reduce)("m", "out"),
                )
                out = rel.dstdata["out"]
            found[f"{etype[1]} {reduce}"] = {etype[2]: out.detach()}
            total = total + (out * part.ids[etype[2]].view(-1, 1)).sum()
        found["eids"][etype] = part.eids(etype)
    total.backward()
    found["grad"] = {t: torch.zeros_like(r) if r.grad is None else r.grad for t, r in x.items()}
    return found


@pytest.mark.parametrize(
    ("size", "method", "rounds"),
    [(1, "metis", None), (3, "random", 2), (4, "adversarial", None), (8, "metis", 1)],
)
def test_every_relation(size: int, method: str, rounds: int | None, partitioned: Cutter) -> None:
    graph = hetero()
    one = to_dgl(graph)
    x = {t: rows.requires_grad_() for t, rows in inputs(graph).items()}
    path = partitioned(graph, size, method)
    parts = run_threads(size, case_relations, path, sar.Policy(rounds=rounds))
    total = torch.zeros((), dtype=torch.float64)
    for ntype, rows in x.items():
        one.nodes[ntype].data["x"] = rows
    for etype in graph.edges:
        for reduce in ("sum", "mean", "max", "min"):
            message = fn.u_mul_v("x", "x", "m") if etype[0] == etype[2] else fn.copy_u("x", "m")
            one.update_all(message, getattr(fn, reduce)("m", "out"), etype=etype)
            out = one.nodes[etype[2]].data["out"]
            got = by_type(parts, f"{etype[1]} {reduce}", etype[2])
            assert_close(got, out, f"{etype} {reduce}", torch.float64)
            total = total + (out * torch.arange(len(out)).view(-1, 1)).sum()
        eids = torch.cat([p["eids"][etype] for p in parts]).sort().values
        assert torch.equal(eids, torch.arange(one.num_edges(etype)))
    total.backward()
    for ntype, rows in x.items():
        got = by_type(parts, "grad", ntype)
        assert_close(got, rows.grad, f"gradient of {ntype}", torch.float64)


def case_members(group: Any, path: str) -> dict:
    part = HeteroPart(group, path)
    graph = part.graph
    rel = graph["buys"]
    with pytest.raises(ValueError, match="etype"):
        graph.num_edges("nothing")
    with pytest.raises((KeyError, ValueError), match="nobody"):
        graph.num_nodes("nobody")
    with pytest.raises(ValueError, match="etype"):
        graph.in_degrees()
    assert rel.canonical_etypes == [BUYS] and rel.etypes == ["buys"]
    assert (rel.srctypes, rel.dsttypes, rel.ntypes) == (["user"], ["item"], ["user", "item"])
    assert graph["follows"].is_homogeneous and not rel.is_homogeneous and not graph.is_homogeneous
    assert graph.to_canonical_etype("follows") == FOLLOWS
    rel.srcdata["h"] = torch.ones(rel.num_src_nodes(), 1)
    assert graph.ndata["h"]["user"] is rel.srcdata["h"], "a slice shares its columns"
    with graph.local_scope():
        graph.ndata["h"] = {"user": torch.zeros(graph.num_nodes("user"), 1)}
        assert bool((rel.srcdata["h"] == 0).all())
    assert bool((rel.srcdata["h"] == 1).all())
    graph.edata["w"] = {e: torch.ones(graph.num_edges(e), 2) for e in graph.canonical_etypes}
    with graph.local_scope():
        graph.edata["inner"] = {BUYS: torch.ones(rel.num_edges())}
        assert set(graph.edata["w"]) == set(graph.canonical_etypes) and "inner" in rel.edata
    assert "inner" not in graph.edata.keys() and rel.edata["w"].shape[1] == 2
    with pytest.raises(ValueError, match="got shape .* rows, one per local row of node type"):
        graph.srcdata["h"] = {"item": torch.ones(graph.num_src_nodes("item") + 3)}
    assert graph.ntypes_global == graph.ntypes == graph.srctypes == graph.dsttypes
    assert graph.canonical_etypes_global == graph.canonical_etypes
    assert graph.number_of_nodes_global("item") == rel.num_nodes_global("item")
    assert graph.number_of_edges_global("buys") == rel.num_edges_global()
    for t, ids in part.ids.items():
        assert graph.nodes(t).equal(torch.arange(len(ids)))
        assert len(graph._partition_book.partid2nids(group.rank, t)) == graph.number_of_nodes(t)
    return {
        "ids": part.ids,
        "types": (graph.ntypes, set(graph.canonical_etypes)),
        "nodes": {t: graph.num_nodes(t) for t in graph.ntypes},
        "edges": {
            e: (graph.num_edges(e), graph.num_edges_global(e)) for e in graph.canonical_etypes
        },
        "global": ({t: graph.num_nodes_global(t) for t in graph.ntypes}, graph.num_nodes_global()),
        "in": {e: {e[2]: graph.in_degrees(etype=e)} for e in graph.canonical_etypes},
        "out": {e: {e[0]: graph.out_degrees(etype=e)} for e in graph.canonical_etypes},
    }


@pytest.mark.parametrize(("size", "method"), [(1, "metis"), (4, "adversarial")])
def test_members(size: int, method: str, partitioned: Cutter) -> None:
    graph = hetero()
    one = to_dgl(graph)
    parts = run_threads(size, case_members, partitioned(graph, size, method))
    for part in parts:
        assert sorted(part["types"][0]) == sorted(one.ntypes)
        assert part["types"][1] == set(one.canonical_etypes)
        assert part["nodes"] == {t: len(ids) for t, ids in part["ids"].items()}
        assert part["global"] == (dict(graph.num_nodes), graph.total_nodes)
    for etype in graph.edges:
        assert sum(p["edges"][etype][0] for p in parts) == one.num_edges(etype)
        assert {p["edges"][etype][1] for p in parts} == {one.num_edges(etype)}
        for key, end, want in (
            ("in", 2, one.in_degrees(etype=etype)),
            ("out", 0, one.out_degrees(etype=etype)),
        ):
            degrees = [{"rows": p[key][etype], "ids": p["ids"]} for p in parts]
            assert torch.equal(by_type(degrees, "rows", etype[end]), want)


class Attributed(nn.Module):
    """A user's message over a relation, with parameters and a column of its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, rel: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        def message(edges: Any) -> dict[str, Tensor]:
            joint = self.fc(edges.src["h"] - edges.dst["h"])
            return {"m": torch.tanh(joint) * edges.data["w"]}

        with rel.local_scope():
            rel.srcdata["h"], rel.dstdata["h"] = pair
            rel.apply_edges(fn.u_dot_v("h", "h", "w"))
            rel.update_all(message, fn.max("m", "out"))
            return rel.dstdata["out"]


def test_self_loops_of_one_relation(partitioned: Cutter) -> None:
    """Ids stay distinct and ascending however often loops are added; a slice stays a slice."""
    one = to_dgl(hetero())["follows"]
    likes = {name: getattr(dgl, name)(one) for name in ("add_self_loop", "remove_self_loop")}
    path = partitioned(hetero(), 3, "random")

    def case(group: Any) -> list[Tensor]:
        graph = HeteroPart(group, path).graph
        twice = graph.add_self_loop("follows").add_self_loop("follows")
        assert twice.canonical_etypes == graph.canonical_etypes
        for name, like in likes.items():
            found = getattr(graph["follows"], name)()
            assert found.canonical_etypes == like.canonical_etypes == [FOLLOWS]
            assert found.num_edges_global() == like.num_edges()
        return list(twice.edata["_ID"].values())

    eids = [ids for rank in run_threads(3, case) for ids in rank]
    assert all((ids.diff() > 0).all() for ids in eids)
    every = torch.cat(eids)
    assert len(every.unique()) == len(every) == hetero().total_edges + 2 * one.num_nodes("user")


LAYERS = {
    "GraphConv": lambda: dglnn.GraphConv(WIDTH, 3),
    "GraphConv right": lambda: dglnn.GraphConv(WIDTH, 3, norm="right"),
    "SAGEConv mean": lambda: dglnn.SAGEConv(WIDTH, 3, "mean"),
    "SAGEConv gcn": lambda: dglnn.SAGEConv(WIDTH, 3, "gcn"),
    "SAGEConv pool": lambda: dglnn.SAGEConv(WIDTH, 3, "pool"),
    "GINConv": lambda: dglnn.GINConv(nn.Linear(WIDTH, 3), "mean"),
    "EdgeConv": lambda: dglnn.EdgeConv(WIDTH, 3),
    "a user's": Attributed,
}


def case_hetero_conv(group: Any, path: str, name: str, aggregate: str, state: dict) -> dict:
    part = HeteroPart(group, path)
    x = {t: rows[part.ids[t]].requires_grad_() for t, rows in inputs(hetero()).items()}
    conv = hetero_conv(name, aggregate)
    conv.load_state_dict(state)
    out = conv(part.graph, x)
    weighted_sum(out, part.ids).backward()
    sar.gather_grads(conv)
    return {
        "ids": part.ids, "out": {t: r.detach() for t, r in out.items()},
        "grad": {t: torch.zeros_like(r) if r.grad is None else r.grad for t, r in x.items()},
        "params": {n: p.grad for n, p in conv.named_parameters()},
    }  # fmt: skip


def weighted_sum(rows: dict[str, Tensor], ids: dict[str, Tensor]) -> Tensor:
    """Sum over all types, every row weighted by its original id."""
    parts = [r * ids[t].view(-1, *[1] * (r.dim() - 1)) for t, r in rows.items()]
    return torch.stack([part.sum() for part in parts]).sum()


def hetero_conv(name: str, aggregate: str) -> nn.Module:
    modules = {etype[1]: LAYERS[name]() for etype in hetero().edges}
    return dglnn.HeteroGraphConv(modules, aggregate=aggregate).double()


@pytest.mark.parametrize("name", LAYERS)
def test_hetero_graph_conv_over_each_layer(name: str, partitioned: Cutter) -> None:
    graph = hetero()
    aggregate = ["sum", "mean", "max", "min", "stack"][list(LAYERS).index(name) % 5]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        conv = hetero_conv(name, aggregate)
    x = {t: rows.requires_grad_() for t, rows in inputs(graph).items()}
    want = conv(to_dgl(graph), x)
    weighted_sum(want, {t: torch.arange(len(rows)) for t, rows in want.items()}).backward()
    path = partitioned(graph, 4, "random")
    parts = run_threads(4, case_hetero_conv, path, name, aggregate, conv.state_dict())
    for ntype, rows in want.items():
        assert_close(by_type(parts, "out", ntype), rows, ntype, torch.float64)
    for ntype, rows in x.items():
        grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
        got = by_type(parts, "grad", ntype)
        assert_close(got, grad, f"gradient of {ntype}", torch.float64)
    params = {n: p.grad for n, p in conv.named_parameters()}
    assert_gradients_close(parts[0]["params"], params, torch.float64)


def test_a_model_of_other_relations_is_named(partitioned: Cutter) -> None:
    """Where the model lacks a relation that has inputs; otherwise as DGL, which passes over it."""

    def case(group: Any) -> None:
        graph = HeteroPart(group, path).graph
        x = {t: torch.ones(graph.num_nodes(t), WIDTH) for t in graph.ntypes}
        names = ("buys", "bought_by", "follows", "sells")
        conv = dglnn.HeteroGraphConv({r: dglnn.SAGEConv(WIDTH, 3, "mean") for r in names})
        with pytest.raises(ValueError, match=r"'sells'.*none for .*'marks'.*'user', 'buys'"):
            conv(graph, x)
        del x["tag"]
        assert sorted(conv(graph, x)) == ["item", "user"]

    path = partitioned(hetero(), 2, "random")
    run_threads(2, case)


def test_blocks_of_several_types_over_processes(partitioned: Cutter, processes: WorkerPool) -> None:
    setting = Setting("HeteroGraphConv-mean", 1, mfgs=True, graph="sparse_hetero")
    path = partitioned(sample("sparse_hetero"), 3, "random")
    check(setting, processes.run(3, case_train, path, setting, start_state(setting)))
