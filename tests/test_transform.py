"""Both directions, no duplicates, loops: against the same with Python's sets and lists."""

import numpy as np
import pytest
import torch
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.partition.transform import Transforms, transform

ENDS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=25)


def homogeneous(pairs, count=7) -> GraphArrays:
    src, dst = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    data = {"weight": torch.arange(len(src)) * 1.5, "mask": torch.arange(len(src)) % 2 == 0}
    return GraphArrays("g", {NTYPE_HOMO: count}, {ETYPE_HOMO: (src, dst)}, {}, {ETYPE_HOMO: data})


def expected(pairs, wanted: Transforms, count=7) -> list[tuple]:
    """(src, dst, weight), as a user would write it."""
    weighted = [(u, v, 1.5 * at) for at, (u, v) in enumerate(pairs)]
    if wanted.symmetrise:
        weighted = weighted + [(v, u, w) for u, v, w in weighted]
    if wanted.self_loops != "keep":
        weighted = [one for one in weighted if one[0] != one[1]]
    if wanted.self_loops == "add":
        weighted += [(u, u, 1.0) for u in range(count)]
    if wanted.symmetrise or wanted.drop_duplicates:
        first: dict = {}
        for u, v, w in weighted:
            first.setdefault((v, u), w)
        weighted = [(u, v, first[v, u]) for v, u in sorted(first)]
    return weighted


@settings(deadline=None)
@given(ENDS, st.booleans(), st.booleans(), st.sampled_from(["keep", "add", "remove"]))
def test_edges_and_their_data(tmp_path_factory, pairs, symmetrise, drop, loops):
    wanted = Transforms(symmetrise, drop, loops)
    found = transform(homogeneous(pairs), wanted, tmp_path_factory.mktemp("t") / "t")
    src, dst = found.edges[ETYPE_HOMO]
    data = found.edge_data[ETYPE_HOMO]
    rows = list(zip(src.tolist(), dst.tolist(), data["weight"].tolist(), strict=True))
    assert rows == expected(pairs, wanted)
    assert data["mask"].dtype == torch.bool and len(data["mask"]) == len(src)


def test_blocks_and_buckets_that_are_smaller_than_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr("sar.partition.buckets.BUCKET_PAIRS", 64)
    monkeypatch.setattr("sar.partition.progress.BLOCK", 17)
    pairs = np.random.default_rng(0).integers(0, 50, (400, 2)).tolist()
    for wanted in (
        Transforms(True),
        Transforms(False, True, "add"),
        Transforms(False, False, "add"),
    ):
        folder = tmp_path / str(hash(wanted))
        found = transform(homogeneous(pairs, 50), wanted, folder)
        src, dst = found.edges[ETYPE_HOMO]
        weights = found.edge_data[ETYPE_HOMO]["weight"]
        rows = list(zip(src.tolist(), dst.tolist(), weights.tolist(), strict=True))
        assert rows == expected(pairs, wanted, 50)


def test_the_other_direction_between_types_is_a_type_of_its_own(tmp_path):
    ends = torch.tensor([0, 1, 1, 1]), torch.tensor([2, 0, 0, 1])
    likes = ("user", "likes", "item")
    data = {likes: {"weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}}
    graph = GraphArrays("shop", {"user": 2, "item": 3}, {likes: ends}, {}, data)
    found = transform(graph, Transforms(symmetrise=True, self_loops="add"), tmp_path / "t")
    src, dst = found.edges[likes]
    assert (src.tolist(), dst.tolist()) == ([1, 1, 0], [0, 1, 2])
    back = ("item", "rev_likes", "user")
    assert [one.tolist() for one in found.edges[back]] == [dst.tolist(), src.tolist()]
    assert found.edge_data[back]["weight"].tolist() == [2.0, 4.0, 1.0]
    with pytest.raises(ValueError, match="rev_likes"):
        transform(found, Transforms(symmetrise=True), tmp_path / "again")


def test_a_word_that_is_none_is_refused():
    with pytest.raises(ValueError, match="self_loops is 'both', expected one of keep, add, remove"):
        Transforms(self_loops="both")
