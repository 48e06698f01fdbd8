"""The partition book: against DGL's book, and every way its JSON can be wrong."""

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sar import PartitionError
from sar.partition import book_json
from sar.partition.load import read_book

try:  # here and not in the test, because importing it changes the environment
    from dgl.distributed import partition as dgl_partition
except ImportError:
    dgl_partition = None

HOMOGENEOUS = {
    "graph_name": "g",
    "num_nodes": 10,
    "num_edges": 20,
    "part_method": "metis",
    "num_parts": 2,
    "halo_hops": 1,
    "node_map": {"_N": [[0, 4], [4, 10]]},
    "edge_map": {"_N:_E:_N": [[0, 15], [15, 20]]},
    "ntypes": {"_N": 0},
    "etypes": {"_N:_E:_N": 0},
    **{
        f"part-{i}": {
            "node_feats": f"part{i}/node_feat.dgl",
            "edge_feats": f"part{i}/edge_feat.dgl",
            "part_graph": f"part{i}/graph.dgl",
        }
        for i in range(2)
    },
}
# Ids run over part, then type: a 0-3, b 3-5 | a 5-9, b 9-10.
HETEROGENEOUS = {
    **HOMOGENEOUS,
    "node_map": {"b": [[3, 5], [9, 10]], "a": [[0, 3], [5, 9]]},
    "edge_map": {"a:r:b": [[0, 6], [8, 18]], "b:s:a": [[6, 8], [18, 20]]},
    "ntypes": {"a": 0, "b": 1},
    "etypes": {"a:r:b": 0, "b:s:a": 1},
}
DELETE = "(left out)"


def save(tmp_path, config, name="g.json"):
    path = tmp_path / name
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def changed(config, *keys_and_value):
    *keys, value = keys_and_value
    config = copy.deepcopy(config)
    inner = config
    for key in keys[:-1]:
        inner = inner[key]
    if value is DELETE:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return config


def test_what_a_book_says(tmp_path):
    one = read_book(save(tmp_path, HOMOGENEOUS))
    assert one.is_homogeneous and one.canonical_etypes == [("_N", "_E", "_N")]
    assert (one.part_nodes("_N", 1), one.part_edges("_E", 1)) == (6, 5)
    assert (one.halo_hops, one.part_method, one.graph_name) == (1, "metis", "g")
    book = read_book(save(tmp_path, HETEROGENEOUS))
    assert not book.is_homogeneous and book.ntypes == ["a", "b"]
    assert book.num_nodes("a") == 7 and book.num_nodes("b") == 3
    assert book.num_edges("r") == 16 and book.num_edges(("b", "s", "a")) == 4
    assert book.part_ranges == [(0, 5), (5, 10)]
    assert book.node_ranges["b"].tolist() == [[3, 5], [9, 10]]
    assert book.locate(torch.tensor([], dtype=torch.int64))[0].shape == (0,)


def test_canonical_names(tmp_path):
    book = read_book(save(tmp_path, HETEROGENEOUS))
    for spelled in ("r", "a:r:b", ("a", "r", "b")):
        assert book.canonical(spelled) == ("a", "r", "b")
    for unknown in ("q", ("a", "s", "b")):
        with pytest.raises(ValueError, match="unknown"):
            book.canonical(unknown)
    config = changed(HETEROGENEOUS, "etypes", {"a:r:b": 0, "b:r:a": 1})
    config["edge_map"] = {"a:r:b": [[0, 6], [8, 18]], "b:r:a": [[6, 8], [18, 20]]}
    with pytest.raises(ValueError, match="ambiguous"):
        read_book(save(tmp_path, config)).canonical("r")


def test_wrong_arguments(tmp_path):
    book = read_book(save(tmp_path, HETEROGENEOUS))
    for ids in ([-1, 3], [0, 10]):
        with pytest.raises(ValueError, match="expected 0 to 9"):
            book.locate(torch.tensor(ids))
        with pytest.raises(ValueError, match="expected 0 to 9"):
            book.nid2partid(torch.tensor(ids))
    with pytest.raises(ValueError, match="part: got 2"):
        book.part_nodes("a", 2)
    with pytest.raises(ValueError, match="ntype: 'c'"):
        book.part_nodes("c", 0)


