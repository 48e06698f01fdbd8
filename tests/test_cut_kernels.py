"""Loops of cutting against numpy's and scipy's: rows, clusters, contraction, refinement."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import assert_capacities, cut_share
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar.partition import buckets, progress
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.buckets import Rows, sort_rows
from sar.partition.methods import coarsen, refine
from sar.partition.methods.coarsen import bounds_of, find_clusters, write_contracted
from sar.partition.methods.graph import cut_graph
from sar.partition.quality import measure
from sar.partition.sources.generate import community_graph

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


def neighbors(rows: Rows) -> list[list[int]]:
    ends = zip(rows.indptr[:-1].tolist(), rows.indptr[1:].tolist())
    return [rows.values[low:high].tolist() for low, high in ends]


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that goes in blocks needs several."""
    monkeypatch.setattr(buckets, "BUCKET_PAIRS", 8)
    monkeypatch.setattr(progress, "BLOCK", 7)
    monkeypatch.setattr(coarsen, "_ROOM", 3)


@given(edges=pairs)
@examples
def test_rows_are_sorted_unique_and_symmetric(tiny_blocks, tmp_path, edges):
    whole = cut_graph(graph_of(edges), tmp_path)
    wanted = {(u, v) for u, v in edges if u != v}
    wanted |= {(v, u) for u, v in wanted}
    assert neighbors(whole.rows) == [sorted(v for u, v in wanted if u == w) for w in range(12)]
    assert whole.in_edges.tolist() == np.bincount([v for _, v in edges], minlength=12).tolist()


@given(edges=pairs, unique=st.booleans())
@examples
def test_sorted_rows_are_numpys(tiny_blocks, tmp_path, edges, unique):
    row, value = np.array(edges, np.int32).reshape(-1, 2).T.copy()
    blocks = [(row[low : low + 7], value[low : low + 7]) for low in range(0, len(row), 7)]
    rows = sort_rows(lambda _: iter(blocks), 12, tmp_path, unique=unique)
    take = np.unique if unique else np.sort
    assert neighbors(rows) == [take(value[row == number]).tolist() for number in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["indptr.npy", "values.npy"]


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
    sparse = pytest.importorskip("scipy.sparse")
    clusters = np.unique(names, return_inverse=True)[1].astype(np.int32)
    weights = np.arange(1, 13, dtype=np.int32)
    rows = cut_graph(graph_of(edges), tmp_path).rows
    count = write_contracted(rows, clusters, weights, tmp_path / "c.parhip")
    indptr, others, node_weights, edge_weights = read_parhip(tmp_path / "c.parhip")
    assert count == len(node_weights) == clusters.max() + 1
    whole = sparse.csr_matrix((np.ones(len(rows.values)), rows.values, rows.indptr), (12, 12))
    member = sparse.csr_matrix((np.ones(12), (np.arange(12), clusters)))
    wanted = (member.T @ whole @ member).toarray()
    np.fill_diagonal(wanted, 0)
    found = sparse.csr_matrix((edge_weights, others, indptr), wanted.shape).toarray()
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


@given(edges=pairs, most=st.integers(1, 8))
@examples
def test_clusters_are_bounded_and_numbered(tmp_path, edges, most):
    rows = cut_graph(graph_of(edges), tmp_path).rows
    weights = np.arange(1, 13, dtype=np.int32) % 4 + 1
    clusters = find_clusters(rows, weights, most)
    assert set(clusters.tolist()) == set(range(clusters.max() + 1))
    for number in range(clusters.max() + 1):
        members = clusters == number
        assert members.sum() == 1 or weights[members].sum() <= most


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
