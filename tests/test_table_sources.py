"""Inputs in tables: each format gives the graph that numpy has."""

from __future__ import annotations

import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_files import (
    DST,
    EDGES,
    FEAT,
    FORMATS,
    NODES,
    SPARSE,
    SRC,
    TEXTS,
    WEIGHT,
    describe,
    ends,
    first_come,
    save,
)

from sar.partition.sources.description import read_description, read_edges


@pytest.mark.parametrize("suffix", FORMATS)
def test_bare_edges(suffix: str, tmp_path: Path) -> None:
    path = save(tmp_path / f"e.{suffix}", {"w": WEIGHT, "src": SRC, "dst": DST})
    graph = read_edges([path], tmp_path / "scratch", "mine")
    assert ends(graph) == [SRC.tolist(), DST.tolist()]
    assert graph.name == "mine" and graph.num_nodes == {NTYPE_HOMO: NODES}
    assert graph.edge_data[ETYPE_HOMO]["w"].tolist() == WEIGHT.tolist()
    assert graph.node_data[NTYPE_HOMO]["orig_id"].tolist() == list(range(NODES))
    if suffix != "parquet":  # a first line of numbers is an edge
        path = save(tmp_path / f"n.{suffix}", {"a": SRC, "b": DST, "c": WEIGHT}, header=False)
        graph = read_edges([path], tmp_path / "scratch", "x")
        assert ends(graph) == [SRC.tolist(), DST.tolist()]
        assert graph.edge_data[ETYPE_HOMO]["column2"].tolist() == WEIGHT.tolist()


def test_bare_edges_in_npy(tmp_path: Path) -> None:
    pair = np.stack([SRC, DST]).astype(np.uint32)
    for stored in (pair, pair.T.copy(), pair.T):  # [2, E], [E, 2], and that by column
        np.save(tmp_path / "e.npy", stored)
        assert ends(read_edges([tmp_path / "e.npy"], tmp_path, "x")) == [SRC.tolist(), DST.tolist()]


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
    with pytest.warns(UserWarning, match=r"\['both', 'many'\] hold no numbers") as told:
        graph = read_edges([tmp_path / "e.parquet"], tmp_path / "s", "x")
    data = graph.edge_data[ETYPE_HOMO]
    assert len(told) == 1 and list(data) == ["exact", "lists"]
    assert data["exact"].tolist() == [1.25] * EDGES and data["lists"].tolist() == [[1, 2]] * EDGES


@pytest.mark.parametrize("ids", [SPARSE, TEXTS], ids=["integers", "texts"])
@pytest.mark.parametrize("suffix", ["parquet", "tsv.gz"])
def test_external_ids(suffix: str, ids: np.ndarray, tmp_path: Path) -> None:
    """Rows of the table of ids are the nodes; two files of edges; columns from several tables."""
    table, etype, half = f"n.{suffix}", ["paper", "cites", "paper"], EDGES // 2
    save(tmp_path / table, {"pid": ids, "year": np.arange(NODES), "e0": FEAT[:, 0]})
    np.save(tmp_path / "feat.npy", FEAT)
    for name, rows in (("e-2", slice(0, half)), ("e-10", slice(half, None))):
        columns = {"a": ids[SRC[rows]], "b": ids[DST[rows]], "w": WEIGHT[rows]}
        save(tmp_path / f"{name}.{suffix}", columns)
    columns = {
        "feat": {"files": "feat.npy"},
        "label": {"files": [table], "column": "year"},
        "both": {"files": table, "columns": ["e0", "year"], "dtype": "float32"},
    }
    paper = {"ids": {"files": table, "column": "pid"}, "columns": columns}
    edges = {"type": etype, "files": f"e-*.{suffix}", "src": "a", "dst": "b"}
    content = {"nodes": {"paper": paper}, "edges": [{**edges, "columns": {"weight": "w"}}]}
    graph = read_description(describe(tmp_path, content), tmp_path / "s")
    assert graph.name == "graph" and graph.num_nodes == {"paper": NODES}
    assert ends(graph, tuple(etype)) == [SRC.tolist(), DST.tolist()]
    assert graph.edge_data[tuple(etype)]["weight"].tolist() == WEIGHT.tolist()
    data = graph.node_data["paper"]
    assert torch.equal(data["feat"], torch.from_numpy(FEAT))
    assert data["label"].tolist() == list(range(NODES)) and data["label"].dtype == torch.int64
    assert torch.equal(data["both"][:, 0], torch.from_numpy(FEAT[:, 0]))
    assert data["both"].dtype == torch.float32
    kept = pq.read_table(tmp_path / "s" / "ids" / "paper.parquet").to_pydict()
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
    """In CSV: ids of one type are of one kind, which the other columns and tables tell, or the
    description."""
    (tmp_path / "a.csv").write_text("src,dst\nx,1\ny,02\n")
    (tmp_path / "b.csv").write_text("src,dst\n1,2\n02,1\n")
    content: dict = {
        "nodes": {"p": {"ids": "external"}},
        "edges": [{"type": ["p", name, "p"], "files": f"{name}.csv"} for name in ("a", "b")],
    }
    graph = read_description(describe(tmp_path, content), tmp_path / "s")
    assert ends(graph, ("p", "a", "p")) == [[0, 2], [1, 3]]
    assert ends(graph, ("p", "b", "p")) == [[1, 3], [4, 1]]
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


def read_columns(folder: Path, columns: dict) -> dict:
    np.save(folder / "e.npy", np.stack([SRC, DST]))
    content = {"nodes": {"_N": {"count": NODES, "columns": columns}}, "edges": [{"files": "e.npy"}]}
    return read_description(describe(folder, content), folder / "s").node_data["_N"]


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
    columns = {name: {"files": "n.parquet", "column": name} for name in lists}
    data = read_columns(tmp_path, columns)
    for name in ("free", "fixed"):
        assert torch.equal(data[name], torch.from_numpy(FEAT))
    assert data["day"].tolist() == data["when"].tolist() == list(range(NODES))
    assert data["day"].dtype == torch.int32 and data["flag"].dtype == torch.bool
    assert data["kind"].tolist() == [n % 3 for n in range(NODES)]


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
