"""Partitions of PyG and GraphLearn, against the same cut of the same graph in DGL's layout."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign_files import edge_rows, write_glt, write_pyg
from harness import run_threads
from harness.commands import on_threads
from harness.covering import by_pairs
from harness.graphs import GraphArrays, hetero, mixed
from harness.parts import (
    Cutter,
    PartitionData,
    edge_order,
    load_all,
    load_partition,
    node_parts,
    write_partitions,
)
from partition_files import CODES
from table_files import Trap
from torch import Tensor

import sar
from sar import PartitionError
from sar.__main__ import main
from sar.partition.unpickle import read_pickles, read_saved

pytestmark = pytest.mark.usefixtures("small_blocks")
GRAPHS = {"one type": mixed, "several": hetero}
WRITERS: dict[str, Callable[..., Path]] = {
    "pyg": write_pyg,
    "glt by src": write_glt,
    "glt by dst": lambda *args: write_glt(*args, side="dst"),
}
CUTS = [(1, "random"), (2, "coarsen"), (3, "random"), (4, "adversarial")]


def both(
    graph: GraphArrays, size: int, method: str, writer: str, folder: Path, partitioned: Cutter
) -> tuple[str, str]:
    """The same cut in DGL's layout and in another."""
    known, parts = partitioned(graph, size, method), node_parts(graph, size, method)
    return known, str(WRITERS[writer](graph, parts, size, folder / "foreign"))


@by_pairs(name=GRAPHS, cut=CUTS, writer=WRITERS)
def test_the_same_parts(
    name: str, cut: tuple[int, str], writer: str, tmp_path: Path, partitioned: Cutter
) -> None:
    """Nodes and edges in the same order, except that DGL's METIS may move edges in a part."""
    graph = GRAPHS[name]()
    known, foreign = both(graph, *cut, writer, tmp_path, partitioned)
    expected, found = load_all(known, cut[0]), load_all(foreign, cut[0])
    books = expected[0].book, found[0].book
    assert books[1].ntypes == books[0].ntypes
    for ntype, columns in graph.node_data.items():
        for one, other in zip(expected, found, strict=True):
            ids = other.node_features[f"{ntype}/orig_id"]
            assert torch.equal(ids, one.node_features[f"{ntype}/orig_id"])
            assert torch.equal(other.node_features[f"{ntype}/feat"], columns["feat"][ids])
        assert np.array_equal(*(book.node_ranges[ntype] for book in books))
    orig = torch.cat([part_ids(one) for one in found])
    for etype, ends in graph.edges.items():
        assert np.array_equal(*(book.edge_ranges[etype] for book in books))
        *rows, eids = edge_order(found, etype)
        assert torch.equal(eids.sort().values, torch.arange(len(ends[0])))
        for ids, wanted, ntype in zip(rows, ends, etype[::2]):
            assert torch.equal(orig[ids] - graph.node_offsets()[ntype], wanted[eids])
        columns = {"feat": edge_rows(graph.edge_data[etype])}
        if writer != "pyg":
            columns["weight"] = graph.edge_data[etype]["weight"]
        for key, column in columns.items():
            stored = [one.edge_features[f"{':'.join(etype)}/{key}"] for one in found]
            assert torch.equal(torch.cat(stored), column[eids])
    for one in found:
        one.book.locate(torch.arange(graph.total_nodes))


def part_ids(data: PartitionData) -> Tensor:
    """Original ids of all nodes of a part, types one after another in both."""
    starts, found = 0, []
    for ntype in data.book.ntypes:
        found.append(data.node_features[f"{ntype}/orig_id"] + starts)
        starts += data.book.num_nodes(ntype)
    return torch.cat(found)


