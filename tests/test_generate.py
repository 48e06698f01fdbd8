"""Generated graphs: size, symmetry, skew, what there is to learn, the seed."""

import pytest
import torch
from graphs_to_cut import community_graph
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.partition.sources.generate import bibliography_graph, rmat_graph


def pairs(graph: GraphArrays) -> set[tuple[int, int]]:
    src, dst = graph.edges[ETYPE_HOMO]
    return set(zip(src.tolist(), dst.tolist()))


def check_simple_and_symmetric(graph: GraphArrays) -> None:
    graph.validate()
    found = pairs(graph)
    assert len(found) == graph.total_edges, "duplicates"
    assert {(b, a) for a, b in found} == found


@given(nodes=st.integers(2, 40), share=st.floats(0, 1), seed=st.integers(0, 99), odd=st.booleans())
@settings(max_examples=40, deadline=None)
def test_community_graph_is_simple_symmetric_and_as_large_as_asked(nodes, share, seed, odd):
    edges = max(0, int(nodes * (nodes - 1) / 4 * share) - odd)
    graph = community_graph(nodes, edges, seed, classes=3, features=4)
    check_simple_and_symmetric(graph)
    assert graph.total_edges == edges + edges % 2
    assert all(a != b for a, b in pairs(graph))
    assert pairs(graph) == pairs(community_graph(nodes, edges, seed, classes=3, features=1))


def test_community_graph_has_the_standard_fields():
    graph = community_graph(500, 2000, features=7, classes=5)
    assert pairs(graph) != pairs(community_graph(500, 2000, 1, features=7, classes=5))
    data = graph.node_data[NTYPE_HOMO]
    masks = [f"{split}_mask" for split in ("train", "val", "test")]
    kinds = {"feat": ((500, 7), torch.float32), "label": ((500,), torch.int64)}
    kinds |= {mask: ((500,), torch.bool) for mask in masks} | {"orig_id": ((500,), torch.int64)}
    assert {name: (tuple(v.shape), v.dtype) for name, v in data.items()} == kinds
    assert (sum(data[mask].int() for mask in masks) == 1).all()
    assert data["label"].min() >= 0 and data["label"].max() == 4


def test_degrees_are_skewed_and_edges_mostly_inside_communities():
    graph = community_graph(20_000, 200_000, features=2)
    src, dst = graph.edges[ETYPE_HOMO]
    label = graph.node_data[NTYPE_HOMO]["label"]
    degree = torch.bincount(dst, minlength=20_000)
    assert degree.max() > 20 * degree.float().mean()
    inside = (label[src] == label[dst]).float().mean()
    assert 0.5 < inside < 0.75


IMPOSSIBLE = [
    *[
        (community_graph, {"nodes": 10, "edges": 4, **changes}, "expected|too many")
        for changes in (
            {"nodes": 1, "edges": 0}, {"edges": 1000}, {"edges": -1}, {"classes": 0},
            {"homophily": 1.5}, {"exponent": 1.0},
            {"edges": 20, "classes": 1000, "homophily": 1.0},
        )
    ],
    *[
        (rmat_graph, changes, "expected")
        for changes in (
            {"scale": 0}, {"samples": -1}, {"a": 0.9, "b": 0.2}, {"a": -0.1}, {"classes": 0},
        )
    ],
    *[
        (bibliography_graph, changes, "expected")
        for changes in ({"papers": 30}, {"classes": 0}, {"features": 0}, {"homophily": 1.5})
    ],
]  # fmt: skip


@pytest.mark.parametrize(("make", "arguments", "words"), IMPOSSIBLE)
def test_impossible_graphs_are_refused(make, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(**arguments)


def test_rmat_graph_is_simple_symmetric_with_all_loops():
    graph = rmat_graph(scale=8, samples=2000, features=3, classes=4)
    check_simple_and_symmetric(graph)
    assert {(i, i) for i in range(256)} <= pairs(graph)
    data = graph.node_data[NTYPE_HOMO]
    assert data["feat"].shape == (256, 3)
    assert set(data["label"].tolist()) <= set(range(4))
    assert pairs(graph) == pairs(rmat_graph(scale=8, samples=2000, features=1))
    assert pairs(graph) != pairs(rmat_graph(scale=8, samples=2000, features=1, seed=1))


def test_rmat_quadrants_have_the_asked_shares():
    """Ids are permuted, so the skew shows as one very busy node where a dominates."""
    skewed = rmat_graph(scale=10, samples=5000, features=1)
    even = rmat_graph(scale=10, samples=5000, a=0.25, b=0.25, c=0.25, features=1)

    def largest(graph):
        return int(torch.bincount(graph.edges[ETYPE_HOMO][1]).max())

    assert largest(skewed) > 5 * largest(even)


def test_bibliography_has_communities_in_every_relation():
    graph = bibliography_graph(papers=300, seed=1).validate()
    assert graph.num_nodes == {"author": 150, "paper": 300, "term": 30}
    assert len(graph.edges) == 5 and graph.total_edges == 300 * (2 * 2 + 2 * 3 + 3)
    labels = graph.node_data["paper"]["label"]
    src, dst = graph.edges["paper", "cites", "paper"]
    assert 0.8 < float((labels[src] == labels[dst]).float().mean()) < 0.9
    same = bibliography_graph(papers=300, seed=1)
    assert all(torch.equal(ends[0], same.edges[etype][0]) for etype, ends in graph.edges.items())
    for pair in (("author", "writes", "paper"), ("paper", "written_by", "author")):
        assert graph.edges[pair][pair[0] == "paper"].max() < 150
