"""Typed layers on a graph of several types taken as one equal DGL's on ``dgl.to_homogeneous``."""

from __future__ import annotations

import copy
from typing import Any

import dgl
import pytest
import torch
from dgl import nn as dglnn
from harness import assert_close, assert_gradients_close, run_threads
from harness.graphs import EDGE_TYPES, GraphArrays, hetero, shop, to_dgl
from harness.parts import Cutter, joined, load_all
from harness.rows import whole
from harness.training import whole_blocks
from torch import Tensor, nn

import sar

WIDTH = 4
EDGES = "_N:_E:_N"
TYPES = len(shop().edges)

assert TYPES > EDGE_TYPES, "the types of relations are not those of the edge feature"
LAYERS = {
    "RelGraphConv norm": lambda: dglnn.RelGraphConv(WIDTH, WIDTH, TYPES, "bdd", 2),
    "HGTConv": lambda: dglnn.HGTConv(WIDTH, 2, 2, 3, TYPES, 0.0),
}


class Typed(nn.Module):
    """Two typed layers; ``types`` are node and edge types by graph, ``norm`` a factor per edge."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.layers = nn.ModuleList(LAYERS[name]() for _ in range(2)).double()

    def forward(self, graphs: list, x: Tensor, types: list, norm: list, presorted: bool) -> Tensor:
        for layer, graph, (ntype, etype), factor in zip(self.layers, graphs, types, norm):
            if self.name == "HGTConv":
                x = torch.tanh(layer(graph, x, ntype, etype, presorted=presorted))
            else:
                factor = factor if "norm" in self.name else None
                x = torch.tanh(layer(graph, x, etype, factor, presorted=presorted))
        return x


def run(net: Typed, graphs: list, nodes: tuple, edges: list, types: list, mfgs: bool) -> dict:
    """``nodes``: original ids of the first graph's sources and of the last one's destinations,
    ``edges``: of each graph's edges."""
    (src, dst), factors = nodes, whole(shop().total_edges, (1,), 1)
    x = whole(shop().total_nodes, (WIDTH,), 0)[src].requires_grad_()
    out = net(graphs, x, types, [factors[one] for one in edges], not mfgs)
    (out * (1 + dst).view(-1, 1)).sum().backward()
    return {"dst": dst, "out": out.detach(), "src": src, "x": x.grad, "net": net}


def case(group: Any, path: str, net: Typed, mfgs: bool, rounds: int | None) -> dict:
    data, policy = sar.load_dgl_partition_data(path, group.rank, "cpu"), sar.Policy(rounds=rounds)
    data = sar.to_homogeneous(data)
    nodes, edges = data.node_features["_N/orig_id"], data.edge_features[f"{EDGES}/orig_eid"]
    ntypes, etypes = data.node_features["_N/_TYPE"], data.edge_features[f"{EDGES}/_TYPE"]
    if mfgs:  # every third original id gets an output
        seeds = (nodes % 3 == 0).nonzero().view(-1) + data.node_ranges[group.rank][0]
        graphs = [block.with_policy(policy) for block in sar.construct_mfgs(data, seeds, 2)]
    else:
        graphs = [sar.construct_full_graph(data, policy)] * 2
    first = int(data.book.edge_ranges["_N", "_E", "_N"][data.part_id, 0])
    local = [graph.edata["_ID"] - first for graph in graphs]
    types = [(ntypes[g.srcnodes()], etypes[at]) for g, at in zip(graphs, local)]
    ends = nodes[graphs[0].srcnodes()], nodes[graphs[1].dstnodes()]
    found = run(copy.deepcopy(net), graphs, ends, [edges[at] for at in local], types, mfgs)
    sar.gather_grads(found["net"])
    return found


def reference(net: Typed, mfgs: bool) -> dict:
    joint = dgl.to_homogeneous(to_dgl(shop()))
    for data, name in ((joint.ndata, "orig_id"), (joint.edata, "orig_eid")):
        data[name], data["type"] = torch.arange(len(data["_ID"])), data["_TYPE"]
        del data["_ID"], data["_TYPE"]  # names of a block's own
    graphs = [joint, joint]
    if mfgs:
        graphs = whole_blocks(joint, {"_N": torch.arange(0, joint.num_nodes(), 3)}, 2)
    types = [(g.srcdata["type"], g.edata["type"]) for g in graphs]
    ends = graphs[0].srcdata["orig_id"], graphs[1].dstdata["orig_id"]
    return run(copy.deepcopy(net), graphs, ends, [g.edata["orig_eid"] for g in graphs], types, mfgs)


