"""``multi_update_all`` equals DGL's, and rows that several relations read travel once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dgl import function as fn
from harness import assert_close, run_threads
from harness.graphs import shop, to_dgl
from harness.parts import Cutter, load_all
from harness.rows import whole
from harness.training import train_nodes, typed_graph, whole_blocks
from torch import Tensor

import sar

WIDTH = 3
CROSS = ["sum", "mean", "max", "min", "stack"]
EType = tuple[str, str, str]


def copy(op: str) -> tuple:
    return fn.copy_u("h", "m"), getattr(fn, op)("m", "out")


def scaled_message(edges: Any) -> dict[str, Tensor]:
    return {"m": torch.tanh(edges.src["h"]) * edges.dst["h"] * edges.data["w"].view(-1, 1)}


def shifted(nodes: Any) -> dict[str, Tensor]:
    return {"out": 2 * nodes.data["out"] + nodes.data["h"]}


# What the relations do, by name.
PROGRAMS: dict[str, dict[Any, tuple]] = {
    "all sums": {e: copy("sum") for e in shop().edges},
    "all means": {e: copy("mean") for e in shop().edges},
    "all maxima": {e: copy("max") for e in shop().edges},
    "mixed": {
        "follows": copy("min"),
        "buys": copy("mean"),
        "bought_by": copy("sum"),
        "carries": copy("sum"),
        "marks": copy("max"),  # DGL looks at the last one to see whether infinities may come
    },
    "messages": {
        "marks": (fn.u_mul_e("h", "w", "m"), fn.mean("m", "out")),
        ("user", "buys", "item"): (scaled_message, fn.sum("m", "out")),
        "follows": (fn.u_sub_v("h", "h", "m"), fn.sum("m", "out"), shifted),
        "bought_by": (fn.u_mul_e("h", "w", "m"), fn.sum("m", "out")),
    },
}


def inputs() -> tuple[dict[str, Tensor], dict[EType, Tensor]]:
    graph = shop()
    rows = {t: whole(n, (WIDTH,), seed) for seed, (t, n) in enumerate(graph.num_nodes.items())}
    edges = {e: whole(len(graph.edges[e][0]), (1,), 9 + i) for i, e in enumerate(graph.edges)}
    return rows, edges


def run(graph: Any, x: dict[str, Tensor], w: dict[EType, Tensor], name: str, cross: Any) -> dict:
    """The program on a graph or a block; rows by type. Destination rows come first in ``x``."""
    with graph.local_scope():
        for ntype, rows in x.items():
            graph.srcnodes[ntype].data["h"] = rows
            graph.dstnodes[ntype].data["h"] = rows[: graph.num_dst_nodes(ntype)]
        for etype in graph.canonical_etypes:
            graph.edges[etype].data["w"] = w[etype]
        apply = None if graph.is_block else lambda nodes: {"out": nodes.data["out"] * 3}
        graph.multi_update_all(PROGRAMS[name], cross, apply)
        into = {graph.to_canonical_etype(e)[2] for e in PROGRAMS[name]}
        return {t: graph.dstnodes[t].data["out"] for t in into}


def weighted(out: dict[str, Tensor], ids: dict[str, Tensor]) -> Tensor:
    parts = [(r * (1 + ids[t]).view(-1, *[1] * (r.dim() - 1))).sum() for t, r in out.items()]
    return torch.stack(parts).sum()


def case(group: Any, path: str, name: str, cross: Any, policy: sar.Policy, block: bool) -> dict:
    data, graph, src, dst = typed_graph(path, group.rank, policy, block)
    eids = {}
    for etype in graph.canonical_etypes:
        first = int(data.book.edge_ranges[etype][data.part_id, 0])
        local = graph.edges[etype].data["_ID"] - first
        eids[etype] = data.edge_features[":".join(etype) + "/orig_eid"][local]
    return outcome(graph, src, dst, eids, name, cross)


def outcome(graph: Any, src: dict, dst: dict, eids: dict, name: str, cross: Any) -> dict:
    """Results and gradients of the rows with these original ids."""
    rows, edges = inputs()
    x = {t: rows[t][src[t]].requires_grad_() for t in src}
    w = {e: edges[e][eids[e]].requires_grad_() for e in eids}
    out = run(graph, x, w, name, cross)
    weighted(out, dst).backward()
    return {
        "src": src, "dst": dst, "eids": eids, "out": {t: r.detach() for t, r in out.items()},
        "x": {t: grad_of(r) for t, r in x.items()}, "w": {e: grad_of(r) for e, r in w.items()},
    }  # fmt: skip


def grad_of(rows: Tensor) -> Tensor:
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


def reference(name: str, cross: Any, block: bool) -> dict:
    graph = to_dgl(shop())
    if block:
        graph = whole_blocks(graph, train_nodes(graph), 1)[0]
    src = {t: graph.srcnodes[t].data["orig_id"] for t in graph.srctypes}
    dst = {t: graph.dstnodes[t].data["orig_id"] for t in graph.dsttypes}
    eids = {e: graph.edges[e].data["orig_eid"] for e in graph.canonical_etypes}
    return outcome(graph, src, dst, eids, name, cross)


def by_id(parts: list[dict], key: str, ids: str, kind: Any, total: int) -> Tensor:
    """Rows of all ranks in the order of the original ids; 0 where a block has no row."""
    found = torch.cat([p[key][kind] for p in parts])
    every = found.new_zeros((total, *found.shape[1:]))
    return every.index_copy(0, torch.cat([p[ids][kind] for p in parts]), found)


def check(parts: list[dict], want: dict) -> None:
    graph = shop()
    for key, ids in (("out", "dst"), ("x", "src")):
        for ntype in want[key]:
            total = graph.num_nodes[ntype]
            rows = [by_id(p, key, ids, ntype, total) for p in (parts, [want])]
            assert_close(rows[0], rows[1], f"{key} of {ntype}", torch.float64)
    for etype in want["w"]:
        total = len(graph.edges[etype][0])
        rows = [by_id(p, "w", "eids", etype, total) for p in (parts, [want])]
        assert_close(rows[0], rows[1], f"gradient of {etype}", torch.float64)


SETTINGS = [
    (1, "coarsen", None, False), (2, "random", 1, True), (3, "random", 2, False),
    (4, "adversarial", None, True), (8, "coarsen", 3, False),
]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("number", range(len(CROSS)))
def test_equals_dgl(name: str, number: int, partitioned: Cutter) -> None:
    """Every program with every cross reducer; rank counts, cuts, rounds and blocks go round."""
    cross = CROSS[number]
    size, method, rounds, block = SETTINGS[(number + list(PROGRAMS).index(name)) % 5]
    policy = sar.Policy(rounds=rounds, rematerialize=number % 2 == 0)
    path = partitioned(shop(), size, method)
    check(run_threads(size, case, path, name, cross, policy, block), reference(name, cross, block))


def test_a_cross_reducer_of_ones_own(partitioned: Cutter) -> None:
    def cross(parts: list[Tensor]) -> Tensor:
        return parts[0] - 2 * parts[-1]

    path = partitioned(shop(), 3, "random")
    parts = run_threads(3, case, path, "messages", cross, sar.Policy(), False)
    check(parts, reference("messages", cross, False))


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_relations_at_once(op: str, partitioned: Cutter) -> None:
    """``update_all`` without a relation, as DGL's."""

    def out_of(graph: Any, x: dict[str, Tensor]) -> dict[str, Tensor]:
        graph.ndata["h"] = x
        graph.update_all(fn.copy_u("h", "m"), getattr(fn, op)("m", "out"))
        return graph.ndata["out"]

    def case(group: Any) -> dict:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        graph = sar.construct_full_graph(data)
        ids = {t: data.node_features[f"{t}/orig_id"] for t in data.book.ntypes}
        x = {t: inputs()[0][t][ids[t]].requires_grad_() for t in ids}
        out = out_of(graph, x)
        weighted(out, ids).backward()
        with pytest.raises(ValueError, match="etype: got None, expected one of.*'buys'"):
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "out"))
        with pytest.raises(ValueError, match="etype: got None"):
            graph.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "out"))
        graph.update_all(*copy(op), etype="follows")
        by_name = graph.dstnodes["user"].data["out"]
        graph["follows"].update_all(*copy(op))
        assert torch.equal(by_name, graph["follows"].dstdata["out"])
        assert graph["buys"].nodes["item"].data["out"] is graph.nodes["item"].data["out"]
        return {"ids": ids, "out": out, "x": {t: grad_of(rows) for t, rows in x.items()}}

    path, x = partitioned(shop(), 3, "random"), inputs()[0]
    parts = run_threads(3, case)
    want = out_of(to_dgl(shop()), {t: rows.requires_grad_() for t, rows in x.items()})
    weighted(want, {t: torch.arange(len(rows)) for t, rows in x.items()}).backward()
    for ntype, rows in x.items():
        found = [by_id(parts, key, "ids", ntype, len(rows)) for key in ("out", "x")]
        assert_close(found[0], want[ntype], f"{op} of {ntype}", torch.float64)
        assert_close(found[1], grad_of(rows), f"gradient of {ntype}", torch.float64)


