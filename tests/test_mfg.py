"""Message flow graphs equal dgl.to_block on the whole graph, layer by layer."""

from __future__ import annotations

from typing import Any

import dgl
import pytest
import torch
from harness import run_threads
from harness.covering import by_pairs
from harness.graphs import GraphArrays, hetero, mixed, sample, to_dgl
from harness.parts import Cutter, joined
from harness.training import whole_blocks
from torch import Tensor

import sar

LAYERS = 3


def chosen(graph: GraphArrays, seeds: str) -> dict[str, Tensor]:
    """Original ids of the seeds per type."""
    rng = torch.Generator().manual_seed(4)
    picked = {}
    for ntype, count in graph.num_nodes.items():
        mask = {
            "some": torch.rand(count, generator=rng) < 0.2,
            "all": torch.ones(count, dtype=torch.bool),
            "none": torch.zeros(count, dtype=torch.bool),
            "one": torch.arange(count) == (3 if ntype in ("_N", "user") else -1),
        }[seeds]
        picked[ntype] = mask.nonzero().view(-1)
    return picked


def case_blocks(group: Any, path: str, seeds: dict[str, Tensor], keep: bool) -> list[dict]:
    """Per block what it holds, in original ids."""
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    orig = {t: data.node_features[f"{t}/orig_id"] for t in data.book.ntypes}
    first = {t: int(data.book.node_ranges[t][data.part_id, 0]) for t in data.book.ntypes}
    mine = [torch.isin(orig[t], seeds[t]).nonzero().view(-1) + first[t] for t in data.book.ntypes]
    mixed_order = torch.cat(mine).flip(0)  # construct_mfgs sorts them itself
    blocks = sar.construct_mfgs(data, mixed_order, LAYERS, keep)
    assert len(blocks) == LAYERS
    found = []
    for block in blocks:
        assert block.is_block
        held: dict[str, Any] = {"src": {}, "dst": {}, "etypes": {}}
        for t in data.book.ntypes:
            src, dst = block.srcnodes(t), block.dstnodes(t)
            assert block.num_src_nodes(t) == len(src) and block.num_dst_nodes(t) == len(dst)
            if keep:
                assert torch.equal(src[: len(dst)], dst), "the seeds come first"
            held["src"][t], held["dst"][t] = orig[t][src], orig[t][dst]
        for etype in block.canonical_etypes:
            rel = block[etype]
            eids = rel.edata[dgl.EID]
            assert torch.equal(eids, eids.sort().values)
            position = eids - int(data.book.edge_ranges[etype][data.part_id, 0])
            names = data.edge_features[":".join(etype) + "/orig_eid"][position]
            # Which rows an edge joins shows in what reaches its destination.
            ids = held["src"][etype[0]].double().view(-1, 1)
            held["etypes"][etype] = {
                "in": rel.in_degrees(), "out": rel.out_degrees(), "eids": names,
                "sum": rel.aggregate(ids, "sum").view(-1),
                "max": rel.aggregate(ids, "max").view(-1),
                "edges": rel.num_edges_global(),
            }  # fmt: skip
        found.append(held)
    assert [len(v) for v in (blocks[-1].seeds, blocks[0].input_nodes)] == [
        sum(map(len, found[-1]["dst"].values())), sum(map(len, found[0]["src"].values()))
    ]  # fmt: skip
    last = found[-1]["dst"]
    for t in data.book.ntypes:
        assert torch.equal(last[t], orig[t][torch.isin(orig[t], seeds[t])]), "sorted seeds"
    return found


def by_id(rows: list[Tensor], ids: list[Tensor]) -> tuple[Tensor, Tensor]:
    order = torch.cat(ids).sort()
    assert len(order.values.unique()) == len(order.values)
    return order.values, torch.cat(rows)[order.indices]