@pytest.mark.parametrize("time", ["nodes", "edges"])
@pytest.mark.parametrize("name", GRAPHS)
def test_times(name: str, time: str, tmp_path: Path) -> None:
    """PyG keeps those of all nodes in each part, but those of edges with the part's edges."""
    graph = GRAPHS[name]()
    folder = write_pyg(graph, node_parts(graph, 2, "random"), 2, tmp_path / "parts", time)

    for data in load_all(str(folder), 2):
        for ntype in graph.num_nodes if time == "nodes" else ():
            ids = data.node_features[f"{ntype}/orig_id"]
            assert torch.equal(data.node_features[f"{ntype}/time"], ids * 3 % 17)
        for etype in graph.edges if time == "edges" else ():
            ids = data.edge_features[f"{':'.join(etype)}/orig_eid"]
            assert torch.equal(data.edge_features[f"{':'.join(etype)}/time"], ids * 5 % 13)


# ---------------------------------------------------------------- labels, and the command line


def test_labels_by_original_id(tmp_path: Path) -> None:
    """From a file beside the partitions."""
    graph = mixed()
    folder = write_pyg(graph, node_parts(graph, 2, "random"), 2, tmp_path / "parts")
    labels, mask = (graph.node_data["_N"][name] for name in ("label", "train_mask"))
    np.savez(folder / "node_data.npz", label=labels.numpy(), train_mask=mask.numpy())
    features = load_partition(folder, 0).node_features
    assert torch.equal(features["_N/label"], labels[features["_N/orig_id"]])
    assert features["_N/train_mask"].dtype == torch.bool
    np.savez(folder / "node_data.npz", label=labels.numpy()[:-1])
    refused(folder, r"node_data.npz: key 'label' is int64 .*57 rows")
    graph = hetero()
    folder = write_glt(graph, node_parts(graph, 2, "random"), 2, tmp_path / "typed")
    labels = graph.node_data["item"]["label"]
    np.savez(folder / "node_data.npz", **{"label/item": labels.numpy()})
    features = load_partition(folder, 1).node_features
    assert torch.equal(features["item/label"], labels[features["item/orig_id"]])
    np.savez(folder / "node_data.npz", label=labels.numpy())
    refused(folder, "node_data.npz: key 'label', expected names and", 1)


