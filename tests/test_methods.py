"""Methods of cutting: what they promise holds on hard graphs, and how they fail."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from graphs_to_cut import (
    HARD,
    apart,
    assert_capacities,
    communities,
    cut_share,
    drawn,
    homogeneous,
    loads,
)
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from harness.parts import assign

from sar import MissingDependencyError, PartitionError
from sar.partition.methods.base import CutOptions, Method

ALL = frozenset({"edges", "halo", "train"})
no_dgl = pytest.mark.skipif(find_spec("dgl") is None, reason="dgl is not installed")
METIS = pytest.param("metis", marks=no_dgl)
SMALL = {"as it is": 1 << 22, "coarsened": 0}  # neighbors from which on a graph is coarsened first


# -------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(
    ("method", "balance", "above"),
    [
        ("coarsen", None, 1.03),
        ("coarsen", ALL, 1.05),
        ("random", None, 1.0),
        ("contiguous", None, 1.0),
    ],
)
def test_hard_graphs(tmp_path, name, method, balance, above):
    """Capacities hold, the same comes out again, and nothing is left on the disk."""
    make, num_parts = HARD[name]
    graph = make()
    parts = assign(graph, num_parts, method, 3, balance=balance, scratch=tmp_path)
    assert_capacities(graph, parts, num_parts, above)
    assert not list(tmp_path.iterdir())
    if name in ("types", "multi"):
        again = assign(graph, num_parts, method, 3, balance=balance)
        assert again.tobytes() == parts.tobytes()
    if method == "contiguous":
        for ntype, start in graph.node_offsets().items():
            assert (np.diff(parts[start : start + graph.num_nodes[ntype]]) >= 0).all()


def test_clusters_of_different_density_share_edges(monkeypatch):
    """Moves that each lose neighbors; also where the graph is coarsened first."""
    graph = apart()
    free = loads(graph, assign(graph, 8), 8)
    assert free.max() > 1.5 * free.mean()
    for small in SMALL.values():
        monkeypatch.setattr("sar.partition.methods.coarsen._SMALL", small)
        parts = assign(graph, 8, balance={"edges"})
        edges = loads(graph, parts, 8)
        assert edges.max() <= 1.06 * edges.mean()
        assert cut_share(graph, parts) < 0.5


def test_a_hub_is_no_reason_to_cut_everything():
    """Its edges alone are more than a part should have: the others share what is left."""
    rng = np.random.default_rng(0)
    base = communities(2000, 20_000, homophily=0.95, classes=8)
    src, dst = base.edges[ETYPE_HOMO]
    hub = torch.from_numpy(rng.permutation(2000)[:1900])
    ends = torch.cat([src, hub.repeat(3)]), torch.cat([dst, torch.zeros(5700, dtype=torch.int64)])
    graph = GraphArrays("g", {NTYPE_HOMO: 2000}, {ETYPE_HOMO: ends})
    free = cut_share(graph, assign(graph, 8))
    for seed in range(4):
        assert cut_share(graph, assign(graph, 8, "coarsen", seed, balance={"edges"})) < free + 0.1


@pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
def test_communities_are_found(small, monkeypatch):
    """A fifth of the edges goes between communities."""
    monkeypatch.setattr("sar.partition.methods.coarsen._SMALL", small)
    graph = communities(4000, 80_000, homophily=0.8, classes=4)
    parts = assign(graph, 4, "coarsen")
    assert cut_share(graph, parts) < 0.2
    halved = assign(graph, 4, "coarsen", 1, balance=ALL)
    assert cut_share(graph, halved) < 0.3
    edges = loads(graph, halved, 4)
    assert edges.max() <= 1.05 * edges.mean()
    train = np.bincount(halved[graph.node_data[NTYPE_HOMO]["train_mask"].numpy()], minlength=4)
    assert train.max() <= 1.05 * train.mean()


@pytest.mark.parametrize(
    ("method", "fillings"),
    [("coarsen", ["1", "255"]), pytest.param("metis", ["255"], marks=no_dgl)],
)
def test_what_memory_held_does_not_matter(monkeypatch, method, fillings):
    """Solvers read memory that they have not written: what was there must not be in the result."""
    graph = drawn(500, 3000)
    expected = assign(graph, 5, method, 5)
    for filling in fillings:
        monkeypatch.setenv("GLIBC_TUNABLES", f"glibc.malloc.perturb={filling}")
        monkeypatch.setenv("MALLOC_PERTURB_", filling)
        assert np.array_equal(assign(graph, 5, method, 5), expected)


@pytest.mark.parametrize("method", ["coarsen", METIS])
def test_a_file_of_the_user_is_not_taken_for_a_module(method, tmp_path, monkeypatch):
    """Of the current folder, which this process does not import from."""
    for name in ("random", "struct", "numpy", "dgl"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not for you')")
    monkeypatch.chdir(tmp_path)
    assert len(assign(drawn(60, 300), 3, method)) == 60


def test_what_may_be_asked_for():
    """One node or none, any seed, a word or several; numbers of parts that only some can number."""
    first, second = (assign(drawn(500, 3000), 5, "coarsen", seed) for seed in (5, 6))
    assert (first != second).any()
    assert assign(drawn(1, 3), 1).tolist() == [0]
    assert assign(homogeneous(0, [], []), 1).tolist() == []
    graph = drawn(200, 2000)
    asked = [assign(graph, 4, balance=balance).tobytes() for balance in (["edges"], "edges")]
    assert asked[0] == asked[1]
    for method in ("coarsen", "random"):
        assert assign(graph, 4, method, 2**40, balance=["nodes"]).shape == (200,)
    assert len(assign(drawn(70_000, 5), 32_769, "contiguous")) == 70_000


# ---------------------------------------------------------------------------------------- metis


def several_types() -> GraphArrays:
    """One without nodes."""
    sizes, rng = {"author": 7, "empty": 0, "paper": 20}, np.random.default_rng(0)
    pairs = [("author", "paper"), ("paper", "paper"), ("paper", "author")]
    edges = {
        (a, "to", b): tuple(torch.from_numpy(rng.integers(0, sizes[one], 60)) for one in (a, b))
        for a, b in pairs
    }
    return GraphArrays("h", sizes, edges)


def four_communities() -> GraphArrays:
    return communities(1000, 8000, homophily=0.95, classes=4)


@no_dgl
@pytest.mark.parametrize(
    "make", [several_types, pytest.param(four_communities, marks=pytest.mark.slow)]
)
def test_metis_is_repeatable_and_balances_each_type(make):
    """Also in several threads, and without a word it balances nodes alone where there are several
    types. Another seed is another cut, and so is one that balances edges."""
    graph = make()
    asked = (None, frozenset[str]() if make is several_types else None)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda b: assign(graph, 3, "metis", 5, balance=b), asked)
    np.testing.assert_array_equal(first, second)
    if make is several_types:
        assert (assign(graph, 3, "metis", 5, balance={"edges"}) != first).any()
    for ntype, start in graph.node_offsets().items():
        count = graph.num_nodes[ntype]
        sizes = np.bincount(first[start : start + count], minlength=3)
        assert sizes.max() - sizes.min() <= 4 + count // 30
    assert (assign(graph, 3, "metis", 6) != first).any()


@no_dgl
def test_metis_balances_edges_unless_it_is_not_to():
    """And far fewer edges are cut than at random."""
    graph, nodes = four_communities(), frozenset[str]()
    asked = {b: assign(graph, 4, "metis", balance=b) for b in (None, nodes)}
    spread = {b: loads(graph, parts, 4).max() * 4 / 8000 for b, parts in asked.items()}
    assert spread[None] < 1.1 and spread[None] < spread[nodes]
    assert cut_share(graph, asked[None]) < cut_share(graph, assign(graph, 4, "random")) / 2


@no_dgl
def test_metis_on_odd_graphs():
    """Nothing to cut, few nodes a part, and multi-edges, on which DGL's METIS crashes."""
    assert np.bincount(assign(homogeneous(9, [], []), 3, "metis")).tolist() == [3, 3, 3]
    assert np.bincount(assign(drawn(7, 20), 4, "metis")).max() == 2
    rng = np.random.default_rng(0)
    ends = (np.repeat(rng.integers(0, most, 20_000), 20) for most in (2000, 50))
    assert len(assign(homogeneous(2000, *ends), 8, "metis")) == 2000