@by_pairs(
    name=["mixed", "hetero"],
    seeds=["some", "all", "one", "none"],
    keep=[True, False],
    cut=[(1, "coarsen"), (3, "random"), (4, "adversarial")],
)
def test_blocks_equal_to_block(
    name: str, seeds: str, keep: bool, cut: tuple[int, str], partitioned: Cutter
) -> None:
    graph = sample(name)
    picked, one = chosen(graph, seeds), to_dgl(graph)
    ranks = run_threads(cut[0], case_blocks, partitioned(graph, *cut), picked, keep)
    for layer, block in enumerate(whole_blocks(one, picked, LAYERS, keep)):
        parts = [rank[layer] for rank in ranks]
        for t in graph.num_nodes:
            for side, frame in (("src", block.srcnodes[t].data), ("dst", block.dstnodes[t].data)):
                got = torch.cat([p[side][t] for p in parts]).sort().values
                assert torch.equal(got, frame[dgl.NID].sort().values), (layer, t, side)
        for etype in graph.edges:
            src, dst = (block.srcnodes[etype[0]].data, block.dstnodes[etype[2]].data)
            held = [p["etypes"][etype] for p in parts]
            ids = {"in": (dst, "dst", 2), "out": (src, "src", 0)}
            degrees = {"in": block.in_degrees(etype=etype), "out": block.out_degrees(etype=etype)}
            for key, (frame, side, end) in ids.items():
                got = by_id([h[key] for h in held], [p[side][etype[end]] for p in parts])
                want = by_id([degrees[key]], [frame[dgl.NID]])
                assert torch.equal(got[1], want[1]), (layer, etype, key)
            eids = torch.cat([h["eids"] for h in held]).sort().values
            assert torch.equal(eids, block.edges[etype].data["orig_eid"].sort().values)
            assert {h["edges"] for h in held} == {block.num_edges(etype)}
            start, end = graph.edges[etype]
            for reduce in ("sum", "max"):
                got = by_id([h[reduce] for h in held], [p["dst"][etype[2]] for p in parts])
                want = torch.zeros(graph.num_nodes[etype[2]], dtype=torch.float64)
                op = "amax" if reduce == "max" else "sum"
                want.scatter_reduce_(0, end[eids], start[eids].double(), op)
                assert torch.equal(got[1], want[got[0]]), (layer, etype, reduce)


def case_bad_seeds(group: Any, path: str, kind: str) -> str:
    data = sar.load_dgl_partition_data(path, group.rank, "cpu")
    start, stop = data.book.part_ranges[data.part_id]
    good = torch.arange(start, min(start + 2, stop))
    bad = {
        "foreign": torch.tensor([stop if stop < data.book.num_nodes() else start - 1]),
        "repeated": torch.cat([good, good]),
        "float": good.float(),
        "matrix": good.view(-1, 1),
    }[kind]
    try:
        sar.construct_mfgs(data, bad if group.rank == 1 else good, 2)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("foreign", ["ValueError", "expected ids of this rank's part"]),
        ("repeated", ["ValueError", "repeated"]),
        ("float", ["TypeError", "integer"]),
        ("matrix", ["TypeError", "1-D"]),
    ],
)
def test_bad_seeds_raise_on_every_rank(kind: str, words: list[str], partitioned: Cutter) -> None:
    messages = run_threads(3, case_bad_seeds, partitioned(mixed(), 3, "random"), kind)
    assert len(set(messages)) == 1
    assert all(word in messages[0] for word in [*words, "rank 1", "seed_nodes"]), messages[0]


def test_hetero_input_rows_are_grouped_by_type(partitioned: Cutter) -> None:
    """``input_nodes`` counts from the part's first node, types one after the other."""

    def case(group: Any) -> tuple[Tensor, Tensor]:
        data = sar.load_dgl_partition_data(path, group.rank, "cpu")
        start, stop = data.book.part_ranges[data.part_id]
        block = sar.construct_mfgs(data, torch.arange(start, stop), 1)[0]
        return block.input_nodes, data.node_features["_TYPE"]

    path = partitioned(hetero(), 3, "random")
    for rows, types in run_threads(3, case):
        ordered = types[rows]
        assert torch.equal(ordered, ordered.sort().values)
        assert torch.equal(joined([rows], [rows], len(types)), torch.arange(len(types)))