def halo(path: str, size: int, etypes: list[EType]) -> int:
    """Rows that all ranks together need of others for the relations, each row once a type."""
    total = 0
    for data in load_all(path, size):
        for ntype in {etype[0] for etype in etypes}:
            for peer in range(size):
                if peer != data.part_id:
                    total += len(torch.cat([
                        (s := data.edges[e]).src[s.offsets[peer] : s.offsets[peer + 1]]
                        for e in etypes if e[0] == ntype
                    ]).unique())  # fmt: skip
    return total


def case_bytes(group: Any, path: str, op: str, together: bool) -> list[int]:
    """Bytes sent by a forward and by a backward pass."""
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data, policy=sar.Policy(exchange="pull"))
    x = {t: torch.randn(graph.num_nodes(t), 4, requires_grad=True) for t in graph.ntypes}
    graph.ndata["h"] = x
    marks = []
    for _ in range(2):  # what is built on first use is not counted
        marks = [group.counters.sent_bytes]
        if together:
            graph.multi_update_all({e: copy(op) for e in graph.canonical_etypes}, "sum")
            out = list(graph.ndata["out"].values())
        else:
            out = []
            for etype in graph.canonical_etypes:
                graph.update_all(*copy(op), etype=etype)
                out.append(graph.dstnodes[etype[2]].data["out"])
        marks.append(group.counters.sent_bytes)
        torch.stack([rows.sum() for rows in out]).sum().backward()
        marks.append(group.counters.sent_bytes)
    return [marks[1] - marks[0], marks[2] - marks[1]]