@pytest.mark.skipif(dgl_partition is None, reason="dgl is not installed")
@pytest.mark.parametrize("config", [HOMOGENEOUS, HETEROGENEOUS])
def test_the_same_answers_as_dgls_book(tmp_path, config):
    path = save(tmp_path, config)
    book = read_book(path)
    for part in range(2):
        theirs, name, *_ = dgl_partition.load_partition_book(str(path), part)
        assert name == book.graph_name
        assert theirs.metadata() == book.metadata()
        assert theirs.num_partitions() == book.num_partitions()
        assert theirs.ntypes == book.ntypes and theirs.etypes == book.etypes
        ids = torch.arange(10)
        for mine, other in zip(book.map_to_per_ntype(ids), theirs.map_to_per_ntype(ids)):
            assert torch.equal(mine, other.long())
        for ntype in {"_N", *book.ntypes}:
            ids = torch.arange(theirs._num_nodes(ntype))
            assert torch.equal(book.nid2partid(ids, ntype), theirs.nid2partid(ids, ntype))
            own = theirs.partid2nids(part, ntype)
            assert torch.equal(book.partid2nids(part, ntype), own)
            mine = book.nid2localnid(own, part, ntype)
            assert torch.equal(mine, theirs.nid2localnid(own, part, ntype))


@st.composite
def sizes(draw):
    parts, types = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 6), min_size=types, max_size=types)
    return draw(st.lists(row, min_size=parts, max_size=parts))


def config_of(table):
    """A JSON with the given nodes per part and type, and no edges."""
    table = np.array(table)
    ends = table.ravel().cumsum().reshape(table.shape)
    names = [f"t{i}" for i in range(table.shape[1])]
    ranges = np.stack([ends - table, ends], axis=2)
    return {
        "graph_name": "g",
        "num_nodes": int(table.sum()),
        "num_edges": 0,
        "num_parts": len(table),
        "node_map": {name: ranges[:, i].tolist() for i, name in enumerate(names)},
        "edge_map": {"t0:r:t0": [[0, 0]] * len(table)},
        "ntypes": {name: i for i, name in enumerate(names)},
        "etypes": {"t0:r:t0": 0},
        **{f"part-{i}": {"part_graph": f"{i}.dgl"} for i in range(len(table))},
    }


@settings(deadline=None, derandomize=True, max_examples=80)
@given(table=sizes(), stray=st.integers(0, 100))
def test_locate_inverts_the_ranges_and_empty_ranges_may_stand_anywhere(
    tmp_path_factory, table, stray
):
    config = config_of(table)
    for ranges in config["node_map"].values():
        for pair in ranges:
            if pair[0] == pair[1]:
                pair[:] = [stray, stray]
    book = read_book(save(tmp_path_factory.mktemp("book"), config))
    total = book.num_nodes()
    type_id, part, idx = book.locate(torch.arange(total))
    starts = np.stack([book.node_ranges[ntype][:, 0] for ntype in book.ntypes])
    assert torch.equal(torch.from_numpy(starts)[type_id, part] + idx, torch.arange(total))
    for name_id, ntype in enumerate(book.ntypes):
        for p in range(book.num_parts):
            found = ((type_id == name_id) & (part == p)).sum()
            assert int(found) == book.part_nodes(ntype, p) == table[p][name_id]


def test_digest_ignores_paths_and_sees_everything_else(tmp_path):
    digest = read_book(save(tmp_path, HETEROGENEOUS)).digest()
    (tmp_path / "other").mkdir()
    moved = changed(HETEROGENEOUS, "part-1", "part_graph", "elsewhere/graph.dgl")
    assert read_book(save(tmp_path / "other", moved, "h.json")).digest() == digest
    more = changed(HETEROGENEOUS, "node_map", {"a": [[0, 2], [5, 9]], "b": [[2, 5], [9, 10]]})
    for other in (
        more,
        changed(HETEROGENEOUS, "graph_name", "h"),
        changed(HETEROGENEOUS, "halo_hops", 2),
        changed(
            HETEROGENEOUS, "edge_map", {"a:r:b": [[0, 5], [8, 18]], "b:s:a": [[5, 8], [18, 20]]}
        ),
    ):
        assert read_book(save(tmp_path, other)).digest() != digest


