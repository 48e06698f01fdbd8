"""Methods of cutting: what they promise holds on hard graphs, and how they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import HARD, apart, assert_capacities, cut_share, drawn, homogeneous, loads

from sar.errors import MissingDependencyError, PartitionError
from sar.partition import buckets, column
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.cut import METHODS, assign
from sar.partition.methods import coarsen, solver
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.coarsen import run_kaminpar, write_contracted
from sar.partition.methods.graph import cut_graph
from sar.partition.sources.generate import community_graph

ALL = frozenset({"edges", "halo", "train"})


# -------------------------------------------------------------------------------------- promises


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("balance", [None, ALL], ids=["nodes", "all"])
def test_hard_graphs(tmp_path, name, balance):
    """Capacities hold, the same comes out again, and nothing is left on the disk."""
    make, num_parts = HARD[name]
    graph = make()
    parts = assign(graph, num_parts, "coarsen", 3, balance=balance, scratch=tmp_path)
    assert_capacities(graph, parts, num_parts, 1.05 if balance else 1.03)
    assert not list(tmp_path.iterdir())
    if name in ("types", "multi"):
        again = assign(graph, num_parts, "coarsen", 3, balance=balance)
        assert again.tobytes() == parts.tobytes()


@pytest.mark.parametrize("method", ["random", "contiguous"])
@pytest.mark.parametrize("name", HARD)
def test_shares_without_a_look_at_edges(name, method):
    make, num_parts = HARD[name]
    graph = make()
    parts = assign(graph, num_parts, method, 3)
    assert_capacities(graph, parts, num_parts, 1.0)
    if method == "contiguous":
        for ntype, start in graph.node_offsets().items():
            assert (np.diff(parts[start : start + graph.num_nodes[ntype]]) >= 0).all()


def test_clusters_of_different_density_share_edges(monkeypatch):
    """Moves that each lose neighbors; also where the graph is coarsened first."""
    graph = apart()
    free = loads(graph, assign(graph, 8), 8)
    assert free.max() > 1.5 * free.mean()
    for small in (coarsen._SMALL, 0):
        monkeypatch.setattr(coarsen, "_SMALL", small)
        parts = assign(graph, 8, balance={"edges"})
        edges = loads(graph, parts, 8)
        assert edges.max() <= 1.06 * edges.mean()
        assert cut_share(graph, parts) < 0.5


def test_a_hub_is_no_reason_to_cut_everything():
    """Its edges alone are more than a part should have: the others share what is left."""
    rng = np.random.default_rng(0)
    base = community_graph(2000, 20_000, features=1, homophily=0.95, classes=8)
    src, dst = base.edges[ETYPE_HOMO]
    hub = torch.from_numpy(rng.permutation(2000)[:1900])
    ends = torch.cat([src, hub.repeat(3)]), torch.cat([dst, torch.zeros(5700, dtype=torch.int64)])
    graph = GraphArrays("g", {NTYPE_HOMO: 2000}, {ETYPE_HOMO: ends})
    free = cut_share(graph, assign(graph, 8))
    for seed in range(4):
        assert cut_share(graph, assign(graph, 8, "coarsen", seed, balance={"edges"})) < free + 0.1


@pytest.mark.parametrize("small", [0, coarsen._SMALL], ids=["coarsened", "as it is"])
def test_communities_are_found(small, monkeypatch):
    """A fifth of the edges goes between communities."""
    monkeypatch.setattr(coarsen, "_SMALL", small)
    graph = community_graph(4000, 80_000, features=1, homophily=0.8, classes=4)
    parts = assign(graph, 4, "coarsen")
    assert cut_share(graph, parts) < 0.2
    halved = assign(graph, 4, "coarsen", 1, balance=ALL)
    assert cut_share(graph, halved) < 0.3
    edges = loads(graph, halved, 4)
    assert edges.max() <= 1.05 * edges.mean()
    train = np.bincount(halved[graph.node_data[NTYPE_HOMO]["train_mask"].numpy()], minlength=4)
    assert train.max() <= 1.05 * train.mean()


CUT = """
import sys
from graphs_to_cut import drawn
from sar.partition.cut import assign
for seed in (5, 6):
    sys.stdout.buffer.write(assign(drawn(500, 3000), 5, "coarsen", seed).tobytes())