# ---------------------------------------------------------------------------------------- errors


def wrong_ids() -> GraphArrays:
    graph = drawn(9, 20)
    graph.edges[ETYPE_HOMO][0][3] = 9
    return graph


NINE = drawn(9, 20)
BALANCED = {"balance": {"edges"}}


@pytest.mark.parametrize(
    ("graph", "num_parts", "method", "options", "said"),
    [
        *(
            (NINE, number, method, {}, f"num_parts is {number}")
            for number in (0, -1, 10)
            for method in ("coarsen", "metis", "random", "contiguous")
        ),
        (homogeneous(0, [], []), 2, "coarsen", {}, "'g' has 0 nodes"),
        (drawn(70_000, 5), 32769, "coarsen", {}, "is 32769, expected at most 32768"),
        (NINE, 2, "random", {"seed": -1}, "seed is -1, expected 0 or more"),
        (NINE, 2, "mets", {}, "method is 'mets', expected one of coarsen, hotness"),
        (NINE, 2, "coarsen", {"balance": {"edge"}}, "'edge', expected some of nodes, edges, halo"),
        (NINE, 2, "coarsen", {"balance": "edge"}, "got 'edge', expected"),
        (NINE, 2, "random", BALANCED, "'random' balances nothing but nodes, got 'edges'"),
        (NINE, 2, "metis", {"balance": {"halo"}}, "'metis' balances edges, got 'halo'"),
        (wrong_ids(), 2, "coarsen", {}, r"src ids span \[\d, 9\], expected \[0, 8\]"),
        (wrong_ids(), 2, "contiguous", {}, r"src ids span \[\d, 9\], expected \[0, 8\]"),
    ],
)  # fmt: skip
def test_what_cannot_be(graph, num_parts, method, options, said):
    with pytest.raises(ValueError, match=said):
        assign(graph, num_parts, method, **options)