@pytest.mark.parametrize("op", ["mean", "max"])
def test_rows_of_a_type_travel_once(op: str, partitioned: Cutter) -> None:
    """Forward rows and backward gradients are those of the union; alone, those of a relation."""
    path, etypes = partitioned(shop(), 4, "random"), list(shop().edges)
    row = 4 * 4
    union = halo(path, 4, etypes) * row
    apart = sum(halo(path, 4, [etype]) for etype in etypes) * row
    assert union < 0.9 * apart
    for together, want in ((True, union), (False, apart)):
        sent = run_threads(4, case_bytes, path, op, together)
        assert [sum(pass_) for pass_ in zip(*sent)] == [want, want]


def case_refusals(group: Any, path: str) -> None:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    graph = sar.construct_full_graph(data)
    graph.ndata["h"] = {t: torch.ones(graph.num_nodes(t), 1) for t in graph.ntypes}
    before = group.counters.collectives
    for etypes, cross, words in (
        ({"sells": copy("sum")}, "sum", r"'sells'.*'user', 'buys', 'item'"),
        ({"buys": copy("sum")}, "median", "cross_reducer: got 'median'.*stack"),
        ({"buys": (fn.copy_u("h", "m"),)}, "sum", r"etype_dict\['buys'\].*message function, red"),
        ({"buys": copy("sum"), ("user", "buys", "item"): copy("sum")}, "sum", "twice"),
    ):
        with pytest.raises(ValueError, match=words):
            graph.multi_update_all(etypes, cross)
    with pytest.raises(TypeError, match="etype_dict: got list"):
        graph.multi_update_all([copy("sum")], "sum")
    with pytest.raises(KeyError, match="'x' for node type 'user'; there are: .*h"):
        graph.multi_update_all({"buys": (fn.copy_u("x", "m"), fn.sum("m", "out"))}, "sum")
    assert group.counters.collectives == before, "nothing was sent"


def test_bad_arguments_are_named_before_anything_is_sent(partitioned: Cutter) -> None:
    run_threads(2, case_refusals, partitioned(shop(), 2, "random"))
