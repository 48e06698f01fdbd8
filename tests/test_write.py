"""Writing what was cut: every node and edge lands once, with its data, and DGL reads the result."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
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


def check(graph: GraphArrays, parts: np.ndarray, folder: Path, num_parts: int) -> None:
    """DGL reads each node and edge once, in its part, with its data."""
    path = write_partitions(graph, parts, folder, num_parts=num_parts)
    loaded = [dgl.distributed.load_partition(path, part) for part in range(num_parts)]
    orig = torch.full((graph.total_nodes,), -1)  # id -> row in the graph, types one after another
    for part, (local, features, _, book, *_) in enumerate(loaded):
        nids = local.ndata[dgl.NID]
        own = nids[local.ndata["inner_node"].bool()]
        assert torch.equal(own, nids[: len(own)]), "inner nodes come first"
        assert torch.equal(local.ndata["part_id"], book.nid2partid(nids))
        assert (local.ndata["part_id"] == part).sum() == len(own)
        types, _ = book.map_to_per_ntype(own)
        for number, (ntype, data) in enumerate(graph.node_data.items()):
            rows = features[f"{ntype}/orig_id"]
            orig[own[types == number]] = rows + graph.node_offsets()[ntype]
            for name, value in data.items():
                assert torch.equal(features[f"{ntype}/{name}"].to(value.dtype), value[rows]), name
    assert torch.equal(orig.sort().values, torch.arange(graph.total_nodes))
    found = {etype: [] for etype in graph.edges}
    for part, (local, _, features, *_) in enumerate(loaded):
        assert local.edata["inner_edge"].all()
        ends = [orig[local.ndata[dgl.NID][ids]] for ids in local.edges(order="eid")]
        assert (parts[ends[1].numpy()] == part).all()
        kinds = local.edata.get(dgl.ETYPE, torch.zeros(len(ends[0]), dtype=torch.int32))
        for number, etype in enumerate(graph.edges):
            eids = features[f"{':'.join(etype)}/orig_eid"]
            assert torch.equal(eids, eids.sort().values), "ascending original id"
            found[etype] += zip(eids.tolist(), *(one[kinds == number].tolist() for one in ends))
            for name, value in graph.edge_data[etype].items():
                assert torch.equal(features[f"{':'.join(etype)}/{name}"], value[eids])
    for etype, ends in graph.edges.items():
        starts = [graph.node_offsets()[ntype] for ntype in etype[::2]]
        rows = [(one + start).tolist() for one, start in zip(ends, starts)]
        assert sorted(found[etype]) == list(zip(range(len(ends[0])), *rows))


@given(
    seed=st.integers(0, 999),
    nodes=st.integers(1, 12),
    edges=st.integers(0, 40),
    num_parts=st.integers(1, 7),
    data=st.data(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_assignment_can_be_written(tmp_path_factory, seed, nodes, edges, num_parts, data):
    """Empty partitions, partitions without edges, every edge cut ..."""
    parts = data.draw(st.lists(st.integers(0, num_parts - 1), min_size=nodes, max_size=nodes))
    folder = tmp_path_factory.mktemp("any") / "out"
    check(homogeneous(nodes, edges, seed), np.array(parts), folder, num_parts)


def test_dgl_reads_empty_partitions_and_types(tmp_path):
    graph = heterogeneous()
    check(graph, np.full(graph.total_nodes, 2), tmp_path / "out", 4)


def test_agrees_with_dgl_itself(tmp_path, monkeypatch):
    """DGL's own partition_graph, given the same assignment, owns the same nodes and edges."""
    graph = homogeneous()
    parts = assign(graph, 3, "random")
    whole = dgl.graph(graph.edges[ETYPE_HOMO], num_nodes=30)
    whole.ndata["orig_id"] = torch.arange(30)
    own = write_partitions(graph, parts, tmp_path / "own", "g")
    theirs = str(tmp_path / "theirs" / "g.json")
    wanted = torch.from_numpy(parts.astype(np.int64))
    cutter = dgl.distributed.partition
    monkeypatch.setattr(cutter, "metis_partition_assignment", lambda *_, **__: wanted)
    dgl.distributed.partition_graph(whole, "g", 3, str(tmp_path / "theirs"))
    known, found = (json.loads(Path(path).read_text()) for path in (theirs, own))
    assert set(known) == set(found) - {"sar"}
    for key in ("node_map", "edge_map", "num_nodes", "num_edges", "ntypes", "etypes", "num_parts"):
        assert found[key] == known[key], key


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


