"""Inputs in tables: each format gives the graph that numpy has, and bad ones say where they are."""

from __future__ import annotations

import gzip
import json
import re
import resource
import warnings
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sar.errors import SarError
from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from sar.partition.sources.chunked import read_chunked
from sar.partition.sources.description import read_description, read_edges
from sar.partition.sources.pyg import from_pyg, read_pyg_file

NODES, EDGES = 20, 90
RNG = np.random.default_rng(7)
SRC, DST = RNG.integers(0, NODES, (2, EDGES))
SRC[0], DST[1] = NODES - 1, 0
WEIGHT = RNG.random(EDGES)
SPARSE = RNG.permutation(-(10**15) + np.arange(NODES) * 123_456_789_012)
TEXTS = np.array([f"id-{value:x}-{'ä' * (value % 3)}" for value in range(NODES)], dtype=object)
FEAT = RNG.random((NODES, 3), dtype=np.float32)
FORMATS = ("parquet", "csv", "tsv", "csv.gz", "tsv.gz")


def save(path: Path, columns: dict[str, np.ndarray], header: bool = True) -> Path:
    """A table in the format of the file's name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table(columns), path, row_group_size=40)
        return path
    mark = "\t" if ".tsv" in path.suffixes else ","
    lines = [mark.join(columns)] if header else []
    lines += [mark.join(map(str, row)) for row in zip(*columns.values())]
    text = "\n".join(lines) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def describe(folder: Path, content: object, suffix: str = "yaml") -> Path:
    path = folder / f"graph.{suffix}"
    path.write_text(json.dumps(content) if suffix == "json" else yaml.safe_dump(content))
    return path


def ends(graph: GraphArrays, etype=ETYPE_HOMO) -> list[list[int]]:
    return [one.tolist() for one in graph.edges[etype]]


def first_come(*ids: np.ndarray) -> dict:
    """Numbers of ids in the order in which they come."""
    return {one: number for number, one in enumerate(dict.fromkeys(np.concatenate(ids).tolist()))}


# --- formats


@pytest.mark.parametrize("suffix", FORMATS)
def test_bare_edges(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"e.{suffix}", {"w": WEIGHT, "src": SRC, "dst": DST})
    graph = read_edges([path], tmp_path / "scratch", "mine")
    assert ends(graph) == [SRC.tolist(), DST.tolist()]
    assert graph.name == "mine" and graph.num_nodes == {NTYPE_HOMO: NODES}
    assert graph.edge_data[ETYPE_HOMO]["w"].tolist() == WEIGHT.tolist()
    assert graph.node_data[NTYPE_HOMO]["orig_id"].tolist() == list(range(NODES))


@pytest.mark.parametrize("shape", ["[2, E]", "[E, 2]", "[E, 2] by column"])
def test_bare_edges_in_npy(shape: str, tmp_path: Path) -> None:
    pair = np.stack([SRC, DST]).astype(np.uint32)
    pair = pair if shape == "[2, E]" else pair.T
    np.save(tmp_path / "e.npy", np.asfortranarray(pair) if "column" in shape else pair)
    assert ends(read_edges([tmp_path / "e.npy"], tmp_path, "x")) == [SRC.tolist(), DST.tolist()]


@pytest.mark.parametrize("suffix", ["csv", "tsv.gz"])
def test_first_line_of_numbers_is_an_edge(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"e.{suffix}", {"a": SRC, "b": DST, "c": WEIGHT}, header=False)
    graph = read_edges([path], tmp_path / "scratch", "x")
    assert ends(graph) == [SRC.tolist(), DST.tolist()]
    assert graph.edge_data[ETYPE_HOMO]["column2"].tolist() == WEIGHT.tolist()


def test_comments_above_edges(tmp_path: Path) -> None:
    (tmp_path / "e.tsv").write_text("# a graph\n# FromNodeId ToNodeId\n0\t1\n1\t2\n")
    assert ends(read_edges([tmp_path / "e.tsv"], tmp_path / "s", "x")) == [[0, 1], [1, 2]]
    (tmp_path / "e.tsv").write_text("# a graph\n0\t1\nx\t2\n")
    with pytest.raises(ValueError, match=r"e\.tsv: row 1, column 0: is 'x'"):
        read_edges([tmp_path / "e.tsv"], tmp_path / "s", "x")


def test_what_holds_no_numbers_is_left_out(tmp_path: Path) -> None:
    columns = {
        "src": SRC, "dst": DST,
        "both": pa.array([{"a": 1}] * EDGES),
        "many": pa.array([["a"]] * EDGES),
        "exact": pa.array([Decimal("1.25")] * EDGES),
        "lists": pa.array([[1, 2]] * EDGES),
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    with pytest.warns(UserWarning, match=r"\['both', 'many'\]"):
        graph = read_edges([tmp_path / "e.parquet"], tmp_path / "s", "x")
    data = graph.edge_data[ETYPE_HOMO]
    assert data["exact"].tolist() == [1.25] * EDGES and data["lists"].tolist() == [[1, 2]] * EDGES


def test_texts_beside_edges_are_named_once(tmp_path: Path) -> None:
    path = save(tmp_path / "e.csv", {"a": SRC, "b": DST, "why": TEXTS[SRC], "w": WEIGHT})
    with pytest.warns(UserWarning, match=r"\['why'\] hold no numbers") as told:
        graph = read_edges([path], tmp_path / "s", "x")
    assert len(told) == 1 and list(graph.edge_data[ETYPE_HOMO]) == ["w"]


@pytest.mark.parametrize("ids", [SPARSE, TEXTS], ids=["integers", "texts"])
@pytest.mark.parametrize("suffix", FORMATS)
def test_external_ids(suffix: str, ids: np.ndarray, tmp_path: Path) -> None:
    """Rows of the table of ids are the nodes; two files of edges; columns from several tables."""
    save(tmp_path / f"n.{suffix}", {"pid": ids, "year": np.arange(NODES), "e0": FEAT[:, 0]})
    np.save(tmp_path / "feat.npy", FEAT)
    half = EDGES // 2
    for name, rows in (("e-2", slice(0, half)), ("e-10", slice(half, None))):
        save(
            tmp_path / f"{name}.{suffix}",
            {"a": ids[SRC[rows]], "b": ids[DST[rows]], "w": WEIGHT[rows]},
        )
    table = f"n.{suffix}"
    content = {
        "name": "papers",
        "nodes": {
            "paper": {
                "ids": {"files": table, "column": "pid"},
                "columns": {
                    "feat": {"files": "feat.npy"},
                    "label": {"files": [table], "column": "year"},
                    "both": {"files": table, "columns": ["e0", "year"], "dtype": "float32"},
                },
            }
        },
        "edges": [
            {"type": ["paper", "cites", "paper"], "files": f"e-*.{suffix}", "src": "a", "dst": "b",
             "columns": {"weight": "w"}}
        ],
    }  # fmt: skip
    scratch = tmp_path / "scratch"
    graph = read_description(describe(tmp_path, content), scratch)
    etype = ("paper", "cites", "paper")
    assert graph.name == "papers" and graph.num_nodes == {"paper": NODES}
    assert ends(graph, etype) == [SRC.tolist(), DST.tolist()]
    assert graph.edge_data[etype]["weight"].tolist() == WEIGHT.tolist()
    data = graph.node_data["paper"]
    assert torch.equal(data["feat"], torch.from_numpy(FEAT))
    assert data["label"].tolist() == list(range(NODES)) and data["label"].dtype == torch.int64
    assert torch.equal(data["both"][:, 0], torch.from_numpy(FEAT[:, 0]))
    assert data["both"].dtype == torch.float32
    kept = pq.read_table(scratch / "ids" / "paper.parquet").to_pydict()
    assert kept == {"id": ids.tolist(), "node": list(range(NODES))}


@pytest.mark.parametrize("ids", [SPARSE, TEXTS], ids=["integers", "texts"])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_ids_in_the_order_of_edges(suffix: str, ids: np.ndarray, tmp_path: Path) -> None:
    save(tmp_path / f"e.{suffix}", {"a": ids[SRC], "b": ids[DST]})
    save(tmp_path / f"w.{suffix}", {"who": ids[DST], "what": TEXTS[SRC]})
    content = {
        "nodes": {"user": {"ids": "external"}, "word": None},
        "edges": [
            {"type": ["user", "knows", "user"], "files": f"e.{suffix}"},
            {"type": ["user", "says", "word"], "files": f"w.{suffix}", "src": "who", "dst": "what"},
        ],
    }
    graph = read_description(describe(tmp_path, content, "json"), tmp_path / "s")
    user = first_come(np.stack([ids[SRC], ids[DST]], 1).ravel())
    word = first_come(TEXTS[SRC])
    assert graph.num_nodes == {"user": len(user), "word": len(word)}
    assert ends(graph, ("user", "knows", "user")) == [
        [user[ids[n]] for n in SRC], [user[ids[n]] for n in DST]
    ]  # fmt: skip
    assert ends(graph, ("user", "says", "word")) == [
        [user[ids[n]] for n in DST], [word[TEXTS[n]] for n in SRC]
    ]  # fmt: skip


def test_texts_that_look_like_integers(tmp_path: Path) -> None:
    """In CSV: ids of one type are of one kind, which the other columns and tables tell."""
    (tmp_path / "a.csv").write_text("src,dst\nx,1\ny,02\n")
    (tmp_path / "b.csv").write_text("src,dst\n1,2\n02,1\n")
    content = {
        "nodes": {"p": {"ids": "external"}},
        "edges": [{"type": ["p", name, "p"], "files": f"{name}.csv"} for name in ("a", "b")],
    }
    graph = read_description(describe(tmp_path, content), tmp_path / "s")
    assert ends(graph, ("p", "a", "p")) == [[0, 2], [1, 3]]
    assert ends(graph, ("p", "b", "p")) == [[1, 3], [4, 1]]


def test_ids_that_are_said_to_be_texts(tmp_path: Path) -> None:
    (tmp_path / "n.csv").write_text("id\n7\n07\n")
    (tmp_path / "e.csv").write_text("src,dst\n07,7\n7,7\n")
    for ids in ("text", {"files": "n.csv", "column": "id", "dtype": "text"}):
        content = {"nodes": {"_N": {"ids": ids}}, "edges": [{"files": "e.csv"}]}
        graph = read_description(describe(tmp_path, content), tmp_path / "s")
        assert ends(graph) == ([[0, 1], [1, 1]] if ids == "text" else [[1, 0], [0, 0]])
    content["nodes"]["_N"]["ids"]["dtype"] = "int64"
    with pytest.raises(ValueError, match=r"nodes\._N\.ids\.dtype: is 'int64', expected 'text'"):
        read_description(describe(tmp_path, content), tmp_path / "s")


def test_texts_in_bare_edges_are_external(tmp_path: Path) -> None:
    path = save(tmp_path / "e.csv", {"a": TEXTS[SRC], "b": TEXTS[DST]})
    graph = read_edges([path], tmp_path / "s", "x")
    number = first_come(np.stack([TEXTS[SRC], TEXTS[DST]], 1).ravel())
    assert ends(graph) == [[number[TEXTS[n]] for n in one] for one in (SRC, DST)]


def test_ids_in_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", SPARSE)
    np.save(tmp_path / "e.npy", np.stack([SPARSE[SRC], SPARSE[DST]], 1))
    nodes = {"_N": {"ids": {"files": "ids.npy"}}}
    content = {"nodes": nodes, "edges": [{"files": "e.npy"}]}
    graph = read_description(describe(tmp_path, content), tmp_path / "s")
    assert ends(graph) == [SRC.tolist(), DST.tolist()]


def test_dense_ids_of_several_types(tmp_path: Path) -> None:
    np.save(tmp_path / "e.npy", np.stack([SRC, DST + 5]))
    np.save(tmp_path / "w.npy", WEIGHT.astype(">f4"))
    masks = RNG.random(NODES) < 0.5
    save(tmp_path / "m.csv", {"m": masks.astype(int), "t": np.arange(NODES)})
    content = {
        "nodes": {
            "b": {"count": NODES + 5},
            "a": {"count": NODES, "columns": {"train_mask": {"files": "m.csv", "column": "m"}}},
        },
        "edges": [
            {"type": ["a", "to", "b"], "files": "e.npy", "columns": {"w": {"files": "w.npy"}}},
        ],
    }
    graph = read_description(describe(tmp_path, content), tmp_path / "s")
    assert graph.num_nodes == {"a": NODES, "b": NODES + 5} and list(graph.num_nodes) == ["a", "b"]
    assert ends(graph, ("a", "to", "b")) == [SRC.tolist(), (DST + 5).tolist()]
    assert graph.node_data["a"]["train_mask"].tolist() == masks.tolist()
    weight = graph.edge_data["a", "to", "b"]["w"]
    assert weight.dtype == torch.float32 and weight.tolist() == WEIGHT.astype(np.float32).tolist()


def test_columns_of_lists(tmp_path: Path) -> None:
    lists = {
        "free": pa.array(FEAT.tolist(), pa.list_(pa.float32())),
        "fixed": pa.FixedSizeListArray.from_arrays(pa.array(FEAT.ravel()), 3),
        "day": pa.array(np.arange(NODES, dtype=np.int32), pa.date32()),
        "when": pa.array(np.arange(NODES), pa.timestamp("ms")),
        "kind": pa.array([n % 3 for n in range(NODES)]).dictionary_encode(),
        "flag": pa.array([n % 3 == 0 for n in range(NODES)]),
    }
    pq.write_table(pa.table(lists), tmp_path / "n.parquet", row_group_size=7)
    np.save(tmp_path / "e.npy", np.stack([SRC, DST]))
    columns = {name: {"files": "n.parquet", "column": name} for name in lists}
    content = {"nodes": {"_N": {"count": NODES, "columns": columns}}, "edges": [{"files": "e.npy"}]}
    data = read_description(describe(tmp_path, content), tmp_path / "s").node_data["_N"]
    for name in ("free", "fixed"):
        assert torch.equal(data[name], torch.from_numpy(FEAT))
    assert data["day"].tolist() == data["when"].tolist() == list(range(NODES))
    assert data["day"].dtype == torch.int32 and data["flag"].dtype == torch.bool
    assert data["kind"].tolist() == [n % 3 for n in range(NODES)]


def test_features_stay_where_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "feat.npy", FEAT)
    np.save(tmp_path / "turned.npy", np.asfortranarray(FEAT))
    np.save(tmp_path / "e.npy", np.stack([SRC, DST]))
    columns = {name: {"files": f"{name}.npy"} for name in ("feat", "turned")}
    content = {"nodes": {"_N": {"count": NODES, "columns": columns}}, "edges": [{"files": "e.npy"}]}
    data = read_description(describe(tmp_path, content), tmp_path / "s").node_data["_N"]
    assert torch.equal(data["feat"], data["turned"]) and data["turned"].is_contiguous()
    written = {path.name for path in (tmp_path / "s").rglob("*.npy")}
    assert written == {"src.npy", "dst.npy", "array-1.npy"}


def test_integers_that_go_on_as_floats(tmp_path: Path) -> None:
    """The types of a CSV file are those of its beginning; it may be wrong."""
    rows = 120_000
    weight = np.ones(rows)
    weight[-1] = 0.5
    text = [f"{n},{n + 1},{int(w) if w == 1 else w}" for n, w in enumerate(weight)]
    (tmp_path / "e.csv").write_text("src,dst,w\n" + "\n".join(text))
    graph = read_edges([tmp_path / "e.csv"], tmp_path / "s", "x")
    assert graph.edge_data[ETYPE_HOMO]["w"].tolist() == weight.tolist()
    assert ends(graph)[0] == list(range(rows))
    (tmp_path / "e.csv").write_text("src,dst,w\n" + "\n".join(text) + "\n1,x,2")
    with pytest.raises(ValueError, match=rf"row {rows}, column 'dst': .*'x'"):
        read_edges([tmp_path / "e.csv"], tmp_path / "s", "x")


def test_many_ids_in_many_blocks(tmp_path: Path) -> None:
    """Tables grow, and what has the same hash in part is told apart."""
    ids = np.random.default_rng(0).permutation(400_000) * 4096
    src, dst = ids, np.roll(ids, 1)
    for name, make in (("integers", lambda x: x), ("texts", lambda x: pa.array(x).cast("string"))):
        pq.write_table(pa.table({"src": make(src), "dst": make(dst)}), tmp_path / f"{name}.parquet")
        content = {"nodes": {"_N": {"ids": "external"}}, "edges": [{"files": f"{name}.parquet"}]}
        graph = read_description(describe(tmp_path, content), tmp_path / name)
        number = first_come(np.stack([src, dst], 1).ravel())
        assert ends(graph)[0] == [number[one] for one in src.tolist()]
        assert ends(graph)[1] == [number[one] for one in dst.tolist()]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.floats(-1, 1)), min_size=1),
    st.lists(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=3),
             min_size=31, max_size=31, unique=True),
)  # fmt: skip
def test_formats_agree(tmp_path: Path, rows: list, names: list[str]) -> None:
    """The same edges, with texts of any letters as ids, in each format."""
    src, dst, weight = (list(column) for column in zip(*rows))
    names = [f"x{name}" for name in names]  # no numbers, which CSV cannot tell from others
    table = {"src": [names[n] for n in src], "dst": [names[n] for n in dst], "w": weight}
    want = first_come(np.array([[names[a], names[b]] for a, b in zip(src, dst)]).ravel())
    pq.write_table(pa.table(table), tmp_path / "e.parquet")
    lines = ["src,dst,w"] + [
        ",".join('"' + str(cell).replace('"', '""') + '"' for cell in row)
        for row in zip(*table.values())
    ]
    (tmp_path / "e.csv").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    for name in ("e.parquet", "e.csv", "e.csv.gz"):
        graph = read_edges([tmp_path / name], tmp_path / "s", "x")
        assert ends(graph) == [[want[names[n]] for n in src], [want[names[n]] for n in dst]]
        assert graph.edge_data[ETYPE_HOMO]["w"].tolist() == weight


# --- DGL's chunks


def chunks(folder: Path, **changes: object) -> Path:
    """Two chunks of each type; edges in CSV, Parquet and numpy."""
    cut = [7, NODES - 7]
    entry: dict = {"format": {"name": "numpy"}, "data": []}
    for number, rows in enumerate((slice(0, 7), slice(7, None))):
        np.save(folder / f"feat{number}.npy", FEAT[rows])
        entry["data"].append(f"feat{number}.npy")
        save(folder / f"l{number}.parquet", {"l": np.arange(NODES)[rows]})
        pairs = np.stack([SRC, DST], 1)[: EDGES // 2] if not number else None
        pairs = np.stack([SRC, DST], 1)[EDGES // 2 :] if pairs is None else pairs
        np.savetxt(folder / f"e{number}.txt", pairs, "%d")
        save(folder / f"p{number}.pq.parquet", {"0": pairs[:, 0], "1": pairs[:, 1]})
        np.save(folder / f"n{number}.npy", pairs)
        np.save(
            folder / f"w{number}.npy", WEIGHT[: EDGES // 2] if not number else WEIGHT[EDGES // 2 :]
        )

    def files(kind: str, pattern: str, **options: str) -> dict:
        names = [pattern.format(number) for number in range(2)]
        return {"format": {"name": kind, **options}, "data": names}

    content = {
        "graph_name": "mag",
        "node_type": ["paper", "author"],
        "num_nodes_per_chunk": [cut, cut],
        "edge_type": ["author:writes:paper", "paper:cites:paper", "author:knows:author"],
        "num_edges_per_chunk": [[EDGES // 2, EDGES - EDGES // 2]] * 3,
        "edges": {
            "author:writes:paper": files("csv", "e{}.txt", delimiter=" "),
            "paper:cites:paper": files("parquet", "p{}.pq.parquet"),
            "author:knows:author": files("numpy", "n{}.npy"),
        },
        "node_data": {"paper": {"feat": entry, "label": files("parquet", "l{}.parquet")}},
        "edge_data": {"paper:cites:paper": {"w": files("numpy", "w{}.npy")}},
    } | changes
    path = folder / "metadata.json"
    path.write_text(json.dumps(content))
    return path


def test_chunks_of_dgl(tmp_path: Path) -> None:
    graph = read_chunked(chunks(tmp_path), tmp_path / "s")
    assert graph.name == "mag" and graph.num_nodes == {"author": NODES, "paper": NODES}
    assert len(graph.edges) == 3
    for etype in graph.edges:
        assert ends(graph, etype) == [SRC.tolist(), DST.tolist()]
    assert torch.equal(graph.node_data["paper"]["feat"], torch.from_numpy(FEAT))
    assert graph.node_data["paper"]["label"].tolist() == list(range(NODES))
    assert graph.edge_data["paper", "cites", "paper"]["w"].tolist() == WEIGHT.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes_per_chunk": [[8, NODES - 8], [7, 13]]}, "feat0.npy: holds 7 rows, expected 8"),
        ({"num_edges_per_chunk": [[EDGES, 0]] * 3}, "e0.txt: holds 45 rows, expected 90"),
        ({"num_nodes_per_chunk": [[7, 3], [7, 13]]}, "is 1[0-9], expected 0 or more and below 10"),
        ({"num_nodes_per_chunk": [[7, -3], [7, 13]]}, "expected counts"),
        ({"edge_type": ["author:writes:papr"] * 3}, "twice"),
        ({"node_type": ["papers", "author"]}, "'paper' is unknown, did you mean 'papers'"),
        ({"edges": {}}, "edges.author:writes:paper: is NoneType"),
        ({"graph_name": "a/b"}, "graph_name"),
    ],
)
def test_bad_chunks(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_chunked(chunks(tmp_path, **change), tmp_path / "s")


# --- PyG


def pyg_data():
    data = pytest.importorskip("torch_geometric.data")
    return data.Data(
        x=torch.from_numpy(FEAT),
        edge_index=torch.from_numpy(np.stack([SRC, DST])),
        edge_attr=torch.from_numpy(WEIGHT[:, None]),
        edge_weight=torch.from_numpy(WEIGHT),
        edge_time=torch.arange(EDGES),
        y=torch.arange(NODES)[:, None],
        train_mask=(torch.arange(NODES) % 2).to(torch.uint8),
        year=torch.arange(NODES),
    )


def check_pyg(graph: GraphArrays) -> None:
    assert graph.num_nodes == {NTYPE_HOMO: NODES} and ends(graph) == [SRC.tolist(), DST.tolist()]
    nodes, edges = graph.node_data[NTYPE_HOMO], graph.edge_data[ETYPE_HOMO]
    assert set(nodes) == {"feat", "label", "train_mask", "year", "orig_id"}
    assert torch.equal(nodes["feat"], torch.from_numpy(FEAT)) and nodes["label"].dim() == 1
    assert nodes["train_mask"].dtype == torch.bool
    assert {name: tuple(one.shape) for name, one in edges.items()} == {
        "feat": (EDGES, 1), "weight": (EDGES,), "time": (EDGES,)
    }  # fmt: skip


def test_data_of_pyg(tmp_path: Path) -> None:
    data = pyg_data()
    check_pyg(from_pyg(data, "x"))
    check_pyg(from_pyg(data.to_dict(), "x"))
    for number, content in enumerate((data, data.to_dict(), (data.to_dict(), None, type(data)))):
        torch.save(content, tmp_path / f"{number}.pt")
        check_pyg(read_pyg_file(tmp_path / f"{number}.pt", "x"))
    torch.save(data.to_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    check_pyg(read_pyg_file(tmp_path / "old.pt", "x"))


def test_hetero_data_of_pyg(tmp_path: Path) -> None:
    module = pytest.importorskip("torch_geometric.data")
    data = module.HeteroData()
    data["paper"].x = torch.from_numpy(FEAT)
    data["paper"].name = ["a"] * NODES
    data["author"].num_nodes = NODES + 2
    data["author", "writes", "paper"].edge_index = torch.from_numpy(np.stack([SRC, DST]))
    data["author", "writes", "paper"].edge_attr = torch.from_numpy(WEIGHT)
    torch.save(data, tmp_path / "h.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graphs = from_pyg(data, "x"), read_pyg_file(tmp_path / "h.pt", "x")
    with pytest.warns(UserWarning, match=r"\['name'\] of 'paper'"):
        from_pyg(data, "x")
    for graph in graphs:
        assert graph.num_nodes == {"author": NODES + 2, "paper": NODES}
        etype = ("author", "writes", "paper")
        assert ends(graph, etype) == [SRC.tolist(), DST.tolist()]
        assert graph.edge_data[etype]["feat"].tolist() == WEIGHT.tolist()


class Runs:
    """Its pickle calls a function."""

    def __reduce__(self) -> tuple:
        return (exec, ("raise SystemExit('ran')",))


def test_files_that_name_code_are_refused(tmp_path: Path) -> None:
    torch.save({"edge_index": torch.zeros(2, 1, dtype=torch.int64), "x": Runs()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: names code that is not run"):
        read_pyg_file(tmp_path / "a.pt", "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.zeros(3)}, "has no edge_index"),
        ({"edge_index": torch.zeros(3, 4)}, "expected integers"),
        ({"edge_index": torch.tensor([[0], [9]]), "num_nodes": 3}, r"span \[9, 9\]"),
        ({"edge_index": torch.tensor([[0], [1]]), "num_nodes": -3}, "expected a count"),
        (
            {"edge_index": torch.tensor([[0], [1]]), "x": torch.ones(2), "feat": torch.ones(2)},
            "two",
        ),
    ],
)
def test_bad_data_of_pyg(content: dict, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"a\.pt: .*{message}"):
        read_pyg_file(tmp_path / "a.pt", "x")


# --- bad input


def one_type(folder: Path, **column: object) -> dict:
    """A description of papers whose only column is as given."""
    np.save(folder / "e.npy", np.stack([SRC, DST]))
    nodes = {"_N": {"count": NODES, "columns": {"feat": column}}}
    return {"nodes": nodes, "edges": [{"files": "e.npy"}]}


def changed(value: np.ndarray, row: int, to: object) -> np.ndarray:
    value = value.copy()
    value[row] = to
    return value


@pytest.mark.parametrize("suffix", ["parquet", "csv", "tsv.gz"])
@pytest.mark.parametrize(
    ("column", "row", "to", "message"),
    [
        (
            "src",
            60,
            NODES,
            f"row 20, column 'src': is {NODES}, expected 0 or more and below {NODES}",
        ),
        ("dst", 3, -1, "row 3, column 'dst': is -1, expected 0 or more"),
        ("w", 50, np.nan, "row 10, column 'weight': is nan"),
        ("w", 50, -np.inf, "row 10, column 'weight': is -inf"),
    ],
)
def test_bad_values_are_named(
    suffix: str, column: str, row: int, to: object, message: str, tmp_path: Path
) -> None:
    """Of the second of two files, from row 40 on."""
    table = {"src": SRC, "dst": DST, "w": WEIGHT}
    table[column] = changed(table[column], row, to)
    for number, rows in enumerate((slice(0, 40), slice(40, None))):
        save(tmp_path / f"e{number}.{suffix}", {name: one[rows] for name, one in table.items()})
    content = {
        "nodes": {"_N": {"count": NODES}},
        "edges": [
            {"files": f"e*.{suffix}", "src": "src", "dst": "dst", "columns": {"weight": "w"}}
        ],
    }
    path = f"e{row // 40}.{suffix}"
    with pytest.raises(ValueError, match=re.escape(path) + f": {message}"):
        read_description(describe(tmp_path, content), tmp_path / "s")
    if column == "w":
        read_description(describe(tmp_path, content), tmp_path / "s", allow_nan=True)


def test_ids_that_do_not_fit(tmp_path: Path) -> None:
    def read(ids: np.ndarray, src: np.ndarray) -> None:
        save(tmp_path / "n.parquet", {"id": ids})
        save(tmp_path / "e.csv", {"src": src, "dst": src})
        nodes = {"p": {"ids": {"files": "n.parquet", "column": "id"}}}
        content = {"nodes": nodes, "edges": [{"type": ["p", "to", "p"], "files": "e.csv"}]}
        read_description(describe(tmp_path, content), tmp_path / "s")

    for ids, other in ((SPARSE, 17), (TEXTS, "other")):
        read(ids, ids)
        with pytest.raises(
            ValueError, match=r"n\.parquet: row 9, column 'id': id .* twice.*node 4"
        ):
            read(changed(ids, 9, ids[4]), ids)
        with pytest.raises(ValueError, match=rf"e\.csv: row 6, column 'src': is '?{other}"):
            read(ids, changed(ids, 6, other))
    with pytest.raises(
        ValueError, match=r"e\.csv: row 0, column 'src': holds texts, but .* integers"
    ):
        read(SPARSE, TEXTS)


def test_sparse_ids_without_a_word(tmp_path: Path) -> None:
    path = save(tmp_path / "e.csv", {"src": abs(SPARSE), "dst": abs(SPARSE)})
    with pytest.raises(ValueError, match="ids: external"):
        read_edges([path], tmp_path / "s", "x")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_missing_values(suffix: str, tmp_path: Path) -> None:
    """Also of ids; a text that is empty is missing, too."""
    for column, message in (("src", "row 5, column 'src'"), ("w", "row 5, column 'w'")):
        table = {"src": list(SRC), "dst": list(DST), "w": list(WEIGHT)}
        table[column][5] = None
        if suffix == "csv":
            table[column][5] = ""
        path = save(tmp_path / f"e.{suffix}", table)
        with pytest.raises(ValueError, match=rf"{message}: the value is missing"):
            read_edges([path], tmp_path / "s", "x")


def test_rows_that_do_not_match(tmp_path: Path) -> None:
    np.save(tmp_path / "feat.npy", FEAT[:-1])
    content = one_type(tmp_path, files="feat.npy")
    with pytest.raises(
        ValueError, match=rf"feat\.npy: column 'feat' has 19 rows, expected {NODES}"
    ):
        read_description(describe(tmp_path, content), tmp_path / "s")
    np.save(tmp_path / "feat.npy", changed(FEAT, 4, np.inf))
    with pytest.raises(ValueError, match=r"feat\.npy: row 4, column 'feat': is inf"):
        read_description(describe(tmp_path, content), tmp_path / "s")


def test_files_of_other_types(tmp_path: Path) -> None:
    np.save(tmp_path / "f1.npy", FEAT[:9])
    np.save(tmp_path / "f2.npy", FEAT[9:].astype(np.float64))
    content = one_type(tmp_path, files="f?.npy")
    with pytest.raises(
        ValueError, match=r"f2\.npy: row 0, .*float64 \[3\], expected float32 \[3\]"
    ):
        read_description(describe(tmp_path, content), tmp_path / "s")
    content = one_type(tmp_path, files="f?.npy", dtype="float64")
    read_description(describe(tmp_path, content), tmp_path / "s")
    save(tmp_path / "1.parquet", {"f": np.arange(9, dtype=np.int32)})
    save(tmp_path / "2.parquet", {"f": np.arange(NODES - 9)})
    content = one_type(tmp_path, files="?.parquet", column="f")
    with pytest.raises(ValueError, match=r"2\.parquet: row 0, .*int64 \[\], expected int32 \[\]"):
        read_description(describe(tmp_path, content), tmp_path / "s")


def test_lists_of_several_lengths(tmp_path: Path) -> None:
    rows = FEAT.tolist()
    rows[8] = rows[8][:2]
    pq.write_table(pa.table({"f": rows}), tmp_path / "n.parquet")
    content = one_type(tmp_path, files="n.parquet", column="f")
    with pytest.raises(ValueError, match=r"row 8, column 'f': holds 2 numbers, expected 3"):
        read_description(describe(tmp_path, content), tmp_path / "s")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"edges": [{"files": "nothing-*.csv"}]}, FileNotFoundError, "nothing-.*no file matches"),
        ({"edge": []}, ValueError, "key 'edge' is unknown, did you mean 'edges'"),
        ({"edges": [{"file": "e.npy"}]}, ValueError, r"edges\[0\]: key 'file' .* mean 'files'"),
        ({"edges": []}, ValueError, "edges: is .*expected a list"),
        ({"edges": [{"files": "e.npy"}] * 2}, ValueError, "is there twice"),
        ({"edges": [{"files": "e.npy", "src": 0}]}, ValueError, "'src' and 'dst'"),
        ({"edges": [{"files": "e.npy", "src": 0, "dst": 2}]}, ValueError, "no column number 2"),
        ({"edges": [{"files": "n.csv", "src": "f", "dst": "idd"}]}, ValueError,
         "no column 'idd', did you mean 'id'.*it has 'id', 'f'"),
        ({"edges": [{"files": "e.npy", "type": ["a", "b"]}]}, ValueError, r"edges\[0\]\.type"),
        ({"edges": [{"files": "e.npy", "type": ["a", "b", "c"]}]}, ValueError, "among the nodes"),
        ({"edges": [{"files": "e.dat"}]}, ValueError, "of no known kind"),
        ({"edges": [{"files": "n.csv", "src": 0, "dst": 1}]}, ValueError, "names columns; name"),
        ({"nodes": {"_N": {"count": -1}}}, ValueError, r"nodes\._N\.count"),
        ({"nodes": {"_N": {"count": 1, "ids": "external"}}}, ValueError, "'count' and 'ids'"),
        ({"nodes": {"_N": {"columns": {"f": {"files": "e.npy"}}}}}, ValueError, "need 'count'"),
        ({"nodes": {"_N": {"count": 9, "columns": {"f": {"files": "n.csv"}}}}}, ValueError,
         "a 'column'"),
        ({"nodes": {"_N": {"count": 9, "columns": {"f": {"files": "e.npy", "dtype": "flot32"}}}}},
         ValueError, "did you mean 'float32'"),
        ({"nodes": {"_N": {"count": NODES, "columns": {"orig_id": {"files": "i.npy"}}}}},
         ValueError, "cannot have a column 'orig_id'"),
        ({"edges": [{"files": "i.npy"}]}, ValueError, "no column number 1"),
        ({"edges": [{"files": "e.npy", "columns": {"a/b": {"files": "w.npy"}}}]}, ValueError,
         "cannot have a column 'a/b'"),
        ({"name": "a/b"}, ValueError, "name: is 'a/b'"),
    ],
)  # fmt: skip
def test_bad_descriptions(
    change: dict, error: type[Exception], message: str, tmp_path: Path
) -> None:
    np.save(tmp_path / "e.npy", np.stack([SRC, DST]))
    np.save(tmp_path / "i.npy", np.arange(NODES))
    np.save(tmp_path / "w.npy", WEIGHT)
    (tmp_path / "e.dat").write_text("")
    save(tmp_path / "n.csv", {"id": np.arange(NODES), "f": FEAT[:, 0]})
    content = {"nodes": {"_N": {"count": NODES}}, "edges": [{"files": "e.npy"}]} | change
    with pytest.raises(error, match=message):
        read_description(describe(tmp_path, content), tmp_path / "s")


def test_files_that_are_cut_short(tmp_path: Path) -> None:
    for suffix in ("parquet", "csv.gz", "npy"):
        path = tmp_path / f"e.{suffix}"
        if suffix == "npy":
            np.save(path, np.stack([SRC, DST]))
        else:
            save(path, {"src": SRC, "dst": DST})
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(ValueError, match=rf"e\.{suffix}: cannot be read"):
            read_edges([path], tmp_path / "s", "x")


def test_keys_that_are_there_twice(tmp_path: Path) -> None:
    for name, text in (("g.yaml", "name: a\nname: b"), ("g.json", '{"name": 1, "name": 2}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="key 'name' is there twice"):
            read_description(tmp_path / name, tmp_path / "s")
    bomb = ["a0: &a0 [x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)
    ]
    (tmp_path / "g.yaml").write_text("\n".join([*bomb, "edges: *a29"]))
    with pytest.raises(ValueError, match="key 'a0' is unknown"):
        read_description(tmp_path / "g.yaml", tmp_path / "s")
    (tmp_path / "g.yaml").write_text("name: &b [[x, x], [x, x]]\nedges: [*b]")
    with pytest.raises(ValueError, match=r"edges\[0\]: is "):
        read_description(tmp_path / "g.yaml", tmp_path / "s")


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "!!python/object/apply:os.getcwd []", "\x00"])
def test_descriptions_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"g\.yaml"):
        read_description(tmp_path / "g.yaml", tmp_path / "s")


def test_full_disk(tmp_path: Path) -> None:
    """Is an error of the system that names the file that could not be written."""
    np.save(tmp_path / "e.npy", np.zeros((2, 100_000), np.int64))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, before[1]))
    try:
        with pytest.raises(OSError, match=r"src\.npy: could not be written"):
            read_edges([tmp_path / "e.npy"], tmp_path / "s", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def damaged(content: bytes, count: int) -> list[bytes]:
    """Cut short, and with bytes changed."""
    rng = np.random.default_rng(len(content))
    found = [content[: int(rng.integers(len(content)))] for _ in range(count)]
    for _ in range(count):
        changed = bytearray(content)
        for at in rng.integers(0, len(content), int(rng.integers(1, 4))):
            changed[at] ^= int(rng.integers(1, 256))
        found.append(bytes(changed))
    return found


def read_anything(path: Path, read: Callable[[], GraphArrays]) -> bool:
    """Whether it could not be read; then the error is one of ours, and names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read()
    except (ValueError, FileNotFoundError, SarError) as error:
        assert path.name.split(".")[0] in str(error), error
        return True
    return False


