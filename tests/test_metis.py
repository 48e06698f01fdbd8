"""METIS: what DGL's solver is given, and that the result depends on that alone."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from graphs_to_cut import cut_share, drawn, homogeneous, loads

from sar.errors import MissingDependencyError, PartitionError
from sar.partition.arrays import GraphArrays
from sar.partition.cut import assign
from sar.partition.sources.generate import community_graph

pytest.importorskip("dgl")


def typed(edges: int = 60) -> GraphArrays:
    """Several types, one without nodes."""
    sizes, rng = {"author": 7, "empty": 0, "paper": 20}, np.random.default_rng(0)
    pairs = [("author", "paper"), ("paper", "paper"), ("paper", "author")]
    return GraphArrays("h", sizes, {
        (a, "to", b): (
            torch.from_numpy(rng.integers(0, sizes[a], edges)),
            torch.from_numpy(rng.integers(0, sizes[b], edges)),
        )
        for a, b in pairs
    })  # fmt: skip


def plain() -> GraphArrays:
    return drawn(30, 120)


def communities() -> GraphArrays:
    return community_graph(300, 1000, features=1)


@pytest.mark.parametrize("make", [plain, typed, communities])
def test_a_cut_is_repeatable_and_balanced(make):
    graph = make()
    parts = assign(graph, 3, "metis", 5)
    np.testing.assert_array_equal(parts, assign(graph, 3, "metis", 5))
    for ntype, start in graph.node_offsets().items():
        count = graph.num_nodes[ntype]
        sizes = np.bincount(parts[start : start + count], minlength=3)
        assert sizes.max() - sizes.min() <= 4 + count // 30


def test_a_cut_does_not_depend_on_what_memory_held(monkeypatch):
    graph = communities()
    expected = assign(graph, 3, "metis", 5)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=1")
    monkeypatch.setenv("MALLOC_PERTURB_", "1")
    np.testing.assert_array_equal(assign(graph, 3, "metis", 5), expected)


def test_cuts_on_several_threads_do_not_disturb_each_other():
    graph = community_graph(1000, 10_000, features=1)
    alone = assign(graph, 4, "metis")
    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(lambda _: assign(graph, 4, "metis"), range(2)):
            np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_each_node_type_is_balanced(seed):
    rng = np.random.default_rng(0)
    sizes = {"a": 100, "b": 400}
    edges = {
        ("a", "to", "b"): tuple(torch.from_numpy(rng.integers(0, n, 2000)) for n in sizes.values())
    }
    parts = assign(GraphArrays("h", sizes, edges), 4, "metis", seed)
    for own in (parts[:100], parts[100:]):
        counts = np.bincount(own, minlength=4)
        assert counts.max() - counts.min() <= 4


def test_another_seed_is_another_cut():
    first, second = (assign(communities(), 4, "metis", seed) for seed in (1, 2))
    assert (first != second).any()


def test_far_fewer_edges_are_cut_than_at_random():
    graph = community_graph(1000, 8000, features=1, homophily=0.95, classes=4)
    shares = {method: cut_share(graph, assign(graph, 4, method)) for method in ("metis", "random")}
    assert shares["metis"] < shares["random"] / 2


def test_edges_are_balanced_unless_they_are_not_to_be():
    graph = community_graph(2000, 20000, features=1)
    spread = {}
    for balance in (None, frozenset(), frozenset({"edges"})):
        edges = loads(graph, assign(graph, 4, "metis", balance=balance), 4)
        spread[balance] = edges.max() / edges.mean()
    assert spread[None] == spread[frozenset({"edges"})] < 1.1
    assert spread[None] < spread[frozenset()]


@pytest.mark.parametrize("make", [typed, communities])
def test_edges_are_left_alone_where_there_are_several_types(make):
    nodes, by_itself, edges = (
        assign(make(), 3, "metis", 5, balance=balance) for balance in (frozenset(), None, {"edges"})
    )
    assert (nodes != edges).any()
    np.testing.assert_array_equal(by_itself, nodes if make is typed else edges)


def test_nothing_to_cut_is_shared_out():
    assert np.bincount(assign(homogeneous(9, [], []), 3, "metis")).tolist() == [3, 3, 3]
    assert np.bincount(assign(drawn(7, 20), 4, "metis")).max() == 2
    with pytest.raises(ValueError, match="num_parts is 7, but graph 'g' has 3 nodes"):
        assign(drawn(3, 9), 7, "metis")


MULTI_EDGES = """
import numpy as np, torch
from sar.partition.arrays import ETYPE_HOMO, GraphArrays
from sar.partition.cut import assign
rng = np.random.default_rng(0)
src, dst = np.repeat(rng.integers(0, 2000, 20000), 20), np.repeat(rng.integers(0, 50, 20000), 20)
edges = {ETYPE_HOMO: (torch.from_numpy(src), torch.from_numpy(dst))}
print(np.bincount(assign(GraphArrays("m", {"_N": 2000}, edges), 8, "metis")).tolist())
"""


def test_multi_edges_are_survived():
    """In a process of its own: DGL's METIS, given these edges as they are, crashes."""
    done = subprocess.run(
        [sys.executable, "-c", MULTI_EDGES], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)) == 2000


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("raise ModuleNotFoundError(\"No module named 'dgl'\")", MissingDependencyError,
         "method 'metis' needs dgl: pip install dgl==1.1.3"),
        ("import os; os.kill(os.getpid(), 11)", PartitionError,
         "METIS found no cut into 2 parts: killed by SIGSEGV"),
    ],
    ids=["missing", "crash"],
)  # fmt: skip
def test_without_a_dgl_that_works(tmp_path, monkeypatch, source, error, said):
    (tmp_path / "dgl.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=said):
        assign(drawn(30, 120), 2, "metis")
