"""Blocks that are made past DGL's checks, beside those of ``dgl.create_block``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

dgl = pytest.importorskip("dgl")

from sar.frontends.dgl.batches import make_block  # noqa: E402

EType = tuple[str, str, str]
SOURCES, TARGETS = {"a": 30, "b": 20, "c": 7}, {"a": 10, "b": 20, "c": 0}
EDGES = {("b", "x", "a"): 40, ("a", "y", "a"): 25, ("a", "x", "b"): 60, ("c", "z", "b"): 0}


def _ends(etype: EType) -> tuple[Tensor, Tensor]:
    src = torch.randint(SOURCES[etype[0]], (EDGES[etype],))
    return src, torch.randint(TARGETS[etype[2]], (EDGES[etype],)).sort().values


@pytest.mark.parametrize("sorted_relations", [(), tuple(EDGES), tuple(EDGES)[1:3]])
def test_a_block_is_dgls(sorted_relations: tuple[EType, ...]) -> None:
    torch.manual_seed(0)
    edges = {etype: _ends(etype) for etype in EDGES}
    starts = {}
    for etype in sorted_relations:
        counts = torch.bincount(edges[etype][1], minlength=TARGETS[etype[2]])
        starts[etype] = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    made = make_block(edges, starts, SOURCES, TARGETS)
    expected = dgl.create_block(edges, SOURCES, TARGETS)
    assert made.canonical_etypes == expected.canonical_etypes
    assert (made.srctypes, made.dsttypes) == (expected.srctypes, expected.dsttypes)
    for ntype in SOURCES:
        assert made.num_src_nodes(ntype) == SOURCES[ntype]
        assert made.num_dst_nodes(ntype) == TARGETS[ntype]
    for etype in EDGES:
        both = (graph.edges(form="all", order="eid", etype=etype) for graph in (made, expected))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*both, strict=True))
        assert torch.equal(made.in_degrees(etype=etype), expected.in_degrees(etype=etype))


def test_a_block_of_one_relation_is_without_types() -> None:
    etype = ("_N", "_E", "_N")
    ends = torch.tensor([0, 3, 2]), torch.tensor([0, 0, 1])
    starts = {etype: torch.tensor([0, 2, 3])}
    block = make_block({etype: ends}, starts, {"_N": 4}, {"_N": 2})
    block.srcdata["h"] = torch.arange(4.0)
    block.update_all(dgl.function.copy_u("h", "m"), dgl.function.sum("m", "s"))
    assert block.dstdata["s"].tolist() == [3.0, 2.0]
    assert repr(block) == repr(dgl.create_block({etype: ends}, {"_N": 4}, {"_N": 2}))