@pytest.mark.parametrize("suffix", ["parquet", "csv", "csv.gz", "npy", "yaml", "json", "pt"])
def test_damaged_files(suffix: str, tmp_path: Path) -> None:
    edges = {"src": SRC, "dst": DST, "w": WEIGHT}
    path = tmp_path / f"broken.{suffix}"
    read = {
        "yaml": lambda: read_description(path, tmp_path / "s"),
        "json": lambda: read_chunked(path, tmp_path / "s"),
        "pt": lambda: read_pyg_file(path, "x"),
    }.get(suffix, lambda: read_edges([path], tmp_path / "s", "x"))
    if suffix == "npy":
        np.save(path, np.stack([SRC, DST]))
    elif suffix == "yaml":
        save(tmp_path / "e.csv", edges)
        path.write_text("name: broken\nnodes: {_N: {count: 20}}\nedges: [{files: e.csv}]\n")
    elif suffix == "json":
        chunks(tmp_path).rename(path)
    elif suffix == "pt":
        torch.save({"edge_index": torch.from_numpy(np.stack([SRC, DST]))}, path)
    else:
        save(path, edges)
    whole = path.read_bytes()
    read()
    refused = 0
    for content in damaged(whole, 60):
        path.write_bytes(content)
        refused += read_anything(path, read)
    assert refused > 30
