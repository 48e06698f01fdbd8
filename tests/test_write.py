"""Writing what was cut: every node and edge lands once, with its data, and DGL reads the result."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.covering import by_pairs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.cut import assign
from sar.partition.formats.dgl_files import PartGraph
from sar.partition.load import load_partition
from sar.partition.write import write_partitions

dgl = pytest.importorskip("dgl")

TYPES = {"author": 7, "empty": 0, "paper": 20}
RELATIONS = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")]


def homogeneous(nodes=30, edges=120, seed=0) -> GraphArrays:
    """Random multigraph with self loops, features on nodes and edges."""
    rng = np.random.default_rng(seed)
    src, dst = (torch.from_numpy(rng.integers(0, nodes, edges)) for _ in range(2))
    node = {"feat": torch.from_numpy(rng.random((nodes, 3))), "flag_mask": torch.arange(nodes) > 3}
    edge = {"weight": torch.from_numpy(rng.random(edges))}
    return GraphArrays(
        "g", {NTYPE_HOMO: nodes}, {ETYPE_HOMO: (src, dst)}, {NTYPE_HOMO: node}, {ETYPE_HOMO: edge}
    ).with_orig_ids()


def heterogeneous(edges=60, seed=0) -> GraphArrays:
    rng = np.random.default_rng(seed)
    pairs, edge_data = {}, {}
    for etype in RELATIONS:
        src, dst = (torch.from_numpy(rng.integers(0, TYPES[t], edges)) for t in etype[::2])
        pairs[etype] = (src, dst)
        edge_data[etype] = {"w": torch.from_numpy(rng.random(edges))}
    node_data = {t: {"x": torch.from_numpy(rng.random((n, 2)))} for t, n in TYPES.items()}
    return GraphArrays("h", dict(TYPES), pairs, node_data, edge_data).with_orig_ids()


def written_edges(json_path: str, graph: GraphArrays, parts: np.ndarray) -> dict:
    """Read back through DGL and check each part; per edge type {orig_eid: (original src, dst)}."""
    book = json.loads(Path(json_path).read_text())
    ntypes, etypes = list(graph.num_nodes), list(graph.edges)
    orig = original_ids(json_path, graph)
    found = {etype: {} for etype in etypes}
    first = 0
    for part in range(book["num_parts"]):
        local, _, edge_feats, partition_book, name, *_ = dgl.distributed.load_partition(
            json_path, part
        )
        assert name == book["graph_name"]
        inner = local.ndata["inner_node"].bool()
        count = int(inner.sum())
        assert inner[:count].all(), "inner nodes come first"
        assert local.edata["inner_edge"].all()
        nids, eids = local.ndata[dgl.NID], local.edata[dgl.EID]
        starts = [ranges[part][0] for ranges in book["node_map"].values()]
        assert nids[:count].tolist() == list(range(starts[0], starts[0] + count))
        assert eids.tolist() == list(range(first, first + len(eids)))
        first += len(eids)
        assert (local.ndata["part_id"] == partition_book.nid2partid(nids)).all()
        assert (local.ndata["part_id"][count:] != part).all(), "halo nodes belong to others"
        src, dst = local.edges(order="eid")
        assert (dst < count).all(), "an inner edge ends in an inner node"
        assert set(range(count, len(nids))) <= set(src.tolist()), "every halo node is a source"
        kinds = local.edata.get(dgl.ETYPE, torch.zeros(len(eids), dtype=torch.int32))
        for number, etype in enumerate(etypes):
            of_type = kinds == number
            start, end = book["edge_map"][":".join(etype)][part]
            assert eids[of_type].tolist() == list(range(start, end))
            ids = edge_feats[f"{':'.join(etype)}/orig_eid"].tolist()
            assert ids == sorted(ids), "ascending original id"
            for eid, u, v in zip(ids, nids[src[of_type]].tolist(), nids[dst[of_type]].tolist()):
                assert eid not in found[etype], "an edge in two partitions"
                assert (orig[u][0], orig[v][0]) == (etype[0], etype[2])
                found[etype][eid] = (orig[u][1], orig[v][1])
                assert parts[graph.node_offsets()[etype[2]] + orig[v][1]] == part
        if not graph.is_homogeneous:
            assert [ntypes[t] for t in local.ndata[dgl.NTYPE].tolist()] == [
                orig[nid][0] for nid in nids.tolist()
            ]
    return found


def original_ids(json_path: str, graph: GraphArrays) -> dict[int, tuple[str, int]]:
    """Shuffled id -> (node type, original id), and the check that node data followed."""
    book = json.loads(Path(json_path).read_text())
    orig = {}
    for part in range(book["num_parts"]):
        feats, _ = dgl.distributed.partition.load_partition_feats(json_path, part)
        for ntype, data in graph.node_data.items():
            start, end = book["node_map"][ntype][part]
            ids = feats[f"{ntype}/orig_id"]
            assert len(ids) == end - start
            for name, value in data.items():
                assert torch.equal(feats[f"{ntype}/{name}"].to(value.dtype), value[ids]), name
            orig.update({start + row: (ntype, i) for row, i in enumerate(ids.tolist())})
    assert sorted(orig) == list(range(graph.total_nodes))
    assert len(set(orig.values())) == graph.total_nodes
    return orig


def check(graph: GraphArrays, parts: np.ndarray, folder: Path, num_parts: int) -> None:
    path = write_partitions(graph, parts, folder, num_parts=num_parts)
    found = written_edges(path, graph, parts)
    for etype, (src, dst) in graph.edges.items():
        expected = dict(enumerate(zip(src.tolist(), dst.tolist())))
        assert found[etype] == expected
    for part in range(num_parts):
        _, edge_feats = dgl.distributed.partition.load_partition_feats(path, part)
        for etype, data in graph.edge_data.items():
            ids = edge_feats[f"{':'.join(etype)}/orig_eid"]
            for name, value in data.items():
                assert torch.equal(edge_feats[f"{':'.join(etype)}/{name}"], value[ids])


@by_pairs(
    method=["coarsen", "metis", "random", "contiguous"],
    num_parts=[1, 2, 3, 8],
    make=[homogeneous, heterogeneous],
)
def test_everything_arrives_once(tmp_path, make, num_parts, method):
    graph = make()
    check(graph, assign(graph, num_parts, method, seed=1), tmp_path / "out", num_parts)


@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 12),
    edges=st.integers(0, 40),
    num_parts=st.integers(1, 6),
    data=st.data(),
)
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_assignment_can_be_written(tmp_path_factory, seed, nodes, edges, num_parts, data):
    """Empty partitions, partitions without edges, every edge cut ..."""
    parts = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=nodes, max_size=nodes))
    folder = tmp_path_factory.mktemp("any") / "out"
    check(homogeneous(nodes, edges, seed), np.array(parts), folder, num_parts)


def test_dgl_reads_empty_partitions_and_types(tmp_path):
    graph = heterogeneous()
    parts = np.full(graph.total_nodes, 2)
    check(graph, parts, tmp_path / "out", 4)


def test_more_partitions_than_nodes(tmp_path):
    check(homogeneous(nodes=3, edges=9), np.array([1, 0, 5]), tmp_path / "out", 7)


def test_agrees_with_dgl_itself(tmp_path):
    """DGL's own partition_graph, given the same assignment, owns the same nodes and edges."""
    graph = homogeneous()
    parts = assign(graph, 3, "random")
    src, dst = graph.edges[ETYPE_HOMO]
    whole = dgl.graph((src, dst), num_nodes=30)
    whole.ndata["orig_id"] = torch.arange(30)
    own = write_partitions(graph, parts, tmp_path / "own", "g")
    named = tmp_path / "named"
    original = dgl.distributed.partition.metis_partition_assignment
    try:
        dgl.distributed.partition.metis_partition_assignment = lambda *a, **k: torch.from_numpy(
            parts.astype(np.int64)
        )
        dgl.distributed.partition_graph(whole, "g", 3, str(named))
    finally:
        dgl.distributed.partition.metis_partition_assignment = original
    theirs = json.loads((named / "g.json").read_text())
    ours = json.loads(Path(own).read_text())
    for key in ("node_map", "edge_map", "num_nodes", "num_edges", "ntypes", "etypes", "num_parts"):
        assert ours[key] == theirs[key], key
    assert set(theirs) == set(ours) - {"sar"}
    for part in range(3):
        a, feats_a, *_ = dgl.distributed.load_partition(own, part)
        b, feats_b, *_ = dgl.distributed.load_partition(str(named / "g.json"), part)
        assert a.ndata.keys() - {"orig_id"} == b.ndata.keys() - {"orig_id"}
        # DGL shuffles the nodes inside a partition, so edges are compared by original id below.
        assert sorted(feats_a["_N/orig_id"].tolist()) == sorted(feats_b["_N/orig_id"].tolist())
    assert original_edges(own) == original_edges(str(named / "g.json"))