def by_id(parts: list[dict], key: str, ids: str) -> Tensor:
    found = torch.cat([part[key] for part in parts])
    every = found.new_zeros(shop().total_nodes, WIDTH)
    return every.index_copy(0, torch.cat([part[ids] for part in parts]), found)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("size", "method", "rounds", "mfgs"),
    [
        (1, "coarsen", None, False),
        (2, "random", None, True),
        (3, "random", 2, False),
        (4, "adversarial", 1, True),
        (8, "coarsen", 3, False),
    ],
)
def test_typed_layers(
    name: str, size: int, method: str, rounds: int | None, mfgs: bool, partitioned: Cutter
) -> None:
    if mfgs and name == "HGTConv":
        mfgs = False  # DGL's does not run on blocks
    torch.manual_seed(0)
    net = Typed(name)
    want = reference(net, mfgs)
    parts = run_threads(size, case, partitioned(shop(), size, method), net, mfgs, rounds)
    for key, ids in (("out", "dst"), ("x", "src")):
        rows = [by_id(some, key, ids) for some in (parts, [want])]
        assert_close(rows[0], rows[1], key, torch.float64)
    grads = [{n: p.grad for n, p in one["net"].named_parameters()} for one in (want, *parts)]
    for found in grads[1:]:
        assert_gradients_close(found, grads[0], torch.float64)


@pytest.mark.parametrize(("size", "method"), [(1, "coarsen"), (4, "adversarial"), (3, "random")])
def test_features_and_ids(size: int, method: str, partitioned: Cutter) -> None:
    """What all types have alike, types, and original numbers; degrees; an empty part."""

    def case(group: Any) -> dict:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        one = sar.to_homogeneous(data)
        assert one.node_ranges == data.node_ranges
        assert torch.equal(one.node_features["_TYPE"], data.node_features["_TYPE"])
        names = ("feat", "label", "train_mask", "_TYPE")
        found = {name: one.node_features[f"_N/{name}"] for name in names}
        found |= {name: one.edge_features[f"{EDGES}/{name}"] for name in ("weight", "type")}
        found["etype"] = one.edge_features[f"{EDGES}/_TYPE"]
        graph = sar.construct_full_graph(one)
        return found | {
            "in": graph.in_degrees(), "out": graph.out_degrees(),
            "nodes": one.node_features["_N/orig_id"],
            "edges": one.edge_features[f"{EDGES}/orig_eid"],
        }  # fmt: skip

    path = partitioned(shop(), size, method)
    parts, whole_graph = run_threads(size, case), to_dgl(shop())
    names = ["feat", "label", "train_mask"]
    want = dgl.to_homogeneous(whole_graph, ndata=names, edata=["weight", "type"])
    for key, ids, value in (
        *((name, "nodes", want.ndata[name]) for name in (*names, "_TYPE")),
        *((name, "edges", want.edata[name]) for name in ("weight", "type")),
        ("etype", "edges", want.edata["_TYPE"]),
        ("in", "nodes", want.in_degrees()),
        ("out", "nodes", want.out_degrees()),
    ):
        rows = joined([p[key] for p in parts], [p[ids] for p in parts], len(value))
        assert torch.equal(rows, value) and rows.dtype == value.dtype, key


def test_some_rows_are_those_of_the_whole(partitioned: Cutter) -> None:
    for part in load_all(partitioned(shop(), 4, "adversarial"), 4):
        one = sar.to_homogeneous(part).node_features
        for name in ("_N/feat", "_N/train_mask"):
            every, (dtype, shape) = one[name], one.info(name)
            assert (every.dtype, tuple(every.shape)) == (dtype, shape)
            for low in range(0, len(every) + 1, 7):
                for high in (low, min(low + 9, len(every)), len(every)):
                    assert torch.equal(one.rows(name, low, high), every[low:high])
        assert torch.equal(one.get_as("_N/feat", torch.bfloat16), one["_N/feat"].bfloat16())


def test_features_of_some_types_are_left_out(partitioned: Cutter) -> None:
    graph = GraphArrays(
        "partial", dict(hetero().num_nodes), dict(hetero().edges),
        {
            "item": {"feat": torch.ones(23, 2), "x": torch.ones(23, 2)},
            "tag": {"feat": torch.ones(9, 2), "x": torch.ones(9, 3)},
            "user": {"x": torch.ones(31, 2)},
        },
    )  # fmt: skip
    data = sar.load_dgl_partition_data(partitioned(graph, 1, "coarsen"), 0, "cpu")
    one = sar.to_homogeneous(data)
    assert set(one.node_features) == {"_TYPE", "_N/_TYPE"}
    assert set(one.edge_features) == {f"{EDGES}/_TYPE", f"{EDGES}/orig_eid"}
    with pytest.raises(TypeError, match="partition_data: got GraphArrays"):
        sar.to_homogeneous(graph)