"""


def test_another_process_finds_the_same():
    own = [assign(drawn(500, 3000), 5, "coarsen", seed).tobytes() for seed in (5, 6)]
    assert own[0] != own[1]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", CUT], env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        capture_output=True, check=True,
    )  # fmt: skip
    assert done.stdout == b"".join(own)


@pytest.mark.parametrize("filling", ["1", "255"])
def test_what_memory_held_does_not_matter(monkeypatch, filling):
    """KaMinPar reads memory that it has not written: what was there must not be in the result."""
    graph = drawn(500, 3000)
    expected = assign(graph, 5, "coarsen", 5)
    monkeypatch.setenv("GLIBC_TUNABLES", f"glibc.malloc.perturb={filling}")
    monkeypatch.setenv("MALLOC_PERTURB_", filling)
    assert np.array_equal(assign(graph, 5, "coarsen", 5), expected)


def test_a_solvers_process_has_the_environment_of_this_one(monkeypatch):
    """But for memory."""
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("LD_PRELOAD", "libgomp.so:/opt/libjemalloc.so.2 libx.so")
    found = solver.environment()
    assert found["KEPT"] == "1"
    assert found["LD_PRELOAD"] == "libgomp.so:libx.so"


@pytest.mark.parametrize("method", ["coarsen", "metis"])
def test_a_file_of_the_user_is_not_taken_for_a_module(method, tmp_path, monkeypatch):
    """Of the current folder, which this process does not import from."""
    for name in ("random", "struct", "numpy", "dgl"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('not for you')")
    monkeypatch.chdir(tmp_path)
    assert len(assign(drawn(60, 300), 3, method)) == 60


def test_any_seed_that_is_not_negative():
    graph = drawn(60, 300)
    for method in ("coarsen", "random"):
        assert len(assign(graph, 3, method, 2**40)) == 60
    with pytest.raises(ValueError, match="seed is -1, expected 0 or more"):
        assign(graph, 3, "random", -1)


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("method", ["coarsen", "random", "contiguous"])
@pytest.mark.parametrize("num_parts", [0, -1, 10])
def test_numbers_of_parts_that_cannot_be(method, num_parts):
    with pytest.raises(ValueError, match=f"num_parts is {num_parts}"):
        assign(drawn(9, 20), num_parts, method)


def test_one_node_and_none():
    assert assign(drawn(1, 3), 1).tolist() == [0]
    assert assign(homogeneous(0, [], []), 1).tolist() == []
    with pytest.raises(ValueError, match="has 0 nodes"):
        assign(homogeneous(0, [], []), 2)


def test_more_parts_than_the_refinement_can_number():
    assert len(assign(drawn(70_000, 5), coarsen.MAX_PARTS + 1, "contiguous")) == 70_000
    with pytest.raises(ValueError, match="num_parts is 32769, expected at most 32768"):
        assign(drawn(70_000, 5), coarsen.MAX_PARTS + 1, "coarsen")


@pytest.mark.parametrize(
    ("method", "balance", "said"),
    [
        ("coarsen", {"edge"}, "got 'edge', expected some of nodes, edges, halo, train"),
        ("coarsen", "edge", "got 'edge', expected"),
        ("random", {"edges"}, "method 'random' balances nothing but nodes, got 'edges'"),
        ("metis", {"halo"}, "method 'metis' balances edges, got 'halo'"),
    ],
)
def test_what_cannot_be_balanced(method, balance, said):
    with pytest.raises(ValueError, match=said):
        assign(drawn(9, 20), 2, method, balance=balance)


def test_nodes_and_one_word_may_be_asked_for():
    graph = drawn(200, 2000)
    asked = [assign(graph, 4, balance=balance).tobytes() for balance in (["edges"], "edges")]
    assert asked[0] == asked[1]
    assert assign(graph, 4, "random", balance=["nodes"]).shape == (200,)


def test_a_wrong_method():
    with pytest.raises(ValueError, match="method is 'mets', expected one of coarsen, hotness"):
        assign(drawn(9, 20), 2, "mets")
    with pytest.raises(TypeError, match="method is int, expected a name or a Method"):
        assign(drawn(9, 20), 2, 3)  # type: ignore[arg-type]
    assert METHODS == ("coarsen", "hotness", "metis", "random", "contiguous")


@pytest.mark.parametrize("method", ["coarsen", "contiguous"])
def test_ids_of_no_node(method):
    graph = drawn(9, 20)
    graph.edges[ETYPE_HOMO][0][3] = 9
    with pytest.raises(ValueError, match=r"src ids span \[\d, 9\], expected \[0, 8\]"):
        assign(graph, 2, method)


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
        assign(drawn(9, 20), 2, Own())


def no_kaminpar(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Another module of its name comes first."""
    (folder / "kaminpar.py").write_text(source)
    monkeypatch.syspath_prepend(folder)


def test_without_kaminpar(tmp_path, monkeypatch):
    no_kaminpar(tmp_path, monkeypatch, "raise ModuleNotFoundError(\"No module named 'kaminpar'\")")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with pytest.raises(MissingDependencyError, match="needs kaminpar: pip install kaminpar"):
        assign(drawn(60, 300), 3, "coarsen", scratch=scratch)
    assert not list(scratch.iterdir())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL; out of memory"),
        ("raise MemoryError('no room')", "room"),
    ],
)
def test_kaminpar_that_dies(tmp_path, monkeypatch, source, said):
    no_kaminpar(tmp_path, monkeypatch, source)
    with pytest.raises(PartitionError, match=f"found no cut into 3 parts: .*{said}"):
        assign(drawn(60, 300), 3, "coarsen")


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: bytes(8) + data[8:]])
def test_a_damaged_file_for_kaminpar(tmp_path, damage):
    rows = cut_graph(drawn(60, 300), tmp_path).rows
    path = tmp_path / "c.parhip"
    count = write_contracted(rows, np.arange(60, dtype=np.int32), np.ones(60, np.int32), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PartitionError, match="KaMinPar found no cut into 3 parts"):
        run_kaminpar(path, count, 3, 0)


@pytest.mark.parametrize("name", ["spread", "values", "indptr", "clusters"])
def test_a_full_disk(tmp_path, monkeypatch, name):
    """The kernel refuses room to one file after another."""
    real = column.create_array

    def create(path: Path, *rest):
        if path.stem == name:
            monkeypatch.setattr(os, "posix_fallocate", full)
        return real(path, *rest)

    def full(*_):
        raise OSError(28, "No space left on device")

    for module in (buckets, solver):
        monkeypatch.setattr(module, "create_array", create)
    with pytest.raises(OSError, match=f"{name}.npy: could not be written: No space left"):
        assign(drawn(60, 300), 3, "coarsen", scratch=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("name", ["c.parhip", "c.weights"])
def test_a_full_disk_for_the_coarse_graph(tmp_path, name):
    rows = cut_graph(drawn(60, 300), tmp_path).rows
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match="c.parhip: could not be written: "):
        write_contracted(
            rows, np.arange(60, dtype=np.int32), np.ones(60, np.int32), tmp_path / "c.parhip"
        )