def original_edges(json_path: str) -> list[list[tuple[int, int]]]:
    """Per partition the inner edges in original ids, sorted."""
    loaded = [dgl.distributed.load_partition(json_path, part) for part in range(3)]
    orig = torch.cat([feats["_N/orig_id"] for _, feats, *_ in loaded])
    edges = []
    for local, *_ in loaded:
        keep = local.edata["inner_edge"].bool()
        src, dst = (orig[local.ndata[dgl.NID][ids[keep]]] for ids in local.edges(order="eid"))
        edges.append(sorted(zip(src.tolist(), dst.tolist())))
    return edges


@pytest.mark.parametrize("given", [False, True])
def test_edge_ids_are_stored_unless_they_are_given(tmp_path, given):
    graph = homogeneous()
    graph.edge_data.clear()
    if given:
        graph.edge_data[ETYPE_HOMO] = {"orig_eid": torch.arange(graph.total_edges).flip(0)}
    path = write_partitions(graph, assign(graph, 2, "random"), tmp_path / "out")
    stored = [dgl.distributed.load_partition(path, part)[2] for part in range(2)]
    assert [list(feats) for feats in stored] == [["_N:_E:_N/orig_eid"]] * 2
    ids = [feats["_N:_E:_N/orig_eid"] for feats in stored]
    for one in ids:  # edges keep their order inside a part
        assert torch.equal(one, one.sort(descending=given).values)
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(graph.total_edges))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float64])
def test_features_keep_their_dtype(tmp_path, dtype):
    graph = homogeneous()
    graph.node_data[NTYPE_HOMO]["feat"] = torch.arange(60).reshape(30, 2).to(dtype)
    path = write_partitions(graph, assign(graph, 2, "random"), tmp_path / "out")
    from sar.partition.dgl_format import read_tensor_dict

    found = read_tensor_dict(Path(path).parent / "part0" / "node_feat.dgl")["_N/feat"]
    assert found.dtype == dtype


