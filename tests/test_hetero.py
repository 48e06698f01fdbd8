"""Graphs of several types: what the graph and its slices say, and messages per relation."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from dgl import nn as dglnn
from harness import run_threads
from harness.graphs import hetero, to_dgl
from harness.parts import Cutter, joined
from torch import Tensor

import sar

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


def by_type(parts: list[dict], key: str, ntype: str) -> Tensor:
    ids = [p["ids"][ntype] for p in parts]
    return joined([p[key][ntype] for p in parts], ids, hetero().num_nodes[ntype])


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


@pytest.mark.parametrize(("size", "method"), [(1, "coarsen"), (4, "adversarial")])
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
