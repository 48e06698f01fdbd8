"""Loops of cutting against numpy's and scipy's: rows, clusters, contraction, refinement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import assert_capacities, community_graph, cut_share
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar.partition.methods import refine
from sar.partition.methods.coarsen import bounds_of, write_contracted
from sar.partition.methods.graph import cut_graph
from sar.partition.quality import measure

ALL = frozenset({"edges", "halo", "train"})
examples = settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
pairs = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=60)


def graph_of(edges: list[tuple[int, int]], nodes: int = 12) -> GraphArrays:
    src, dst = np.array(edges, np.int64).reshape(-1, 2).T.copy()
    ends = torch.from_numpy(src), torch.from_numpy(dst)
    return GraphArrays("g", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: ends})


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that goes in blocks needs several."""
    monkeypatch.setattr("sar.partition.buckets.BUCKET_PAIRS", 8)
    monkeypatch.setattr("sar.partition.progress.BLOCK", 7)
    monkeypatch.setattr("sar.partition.methods.coarsen._ROOM", 3)


def read_parhip(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """indptr, neighbors, weights of nodes and of edges, as the format's description has them."""
    data = path.read_bytes()
    version, nodes, edges = np.frombuffer(data, "<u8", 3)
    assert version == 8 + 16 + 32
    offsets = np.frombuffer(data, "<u8", int(nodes) + 1, 24)
    first = 24 + 8 * (int(nodes) + 1)
    assert offsets[0] == first
    rest = np.frombuffer(data, "<i4", offset=first)
    assert len(rest) == 2 * edges + nodes
    return (offsets - first) // 4, *np.split(rest, [int(edges), int(edges + nodes)])


@given(edges=pairs, names=st.lists(st.integers(0, 5), min_size=12, max_size=12))
@examples
def test_contraction_adds_edges_up(tiny_blocks, tmp_path, edges, names):
    clusters = np.unique(names, return_inverse=True)[1].astype(np.int32)
    weights = np.arange(1, 13, dtype=np.int32)
    rows = cut_graph(graph_of(edges), tmp_path).rows
    count = write_contracted(rows, clusters, weights, tmp_path / "c.parhip")
    indptr, others, node_weights, edge_weights = read_parhip(tmp_path / "c.parhip")
    assert count == len(node_weights) == clusters.max() + 1
    wanted, found = np.zeros((2, count, count), int)
    for u, v in {tuple(sorted(one)) for one in edges}:
        a, b = clusters[[u, v]]
        wanted[a, b], wanted[b, a] = (wanted[a, b] + 1,) * 2 if a != b else (0, 0)
    found[np.repeat(np.arange(count), np.diff(indptr.astype(int))), others] = edge_weights
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(node_weights, np.bincount(clusters, weights))
    assert not (tmp_path / "c.weights").exists()


def test_thinning_keeps_the_weight_of_cuts(tmp_path):
    """A tenth of the edges is drawn, the same from both ends; cuts weigh what they did."""
    rng = np.random.default_rng(0)
    src, dst = rng.integers(0, 3000, (2, 200_000)) % rng.integers(1, 3000, (2, 200_000))
    rows = cut_graph(graph_of(list(zip(src.tolist(), dst.tolist())), 3000), tmp_path).rows
    clusters, weights = np.arange(3000, dtype=np.int32) // 3, np.ones(3000, np.int32)
    found = []
    for most in (1 << 24, 20_000):
        write_contracted(rows, clusters, weights, tmp_path / "c.parhip", most_edges=most)
        indptr, others, _, edge_weights = read_parhip(tmp_path / "c.parhip")
        ends = np.repeat(np.arange(1000), np.diff(indptr.astype(np.int64)))
        up, down = ends < others, ends > others
        edges = sorted(zip(ends[up].tolist(), others[up].tolist(), edge_weights[up].tolist()))
        back = sorted(zip(others[down].tolist(), ends[down].tolist(), edge_weights[down].tolist()))
        assert edges == back
        half = (ends < 500) != (others < 500)
        found.append((len(others), edge_weights.sum(), edge_weights[half].sum()))
    whole, thin = found
    assert whole[0] > 100_000 and thin[0] <= 22_000
    np.testing.assert_allclose(thin[1:], whole[1:], rtol=0.05)


@pytest.mark.parametrize("balance", [frozenset(), ALL], ids=["nodes", "all"])
@pytest.mark.parametrize("num_parts", [4, 65])
def test_refinement_mends_any_start(tmp_path, balance, num_parts):
    graph = community_graph(4000, 60_000, features=1, homophily=0.9)
    whole = cut_graph(graph, tmp_path)
    bounds = bounds_of(balance)
    rng = np.random.default_rng(1)
    for name in ("one part", "drawn"):
        parts = rng.integers(0, num_parts if name == "drawn" else 1, 4000).astype(np.int16)
        before = cut_share(graph, parts)
        refine.refine(whole, parts, num_parts, bounds)
        assert_capacities(graph, parts, num_parts, bounds.nodes)
        if name == "drawn":
            assert cut_share(graph, parts) < before - 0.05
            if balance:
                found = measure(graph, parts, num_parts)
                assert found.edge_balance <= 1.06
                assert found.halo_balance <= (1.15 if num_parts == 4 else 1.75)