# ------------------------------------------------------------------------------- output folder


def test_output_is_not_overwritten_unasked(tmp_path):
    graph = homogeneous()
    parts = assign(graph, 2, "random")
    write_partitions(graph, parts, tmp_path / "out")
    with pytest.raises(FileExistsError, match="not empty"):
        write_partitions(graph, parts, tmp_path / "out")
    path = write_partitions(graph, parts * 0, tmp_path / "out", overwrite=True)
    assert json.loads(Path(path).read_text())["num_parts"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_other_things_is_never_replaced(tmp_path):
    for name in ("thesis.txt", "package.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(FileExistsError, match="does not look like partitions"):
            write_partitions(homogeneous(), np.zeros(30, int), folder, overwrite=True)
        assert (folder / name).read_text() == "precious"


def test_output_below_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        write_partitions(homogeneous(), np.zeros(30, int), tmp_path / "file" / "out")
    with pytest.raises(NotADirectoryError, match="not a folder"):
        write_partitions(homogeneous(), np.zeros(30, int), tmp_path / "file")


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    graph = homogeneous()
    out = tmp_path / "out"
    kept = write_partitions(graph, np.zeros(30, int), out)
    before = Path(kept).read_bytes()
    real = PartGraph.finish

    def fail_on_second(self, *args):
        if self.name.startswith("part1/"):
            raise OSError("no space left")
        return real(self, *args)

    monkeypatch.setattr(PartGraph, "finish", fail_on_second)
    for folder in (out, tmp_path / "fresh"):
        with pytest.raises(OSError, match="no space"):
            write_partitions(graph, np.arange(30) % 2, folder, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert Path(kept).read_bytes() == before


@pytest.mark.parametrize(
    "parts",
    [np.zeros(29, int), np.zeros((30, 1), int), np.zeros(30), np.full(30, -1), np.full(30, 5)],
    ids=["short", "matrix", "float", "negative", "too large"],
)
def test_bad_assignments(tmp_path, parts):
    with pytest.raises(ValueError, match="node_parts"):
        write_partitions(homogeneous(), parts, tmp_path / "out", num_parts=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_bad_names(tmp_path, name):
    with pytest.raises(ValueError, match="graph_name"):
        write_partitions(homogeneous(), np.zeros(30, int), tmp_path / "out", name)


def break_ids(graph):
    graph.edges[ETYPE_HOMO][0][3] = 30


def break_type(graph):
    graph.edges[ETYPE_HOMO] = tuple(ids.int() for ids in graph.edges[ETYPE_HOMO])


def break_rows(graph):
    graph.node_data[NTYPE_HOMO]["feat"] = torch.zeros(29, 2)


def break_feature_name(graph):
    graph.node_data[NTYPE_HOMO]["a/b"] = torch.zeros(30)


def break_lengths(graph):
    graph.edges[ETYPE_HOMO] = (torch.zeros(4, dtype=torch.long), torch.zeros(5, dtype=torch.long))


def break_ntype(graph):
    graph.edges[("_N", "e", "nobody")] = (torch.arange(2), torch.arange(2))


def break_edge_rows(graph):
    graph.edge_data[ETYPE_HOMO]["weight"] = torch.zeros(3)


@pytest.mark.parametrize(
    "damage",
    [
        break_ids,
        break_type,
        break_rows,
        break_feature_name,
        break_lengths,
        break_ntype,
        break_edge_rows,
    ],
)
def test_bad_graphs(tmp_path, damage):
    graph = homogeneous()
    damage(graph)
    with pytest.raises(ValueError, match="edges|node_data|edge_data"):
        write_partitions(graph, np.zeros(30, int), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_dgl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    graph = homogeneous()
    path = write_partitions(graph, assign(graph, 2, "random"), tmp_path / "out")
    assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == 15