def test_what_is_no_method():
    with pytest.raises(TypeError, match="method is int, expected a name or a Method"):
        assign(NINE, 2, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "gives",
    [np.zeros(8, int), np.zeros(9), np.full(9, 2), np.full(9, -1), None],
    ids=["short", "floats", "too large", "negative", "nothing"],
)
def test_what_a_method_gives_is_checked(gives):
    class Own(Method):
        name = "own"

        def assign(self, graph: GraphArrays, options: CutOptions) -> np.ndarray:
            return gives

    with pytest.raises(PartitionError, match="method 'own' gave"):
        assign(NINE, 2, Own())


@pytest.mark.parametrize(
    ("method", "module", "needs"),
    [
        ("coarsen", "kaminpar", "pip install kaminpar"),
        pytest.param("metis", "dgl", "pip install dgl==1.1.3", marks=no_dgl),
    ],
)
def test_a_solver_that_is_missing_or_dies(tmp_path, monkeypatch, method, module, needs):
    """Another module of its name comes first."""
    monkeypatch.syspath_prepend(tmp_path)
    (scratch := tmp_path / "scratch").mkdir()
    for source, error, said in (
        (f"raise ModuleNotFoundError(\"No module named '{module}'\")", MissingDependencyError,
         f"method '{method}' needs {module}: {needs}"),
        ("import os; os.kill(os.getpid(), 9)", PartitionError, "killed by SIGKILL; out of memory"),
        ("import os; os.kill(os.getpid(), 11)", PartitionError, "killed by SIGSEGV"),
        ("raise MemoryError('no room')", PartitionError, "found no cut into 3 parts: .*room"),
    ):  # fmt: skip
        (tmp_path / f"{module}.py").write_text(source)
        with pytest.raises(error, match=said):
            assign(drawn(60, 300), 3, method, scratch=scratch)
        assert not list(scratch.iterdir())