def test_training_by_the_command_line(tmp_path: Path) -> None:
    """The loss of each epoch is that of the same graph in DGL's layout."""
    graph, columns = mixed(), mixed().node_data["_N"]
    parts = node_parts(graph, 2, "random")
    folder = write_pyg(graph, parts, 2, tmp_path / "foreign")
    names = ("label", "train_mask")
    np.savez(folder / "node_data.npz", **{name: columns[name].numpy() for name in names})
    known = write_partitions(graph, parts, tmp_path / "known", num_parts=2)
    losses = []
    for source in (str(folder), known):
        told = tmp_path / "told.json"
        words = ["--epochs", "3", "--hidden", "8", "--dropout", "0.5", "--no-progress"]
        words += ["--json", told, "--checkpoint", tmp_path / f"run{len(losses)}"]
        on_threads(2, "train", source, *words)
        losses.append([epoch["loss"] for epoch in json.loads(told.read_text())["epochs"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    out = ["--checkpoint", tmp_path / "run0", "--out", tmp_path, "--gather"]
    on_threads(2, "evaluate", folder, *out)
    with np.load(tmp_path / "predictions.npz") as found:
        assert sorted(found["node_id"]) == list(range(57))


@by_pairs(name=GRAPHS, writer=WRITERS)
def test_inspection(
    name: str, writer: str, tmp_path: Path, partitioned: Cutter, capsys: pytest.CaptureFixture
) -> None:
    known, folder = both(GRAPHS[name](), 3, "random", writer, tmp_path, partitioned)
    found = []
    for path in (folder, known):
        assert main(["inspect", path, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    shown, expected = found
    for one in expected["parts"]:
        one["train_nodes"] = None  # these formats hold no masks
    sums = ("num_nodes", "num_edges", "cut_edges", "halo_nodes", "boundary_nodes")
    for key in (*sums, "rows", "parts", "nodes", "edges"):
        assert shown[key] == expected[key]


# ---------------------------------------------------------------- files that come from somewhere


HOMOGENEOUS_FILES = {
    "pyg": ["node_map.pt", "part_0/graph.pt", "part_0/node_feats.pt", "part_0/edge_feats.pt"],
    "glt": [
        "META", "node_pb.pt", "part0/graph/rows.pt", "part1/graph/eids.pt",
        "part1/graph/weights.pt", "part0/node_feat/feats.pkl", "part0/edge_feat/ids.pkl",
    ],
}  # fmt: skip
FILES = [(kind, name) for kind, names in HOMOGENEOUS_FILES.items() for name in names]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Any) -> Path:
    """Partitions of a homogeneous graph in two parts, and the current folder beside them."""
    monkeypatch.chdir(tmp_path)
    graph, write = mixed(), {"pyg": write_pyg, "glt": write_glt}[request.param]
    return write(graph, node_parts(graph, 2, "random"), 2, tmp_path / "parts")


def refused(folder: Path, match: str, part: int = 0) -> None:
    with pytest.raises(PartitionError, match=match):
        load_partition(folder, part)


@pytest.mark.parametrize(("folder", "name"), FILES, indirect=["folder"])
@pytest.mark.parametrize("how", ["bare", "inside", "missing", "cut", "empty"])
def test_a_bad_file(folder: Path, name: str, how: str) -> None:
    """It is named, and what it says is not done."""
    path = folder / name
    dump = pickle.dump if path.suffix in ("", ".pkl") else torch.save
    if how in ("bare", "inside"):
        with path.open("wb") as file:
            dump(Trap() if how == "bare" else {"row": [torch.zeros(3), Trap()]}, file)
        match = f"{name}: names .*(system|torch.*), expected"
    elif how == "missing":
        path.unlink()
        match = "no such file|No such file|a folder without|has no rows|more rows than"
    else:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) * 2 // 3] if how == "cut" else b"")
        match = f"{name}|a folder without|has no rows for ids|expected a dictionary"
    refused(folder, match)
    assert not Path("trapped").exists()


def put(name: str, row: int, value: int) -> Callable[[dict], dict]:
    def edit(content: dict) -> dict:
        content[name][row] = value
        return content

    return edit


def at(row: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda ids: torch.cat([ids[:row], torch.tensor([value]), ids[row + 1 :]])


def feats(rows: Any) -> Callable[[dict], dict]:
    return lambda content: {**content, "feats": {"x": rows}}


NODES, EDGES, GRAPH = "part_0/node_feats.pt", "part_0/edge_feats.pt", "part_0/graph.pt"
WRONG = [
    ("pyg", "node_map.pt", at(3, 2), "node_map.pt: parts: ids run from 0 to 2, expected 0 to 1"),
    ("pyg", "node_map.pt", at(3, -1), "parts: ids run from -1 to 1"),
    ("pyg", "node_map.pt", lambda ids: ids[:50], r"col|graph.pt: ids run from .* to 49"),
    ("pyg", "node_map.pt", lambda ids: 1 - ids, "global_id: has|edges of type .* end in nodes"),
    ("pyg", "node_map.pt", lambda ids: ids.float(), "expected integers in one column"),
    ("pyg", GRAPH, put("row", 5, 57), "ids run from .* to 57, expected 0 to 56"),
    ("pyg", GRAPH, put("col", 5, -2), "ids run from -2"),
    ("pyg", GRAPH, put("edge_id", 5, 10**6), "edges: ids run from .* to 1000000"),
    ("pyg", GRAPH, lambda one: put("edge_id", 5, int(one["edge_id"][4]))(one),
     r"edge \d+ of type .* is there twice"),
    ("pyg", GRAPH, lambda one: {"row": one["row"]}, "expected a dictionary with"),
    ("pyg", GRAPH, lambda one: {**one, "col": one["col"][:-1]},
     r"graph.pt: col: has \d+ rows, expected"),
    ("pyg", GRAPH, lambda _: [1, 2], "holds list, expected a dictionary"),
    ("pyg", NODES, feats(torch.zeros(3, 2)), r"node_feats.pt: x: got .*, expected"),
    ("pyg", NODES, feats(torch.tensor(1.0)), "node_feats.pt: x: got"),
    ("pyg", NODES, feats("no rows"), "node_feats.pt: x: got 'no rows'"),
    ("pyg", NODES, lambda one: feats(one["feats"]["x"].to(torch.complex64))(one),
     "names torch.ComplexFloatStorage"),
    ("pyg", NODES, lambda one: feats(one["feats"]["x"].T.contiguous().T)(one), "and strides"),
    ("pyg", NODES, put("global_id", 2, 5000), "global_ids are not those that node"),
    ("pyg", NODES, lambda one: {**one, "time": torch.arange(5)}, "time: has 5 rows, expected 57"),
    ("pyg", EDGES, lambda one: {**one, "global_id": one["global_id"].flip(0)},
     "edge_feats.pt: is of other edges than graph.pt"),
    ("pyg", EDGES, lambda one: {**one, "feats": {"edge_attr": one["feats"]["edge_attr"][:-1]}},
     "edge_attr: got"),
    ("glt", "node_pb.pt", at(3, 7), "node_pb.pt: parts: ids run from 0 to 7, expected 0 to 1"),
    ("glt", "part1/graph/rows.pt", at(5, 57), "rows.pt: ids run from .* to 57"),
    ("glt", "part1/graph/cols.pt", at(5, 57), "cols.pt: ids run from .* to 57"),
    ("glt", "part1/graph/eids.pt", at(5, -1), "eids.pt: edges: ids run from -1"),
    ("glt", "part1/graph/eids.pt", lambda ids: ids[1:], r"eids.pt: has \d+ rows, expected"),
    ("glt", "part1/graph/weights.pt", lambda one: one[1:], r"weights.pt: got .*, expected"),
    ("glt", "part1/graph/weights.pt", lambda one: one.double(), "weights of other parts have"),
]  # fmt: skip


@pytest.mark.parametrize(("folder", "name", "edit", "match"), WRONG, indirect=["folder"])
def test_files_that_contradict(folder: Path, name: str, edit: Callable, match: str) -> None:
    torch.save(edit(torch.load(folder / name, weights_only=False)), folder / name)
    with pytest.raises(PartitionError, match=match):
        for part in (0, 1):  # an edge of GraphLearn's is looked at by the part that it ends in
            load_partition(folder, part)


@pytest.mark.parametrize("folder", ["glt"], indirect=True)
def test_features_of_graphlearn_that_contradict(folder: Path) -> None:
    place = folder / "part0/node_feat"
    ids, rows = ((place / f"{name}.pkl").read_bytes() for name in ("ids", "feats"))
    (place / "ids.pkl").write_bytes(ids * 2)
    refused(folder, r"feats.pkl: got None, expected 7 rows")
    (place / "feats.pkl").write_bytes(rows * 2)
    refused(folder, "ids.pkl: an id is there twice; a folder must be partitioned into once")
    (place / "ids.pkl").write_bytes(ids)
    refused(folder, "feats.pkl: holds more rows than .*ids.pkl has ids")
    with (place / "ids.pkl").open("ab") as file:
        pickle.dump("words", file)
    refused(folder, "ids.pkl: holds str, expected columns of ids")
    shutil.rmtree(place)
    refused(folder, "part1/node_feat/feats.pkl: has no rows for ids")
    shutil.rmtree(folder / "part1/node_feat")
    assert "_N/feat" not in load_partition(folder, 0).node_features
    shutil.rmtree(folder / "part1/graph")
    refused(folder, "part1 has no folder 'graph'; .* graph_caching=True must be partitioned again")


TYPED: dict = {"is_hetero": True, "data_cls": "hetero", "node_types": ["a"], "edge_types": []}
META_WRONG: list[tuple[dict, str]] = [
    ({"num_parts": 3}, "(part_2|part2): no such folder, but .* of 3 parts"),
    ({"num_parts": 0}, "num_parts is 0, expected a positive integer"),
    ({"num_parts": "2"}, "num_parts is '2', expected a positive integer"),
    ({"is_hetero": True, "data_cls": "hetero"}, "expected one or more"),
    ({**TYPED, "node_types": ["../a"]}, r"type '../a', expected a name without '/' and ':'"),
    ({**TYPED, "edge_types": [["a", "r", "b"]]}, "joins other types than"),
    ({**TYPED, "edge_types": [["a", "b"]]}, "expected source, relation, destination"),
]


@pytest.mark.parametrize("folder", ["pyg", "glt"], indirect=True)
def test_a_description_that_contradicts(folder: Path) -> None:
    path, store = folder / "META.json", json
    if not path.exists():
        path, store = folder / "META", pickle
    good = store.loads(path.read_bytes())
    for changes, match in META_WRONG:
        text = store.dumps({**good, **changes})
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        refused(folder, match)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02cbuiltins\nbytearray\nJ\0\0\0\x10\x85R.",  # of 2**28 bytes
        b"\x80\x02cbuiltins\nrange\nJ\0\0\0\x10\x85R.",
        b"\x80\x02K\1r\0\0\0\1.",  # kept as number 2**24
        b"\x80\x04\x8e" + (1 << 28).to_bytes(8, "little") + b"short.",
        b"\x80\x02}" + b"." * (2 << 20),
    ],
    ids=["a large object", "a class", "a large memo", "a large text", "a large file"],
)
@pytest.mark.parametrize("folder", ["glt"], indirect=True)
def test_a_description_makes_nothing_larger_than_itself(folder: Path, content: bytes) -> None:
    (folder / "META").write_bytes(content)
    tracemalloc.start()
    refused(folder, "META: .*expected")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("folder", ["pyg", "glt"], indirect=True)
def test_wrong_arguments(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="part_id: got 2, expected 0 to 1"):
        load_partition(folder, 2)
    refused(tmp_path, "a folder without META.json, as PyG's .*, and without META")
    (tmp_path / "products.json").write_text("{}")
    refused(tmp_path, "partitions of DGL are named by their JSON: .*products.json")
    with pytest.raises(PartitionError, match="holds no digests"):
        load_partition(folder, 0, verify=True)

    def case(group: sar.comm.Group) -> None:
        with pytest.raises(PartitionError, match="got a graph of 2 parts, expected 3"):
            sar.load_partition_data(folder, group.rank % 2)

    run_threads(3, case)


def test_a_tensor_larger_than_what_was_saved(tmp_path: Path) -> None:
    torch.save(torch.arange(6), tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    assert data.count(b"K\x06\x85") == 1  # the shape
    (tmp_path / "a.pt").write_bytes(data.replace(b"K\x06\x85", b"K\x07\x85"))
    with pytest.raises(PartitionError, match=r"a.pt: .*shape \(7,\) is larger than its storage"):
        read_saved(str(tmp_path / "a.pt"))


def test_saved_values_are_those_of_torch(tmp_path: Path) -> None:
    """All dtypes that partitions hold, views, scalars, and tensors without rows."""
    base = torch.arange(24.0).view(6, 4)
    content: dict = {str(dtype): base.to(dtype) for dtype in (torch.bool, *CODES)}
    content |= {"view": base[2:5], "column": base.view(-1)[3:9], "scalar": torch.tensor(3)}
    content |= {"none": torch.empty(0, 4), "flat": torch.empty(5, 0), "nested": {"x": [base, None]}}
    torch.save(content, tmp_path / "a.pt")
    found = read_saved(str(tmp_path / "a.pt"))
    for name, value in content.items():
        if isinstance(value, Tensor):
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name].read().view(value.shape), value)
            if value.dim():
                order = np.arange(len(value))[::-2]
                assert torch.equal(found[name].take(order), value[order.copy()])
    assert torch.equal(found["nested"]["x"][0].read(), base)
    with (tmp_path / "a.pkl").open("wb") as file:
        for value in (base, base[2:5], {"x": base.T}):
            pickle.dump(value, file)
    one, two, three = read_pickles(str(tmp_path / "a.pkl"))
    assert torch.equal(one, base) and torch.equal(two, base[2:5])
    assert torch.equal(three["x"], base.T)
