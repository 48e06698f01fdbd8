"""Methods of cutting: what they promise holds on hard graphs, their kernels agree with numpy's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from graphs_to_cut import HARD, apart, assert_capacities, cut_share, drawn, loads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar.errors import MissingDependencyError, PartitionError
from sar.partition import buckets, npy
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.buckets import Rows, sort_rows
from sar.partition.cut import METHODS, assign
from sar.partition.methods import coarse, coarsen, refine
from sar.partition.methods import graph as graph_module
from sar.partition.methods.base import CutOptions, Method
from sar.partition.methods.coarse import find_clusters, write_contracted
from sar.partition.methods.coarsen import bounds_of, node_weights, run_kaminpar
from sar.partition.methods.given import Given
from sar.partition.methods.graph import CutGraph, cut_graph
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


# ---------------------------------------------------------------------------------------- kernels


@pytest.fixture
def tiny_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that goes in blocks needs several."""
    monkeypatch.setattr(buckets, "BUCKET_PAIRS", 8)
    monkeypatch.setattr(graph_module, "BLOCK", 7)
    monkeypatch.setattr(coarse, "_ROOM", 3)


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
    rows = sort_rows(lambda: iter(blocks), 12, tmp_path, unique=unique)
    take = np.unique if unique else np.sort
    assert neighbors(rows) == [take(value[row == number]).tolist() for number in range(12)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["indptr.npy", "values.npy"]


def test_long_rows_are_sorted(tmp_path):
    """Longer than what is sorted by insertion."""
    values = np.random.default_rng(0).integers(0, 500, 1000).astype(np.int32)
    row = np.zeros(1000, np.int32)
    rows = sort_rows(lambda: iter([(row, values)]), 2, tmp_path, unique=False)
    assert neighbors(rows) == [np.sort(values).tolist(), []]


def test_types_lie_one_after_another(tmp_path):
    ends = torch.tensor([0, 1]), torch.tensor([1, 0])
    masks = {"b": {"train_mask": torch.tensor([False, True])}}
    whole = cut_graph(GraphArrays("h", {"a": 2, "e": 0, "b": 2}, {("a", "r", "b"): ends}, masks),
                      tmp_path)  # fmt: skip
    assert neighbors(whole.rows) == [[3], [2], [1], [0]]
    assert whole.types.tolist() == [0, 0, 2, 2] and whole.in_edges.tolist() == [0, 0, 1, 1]
    assert whole.train is not None and whole.train.tolist() == [False, False, False, True]


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


def test_clusters_hold_most_edges(tmp_path):
    """Where there are communities; singles hold none."""
    graph = community_graph(3000, 60_000, features=1, homophily=0.9)
    rows = cut_graph(graph, tmp_path).rows
    clusters = find_clusters(rows, np.ones(3000, np.int32), 200)
    assert cut_share(graph, clusters) < 0.5 and clusters.max() < 1500


@given(edges=pairs, parts=st.lists(st.integers(0, 69), min_size=12, max_size=12))
@examples
def test_halo_rows_are_counted_and_followed(tmp_path, edges, parts):
    """By node and part, also where a node's parts need two words; a move adds what it must."""
    whole = cut_graph(graph_of(edges), tmp_path)
    rows, owner = whole.rows, np.array(parts, np.int16)

    def needs() -> np.ndarray:
        found, halo = np.zeros((12, 2), np.uint64), np.zeros(70)
        refine._count_needs(rows.indptr, rows.values, owner, found, halo)
        bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")[:, :70]
        np.testing.assert_array_equal(halo, bits.sum(axis=0))
        return bits

    wanted = np.zeros((12, 70), np.uint8)
    for u, own in enumerate(neighbors(rows)):
        wanted[u, [owner[v] for v in own if owner[v] != owner[u]]] = 1
    np.testing.assert_array_equal(needs(), wanted)
    followed, halo = np.zeros((12, 2), np.uint64), np.zeros(70)
    refine._count_needs(rows.indptr, rows.values, owner, followed, halo)
    u, own, to = 3, int(owner[3]), (int(owner[3]) + 1) % 70
    near = sum(owner[v] == own for v in neighbors(rows)[u])
    fresh = refine._fresh(rows.indptr, rows.values, u, to, owner, followed)
    before = halo.copy()
    owner[u] = to
    change = refine._move_needs(rows.indptr, rows.values, u, own, to, near, owner, followed, halo)
    np.testing.assert_array_equal((halo - before).nonzero()[0] // 70, 0)
    assert change == (halo - before).sum() and halo[to] - before[to] <= fresh
    assert halo[to] == needs()[:, to].sum()


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
                assert loads(graph, parts, num_parts).max() <= 1.06 * 60_000 / num_parts


def test_weights_count_every_kind_the_same():
    types = np.repeat(np.arange(3, dtype=np.int16), [10, 40, 150])
    in_edges = np.random.default_rng(0).integers(0, 50, 200).astype(np.int32)
    whole = CutGraph(Rows(np.zeros(201, np.int64), np.zeros(0, np.int32)), types, in_edges, None)
    sizes = [10, 40, 150]
    by_type = np.bincount(types, node_weights(whole, sizes, frozenset()))
    np.testing.assert_allclose(by_type, by_type.mean(), rtol=0.05)
    with_edges = node_weights(whole, sizes, frozenset({"edges"}))
    more = with_edges - node_weights(whole, sizes, frozenset()) / 2
    np.testing.assert_allclose(more, 32 * in_edges / in_edges.mean(), atol=2)


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
    shares = [cut_share(graph, assign(graph, 8, balance=balance)) for balance in (None, {"edges"})]
    assert shares[1] < shares[0] + 0.1


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


def test_what_memory_held_does_not_matter(monkeypatch):
    """KaMinPar reads memory that it has not written: what Python left there must not be in it."""
    graph, found = drawn(500, 3000), set()
    for length in range(0, 400, 57):
        monkeypatch.setenv("ANYTHING", "x" * length)
        monkeypatch.setenv("PYTHONMALLOC", "malloc" if length % 2 else "pymalloc")
        monkeypatch.setenv("MALLOC_ARENA_MAX", "1" if length % 3 else "4")
        found.add(assign(graph, 5, "coarsen", 5).tobytes())
    assert len(found) == 1


def test_kaminpars_thread_has_memory_of_its_own(monkeypatch):
    """Whatever the user's environment says, and wherever modules come from."""
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "KEPT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.syspath_prepend(Path("somewhere"))
    found = coarsen._environment()
    assert found["KEPT"] == "1" and found["PYTHONPATH"].startswith("somewhere" + os.pathsep)
    assert not {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"} & found.keys()


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
    assert assign(graph_of([], nodes=0), 1).tolist() == []
    with pytest.raises(ValueError, match="has 0 nodes"):
        assign(graph_of([], nodes=0), 2)


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
    with pytest.raises(ValueError, match="method is 'mets', expected one of coarsen, metis"):
        assign(drawn(9, 20), 2, "mets")
    with pytest.raises(TypeError, match="method is int, expected a name or a Method"):
        assign(drawn(9, 20), 2, 3)  # type: ignore[arg-type]
    assert METHODS == ("coarsen", "metis", "random", "contiguous")


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
    [("import os; os.kill(os.getpid(), 9)", "status -9"), ("raise MemoryError('no room')", "room")],
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
    real = npy.create

    def create(path: Path, *rest):
        if path.stem == name:
            monkeypatch.setattr(os, "posix_fallocate", full)
        return real(path, *rest)

    def full(*_):
        raise OSError(28, "No space left on device")

    for module in (buckets.npy, coarsen.npy):
        monkeypatch.setattr(module, "create", create)
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


# ----------------------------------------------------------------------------------- given parts

PARTS = np.arange(20) * 3 % 4


def two_types() -> GraphArrays:
    ends = torch.arange(8), torch.arange(8)
    return GraphArrays("t", {"a": 8, "b": 12}, {("a", "to", "b"): ends})


@pytest.mark.parametrize("dtype", ["<i4", ">i8", "u1"])
@pytest.mark.parametrize("form", ["array", "tensor", "list", "npy", "txt", "npys", "txts"])
def test_given_parts(tmp_path, form, dtype):
    parts = PARTS.astype(dtype)
    sides = {"a": parts[:8], "b": parts[8:]}
    source = tmp_path / f"parts.{form}" if form in ("npy", "txt") else tmp_path
    if form in ("array", "tensor", "list"):
        source = {"array": parts, "tensor": torch.from_numpy(PARTS), "list": PARTS.tolist()}[form]
    elif form == "npy":
        np.save(source, parts)
    elif form == "txt":
        np.savetxt(source, parts, fmt="%d")
    for ntype, side in sides.items():
        if form == "npys":
            np.save(tmp_path / f"{ntype}.npy", side)
        if form == "txts":
            np.savetxt(tmp_path / f"{ntype}.txt", side, fmt="%d")
    found = assign(two_types(), 4, Given(source))
    np.testing.assert_array_equal(found, PARTS)
    assert found.dtype == np.int32 and found is not source


TEXT = "\n".join(map(str, PARTS.tolist())) + "\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT[:-2], "has 19 rows, expected 20"),
        (TEXT + "1\n", "has 21 rows, expected 20"),
        ("", "has 0 rows, expected 20"),
        (TEXT + "\n", "row 20 is ''"),
        (TEXT.replace("3", "-1", 1), "row 1 is '-1', expected a part from 0 to 3"),
        (TEXT.replace("3", "4", 1), "row 1 is part 4, expected 0 to 3"),
        (TEXT.replace("3", "1.0", 1), "row 1 is '1.0'"),
        (TEXT.replace("3", "1_0", 1), "row 1 is '1_0'"),
        (TEXT.replace("3", "three", 1), "row 1 is 'three'"),
        (TEXT.replace("3", "9" * 30, 1), "row 1 is '99999"),
        (TEXT.replace("3", "\u0663", 1), "row 1 is "),
    ],
)
def test_text_that_is_no_parts(tmp_path, text, said):
    path = tmp_path / "parts.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="parts.txt: ") as caught:
        assign(two_types(), 4, Given(path))
    assert said in str(caught.value) and len(str(caught.value)) < 300


def broken_npy(path: Path, parts: np.ndarray) -> None:
    np.save(path, parts)
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: np.save(path, PARTS[:19]), "of shape (19,), expected 20 integers"),
        (lambda path: np.save(path, PARTS[:, None]), "of shape (20, 1), expected 20"),
        (lambda path: np.save(path, PARTS.astype(float)), "got float64"),
        (lambda path: np.save(path, PARTS > 1), "got bool"),
        (lambda path: np.save(path, PARTS - 1), "row 0 is part -1, expected 0 to 3"),
        (lambda path: np.save(path, PARTS + 2**40), f"row 0 is part {2**40}"),
        (lambda path: np.save(path, PARTS.astype(object)), "not an array of numbers"),
        (lambda path: broken_npy(path, PARTS), "not an array of numbers"),
        (lambda path: path.write_bytes(b"\x00" * 300), "not an array of numbers"),
    ],
)
def test_arrays_that_are_no_parts(tmp_path, write, said):
    write(tmp_path / "parts.npy")
    with pytest.raises(ValueError, match="parts.npy: ") as caught:
        assign(two_types(), 4, Given(tmp_path / "parts.npy"))
    assert said in str(caught.value)


def test_given_parts_are_looked_at_for_one_part_too():
    with pytest.raises(ValueError, match="row 1 is part 3, expected 0 to 0"):
        assign(two_types(), 1, Given(PARTS))


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.npy", tmp_path / "none.txt"):
        with pytest.raises(FileNotFoundError, match="none"):
            assign(two_types(), 4, Given(path))
    np.save(tmp_path / "a.npy", PARTS[:8])
    with pytest.raises(FileNotFoundError, match=r"holds no b\.npy and no b\.txt"):
        assign(two_types(), 4, Given(tmp_path))