def test_what_is_no_partitions_is_never_replaced(tmp_path):
    for name in ("thesis.txt", "package.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(FileExistsError, match="does not look like partitions"):
            write_partitions(homogeneous(), np.zeros(30, int), folder, overwrite=True)
        assert (folder / name).read_text() == "precious"
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match="not a folder"):
            write_partitions(homogeneous(), np.zeros(30, int), out)


def test_an_error_in_the_middle_leaves_nothing(tmp_path, monkeypatch):
    graph, out = homogeneous(), tmp_path / "out"
    kept = write_partitions(graph, np.zeros(30, int), out)
    before, real = Path(kept).read_bytes(), PartGraph.finish

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


def test_bad_arguments(tmp_path):
    zeros = np.zeros(30, int)
    for parts in (zeros[1:], zeros[:, None], zeros.astype(float), zeros - 1, zeros + 5):
        with pytest.raises(ValueError, match="node_parts"):
            write_partitions(homogeneous(), parts, tmp_path / "out", num_parts=2)
    for name in ("", "../up", "a/b", ".hidden", "a b"):
        with pytest.raises(ValueError, match="graph_name"):
            write_partitions(homogeneous(), zeros, tmp_path / "out", name)
    assert not list(tmp_path.iterdir())


PAIR = (torch.arange(2), torch.arange(2))
DAMAGE = {
    r"edges.* src ids span \[0, 30\].*row 3 is 30": lambda g: g.edges[ETYPE_HOMO][0].put_(
        torch.tensor(3), torch.tensor(30)
    ),
    "edges.* is torch.int32": lambda g: g.edges.update(
        {ETYPE_HOMO: tuple(ids.int() for ids in g.edges[ETYPE_HOMO])}
    ),
    "two vectors of equal length": lambda g: g.edges.update(
        {ETYPE_HOMO: (torch.arange(4), torch.arange(5))}
    ),
    "'nobody' is not among": lambda g: g.edges.update({("_N", "e", "nobody"): PAIR}),
    "expected a non-empty name": lambda g: g.edges.update({("_N", "a:b", "_N"): PAIR}),
    "node_data.*expected 30 rows": lambda g: g.node_data["_N"].update(feat=torch.zeros(29, 2)),
    "node_data.*contains '/'": lambda g: g.node_data["_N"].update({"a/b": torch.zeros(30)}),
    "node_data has type 'x'": lambda g: g.node_data.update(x={}),
    "edge_data.*expected 120 rows": lambda g: g.edge_data[ETYPE_HOMO].update(w=torch.zeros(3)),
    **{
        rf"'odd'\] is {kind}, expected one of bool, uint8": lambda g, kind=kind: g.node_data[
            "_N"
        ].update(odd=torch.zeros(30, 2).to(kind))
        for kind in (torch.complex64, torch.uint16, torch.float8_e4m3fn)
    },
}


@pytest.mark.parametrize("words", DAMAGE)
def test_bad_graphs(tmp_path, words):
    graph = homogeneous()
    DAMAGE[words](graph)
    with pytest.raises(ValueError, match=words):
        write_partitions(graph, np.zeros(30, int), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_without_dgl(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dgl", None)
    graph = homogeneous()
    path = write_partitions(graph, assign(graph, 2, "random"), tmp_path / "out")
    assert load_partition(path, 1).num_nodes(NTYPE_HOMO) == 15