def test_old_variants(tmp_path):
    expected = read_book(save(tmp_path, HOMOGENEOUS))
    ends = changed(HOMOGENEOUS, "node_map", [4, 10])
    ends["edge_map"] = [15, 20]
    bare = changed(HOMOGENEOUS, "node_map", [[0, 4], [4, 10]])
    untyped = changed(changed(ends, "ntypes", DELETE), "etypes", DELETE)
    typed_ends = changed(HOMOGENEOUS, "node_map", "_N", [4, 10])
    for config in (ends, bare, untyped, typed_ends):
        assert read_book(save(tmp_path, config)).digest() == expected.digest()
    relation = changed(HOMOGENEOUS, "etypes", {"_E": 0})
    for key in ("_E", "_N:_E:_N"):
        relation["edge_map"] = {key: [[0, 15], [15, 20]]}
        book = read_book(save(tmp_path, relation))
        assert book.canonical_etypes == [("_N", "_E", "_N")]
    one = config_of([[1]]) | {"halo_hops": 0}  # one part has no halo to miss
    assert read_book(save(tmp_path, one)).num_nodes() == 1
    silent = read_book(save(tmp_path, changed(HOMOGENEOUS, "halo_hops", DELETE)))
    assert silent.halo_hops is None


BAD = [
    (("num_parts", 3), "2 entries"),
    (("num_parts", 0), "expected 1 to 65536"),
    (("num_parts", -1), "whole number"),
    (("num_parts", "2"), "whole number"),
    (("num_parts", True), "whole number"),
    (("num_parts", 10**30), "expected 1 to 65536"),
    (("num_parts", DELETE), "'num_parts' is missing"),
    (("graph_name", DELETE), "'graph_name' is missing"),
    (("graph_name", 5), "expected a string"),
    (("node_map", DELETE), "'node_map' is missing"),
    (("edge_map", DELETE), "'edge_map' is missing"),
    (("part-1", DELETE), "'part-1' is missing"),
    (("part-1", "part_graph", DELETE), "no 'part_graph'"),
    (("part-1", []), "expected file names"),
    (("num_nodes", 11), "num_nodes is 11 but the ranges of node_map hold 10"),
    (("num_edges", 19), "num_edges is 19"),
    (("halo_hops", 0), "num_hops=0"),
    (("halo_hops", 1.5), "whole number"),
    (("node_map", "a", [[0, 4], [5, 9]]), "overlaps"),
    (("node_map", "a", [[0, 2], [5, 9]]), "gap"),
    (("node_map", "a", [[1, 3], [5, 9]]), "gap"),
    (("node_map", "a", [[3, 0], [5, 9]]), "start <= end"),
    (("node_map", "a", [[0, 3], [5, 9, 10]]), r"\[start, end\]"),
    (("node_map", "a", [[0, 3], [5, None]]), r"\[start, end\]"),
    (("node_map", "a", [[0, 3], [5, 9.0]]), r"\[start, end\]"),
    (("node_map", "a", [[0, 3], [5, 2**64]]), r"\[start, end\]"),
    (("node_map", "a", [[0, 3]]), "1 entries"),
    (("node_map", "a", {}), "lists of ranges"),
    (("node_map", "c", [[0, 3], [5, 9]]), "has types"),
    (("node_map", "b", DELETE), "has types"),
    (("node_map", 7), "lists of ranges"),
    (("node_map", "node_map.npy"), "names the file 'node_map.npy'"),
    (("node_map", {"a": "a.npy", "b": "b.npy"}), "names the file 'a.npy'"),
    (("ntypes", {"a": 0, "b": 0}), "each of 0 to 1 once"),
    (("ntypes", {"a": 0, "b": "1"}), "names with ids"),
    (("ntypes", {}), "names with ids"),
    (("etypes", {"r": 0, "s": 1}), "no node types"),
    (("etypes", {"a:r:c": 0, "b:s:a": 1}), "node types of"),
    (("etypes", {"a:r:b:x": 0, "b:s:a": 1}), "node types of"),
]


@pytest.mark.parametrize(("change", "words"), BAD, ids=[str(one[0])[:40] for one in BAD])
def test_bad_json_is_named(tmp_path, change, words):
    path = save(tmp_path, changed(HETEROGENEOUS, *change))
    with pytest.raises(PartitionError, match=words) as error:
        read_book(path)
    assert str(path) in str(error.value)


def test_what_is_not_a_partition_json(tmp_path):
    for raw in ("", "{", "[" * 100_000, "[1, 2]", "null", '{"a": 1}', "9" * 6000, "\x00\x01"):
        with pytest.raises(PartitionError):
            read_book(save(tmp_path, raw))
    (tmp_path / "binary.json").write_bytes(bytes(range(256)))
    for name in ("binary.json", "none.json", ""):
        with pytest.raises(PartitionError, match="no such file|not a readable|a folder"):
            read_book(tmp_path / name)


def test_paths_must_stay_below_the_folder(tmp_path):
    folder = tmp_path / "parts"
    (folder / "part0").mkdir(parents=True)
    (tmp_path / "secret.dgl").write_bytes(b"x")
    (folder / "link.dgl").symlink_to(tmp_path / "secret.dgl")
    (folder / "away").symlink_to(tmp_path)
    (folder / "inside").symlink_to(folder / "part0")
    outside = ["/etc/passwd", "../secret.dgl", "part0/../../secret.dgl", "link.dgl", "", 3]
    for name in (*outside, "away/secret.dgl", str(folder / "part0/graph.dgl"), "a\0b", None):
        for key in ("part_graph", "node_feats", "edge_feats"):
            config = changed(HOMOGENEOUS, "part-1", key, name)
            with pytest.raises(PartitionError, match="part-1"):
                read_book(save(folder, config))
    for name in ("./part0/graph.dgl", "part0/../part0/graph.dgl", "inside/graph.dgl", "..x"):
        config = changed(HOMOGENEOUS, "part-0", "part_graph", name)
        assert read_book(save(folder, config)).files[0]["part_graph"].startswith(str(folder))
    for name in ("a/" * 3000 + "b", "\ud800", "part0/\ud800", "a" * 5000, "part0//../../x/y"):
        path = save(folder, changed(HOMOGENEOUS, "part-1", "part_graph", name))
        try:
            assert read_book(path).files[1]["part_graph"].startswith(str(folder))
        except PartitionError as error:
            assert "part-1" in str(error)  # noqa: PT017 - either is right


def test_too_many_parts_are_refused_before_they_are_parsed(tmp_path, monkeypatch):
    config = config_of([[1]] * 3)
    del config["num_parts"]
    path = save(tmp_path, {**config, "num_parts": 10**6})  # behind all the entries
    monkeypatch.setattr(book_json.json, "loads", lambda text: pytest.fail("parsed"))
    with pytest.raises(PartitionError, match="num_parts is 1000000, expected 1 to 65536"):
        read_book(path)
    monkeypatch.setattr(book_json, "MAX_BYTES", 50)
    with pytest.raises(PartitionError, match="bytes, expected at most 50"):
        read_book(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.data(), value=JSON, config=st.sampled_from([HOMOGENEOUS, HETEROGENEOUS]))
def test_any_value_anywhere_is_an_error_or_a_book(tmp_path_factory, data, value, config):
    config = copy.deepcopy(config)
    inner, key = config, data.draw(st.sampled_from(sorted(config)))
    while isinstance(inner[key], (dict, list)) and data.draw(st.booleans()):
        inner = inner[key]
        keys = sorted(inner) if isinstance(inner, dict) else range(len(inner))
        key = data.draw(st.sampled_from(keys))
    inner[key] = value
    try:
        book = read_book(save(tmp_path_factory.mktemp("fuzz"), config))
    except PartitionError:
        return
    assert book.locate(torch.arange(book.num_nodes()))[0].shape == (10,)
    book.digest()
