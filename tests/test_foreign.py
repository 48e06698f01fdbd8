"""Files that come from somewhere: nothing in them runs, and none of them ends the program."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import dgl
import numpy as np
import pytest
import scipy.sparse
import torch
from harness.parts import load_partition, write_partitions
from table_files import Trap

from sar import SarError
from sar.__main__ import main
from sar.partition.sources.open import open_apart, open_source
from sar.partition.unpickle import NotPlainError, plain_pickles

NODES, TEST = 560, 10


@pytest.fixture
def planetoid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files as Planetoid's ``ind.cora_v2.*``, and a trap's place to show."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    features = scipy.sparse.random(NODES, 7, 0.3, "csr", np.float32, random_state=0)
    labels = np.eye(3, dtype=np.int32)[draw.integers(0, 3, NODES)]
    graph: defaultdict = defaultdict(list)
    for src, dst in draw.integers(0, NODES, (900, 2)).tolist():
        graph[src].append(dst)
    for node in range(NODES):
        graph[node].append((node + 1) % NODES)
    first = NODES - TEST
    files = {
        "x": features[:20], "y": labels[:20], "allx": features[:first], "ally": labels[:first],
        "tx": features[first:], "ty": labels[first:], "graph": graph,
    }  # fmt: skip
    url = dgl.data.utils._get_dgl_url("dataset/cora_v2.zip")
    suffix = hashlib.sha1(url.encode()).hexdigest()[:8]  # as DGL names the folder
    folder = tmp_path / "root" / f"cora_v2_{suffix}"
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / f"ind.cora_v2.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.cora_v2.test.index").write_text("\n".join(map(str, range(first, NODES))))
    return folder


def test_what_planetoid_wrote_is_read(planetoid: Path) -> None:
    graph = open_source(f"cora:root={planetoid.parent}")
    assert graph.total_nodes == NODES and graph.node_data["_N"]["feat"].shape == (NODES, 7)
    again = open_source(f"cora:root={planetoid.parent}")  # what DGL cached, its pickle too
    assert again.total_edges == graph.total_edges


@pytest.mark.parametrize("name", ["x", "graph"])
def test_a_pickle_of_a_data_set_does_not_run(planetoid: Path, name: str) -> None:
    (planetoid / f"ind.cora_v2.{name}").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(SarError, match=rf"cora.*ind.cora_v2.{name}: names .*system"):
        open_source(f"cora:root={planetoid.parent}")
    assert not Path("trapped").exists()


def test_a_cached_pickle_does_not_run(planetoid: Path) -> None:
    """DGL catches what it cannot read of its cache, and says nothing."""
    open_source(f"cora:root={planetoid.parent}")
    (cached,) = planetoid.rglob("*.pkl")
    cached.write_bytes(pickle.dumps({"num_classes": Trap()}))
    with pytest.raises(SarError, match=rf"cora.*{cached.name}: names .*system, expected arrays"):
        open_source(f"cora:root={planetoid.parent}")
    assert not Path("trapped").exists()


def test_the_trap_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "trapped").exists()


def test_other_ways_to_an_unpickler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of objects, torch's files."""
    monkeypatch.chdir(tmp_path)
    np.savez("good.npz", names=np.array([{"a": 1}, None], dtype=object))
    np.savez("bad.npz", names=np.array([Trap()], dtype=object))
    torch.save(Trap(), "bad.pt")
    with plain_pickles(), np.load("good.npz", allow_pickle=True) as content:
        assert content["names"][0] == {"a": 1}
    with pytest.raises(NotPlainError, match="names .*system"), plain_pickles():
        with pytest.raises(NotPlainError), np.load("bad.npz", allow_pickle=True) as content:
            content["names"]
        with pytest.raises(pickle.UnpicklingError):
            torch.load("bad.pt", weights_only=False)
        with pytest.raises(NotPlainError):
            pickle.loads(pickle.dumps(Trap()))
    assert not Path("trapped").exists()
    assert pickle.loads(pickle.dumps(Path("a"))) == Path("a"), "back to what it was"


# ---------------------------------------------------------------- compiled readers


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    graph = dgl.graph((torch.arange(30) % 7, torch.arange(30) % 5), num_nodes=8)
    graph.ndata["feat"] = torch.rand(8, 3)
    dgl.save_graphs(str(tmp_path / "graph.bin"), [graph])
    return tmp_path / "graph.bin"


def test_a_saved_graph_is_read_apart(saved: Path) -> None:
    here, there = open_source(str(saved)), open_apart(str(saved))
    assert there.num_nodes == here.num_nodes and there.name == here.name
    for one, other in zip(there.edges.values(), here.edges.values(), strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    assert torch.equal(there.node_data["_N"]["feat"], here.node_data["_N"]["feat"])
    there.validate()


@pytest.mark.parametrize("how", ["os.abort()", "os.kill(os.getpid(), 11)", "os._exit(7)"])
def test_a_reader_that_dies_is_an_error(
    saved: Path, how: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = saved.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if any(one.endswith('sources/open.py') for one in sys.orig_argv): {how}\n"
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.getcwd()}")
    assert main(["partition", str(saved), "--parts", "2", "--out", str(saved.parent / "out")]) == 2
    error = capsys.readouterr().err
    assert "graph.bin: its reader ended, killed by S" in error or "ended, status 7" in error
    assert error.count("\n") == 1


def test_a_graph_that_contradicts_itself_is_named(saved: Path) -> None:
    """DGL's reader takes ids that no node has."""
    data, ids = saved.read_bytes(), (torch.arange(30) % 5).numpy().tobytes()
    saved.write_bytes(data.replace(ids, np.full(30, 2**40).tobytes()))
    with pytest.raises(ValueError, match="graph.bin: edges.* ids span .*1099511627776"):
        open_apart(str(saved))


def test_a_damaged_count_does_not_take_all_memory() -> None:
    """DGL's reader asks for as much as the file says."""
    code = "from sar.partition.sources.open import _limit; _limit(1000); bytearray(6 << 30)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().endswith("MemoryError")


def test_errors_of_the_child_are_the_parents(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.bin"
    foreign.write_bytes(b"no graph")
    with pytest.raises(ValueError, match="foreign.bin: neither an .npz file nor one of dgl"):
        open_apart(str(foreign))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_apart(str(tmp_path / "none.bin"))


# ---------------------------------------------------------------- npz


def test_archives_that_numpy_does_not_stop_at(tmp_path: Path) -> None:
    """A compression that nobody knows, an absurd shape, and a member that is no array."""
    path = tmp_path / "graph.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("src.npy", b"x" * 100)
    data = path.read_bytes()
    for method in (99, 1):
        data = data.replace(b"\x00\x00", bytes([method, 0]), 1)
        entry = data.index(b"PK\x01\x02") + 10
        path.write_bytes(data[:entry] + bytes([method, 0]) + data[entry + 2 :])
        with pytest.raises(ValueError, match="graph.npz: not a graph this program reads"):
            open_source(str(path))
    with zipfile.ZipFile(path, "w") as archive, archive.open("src.npy", "w") as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (10**15,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match="graph.npz: not a graph this program reads: key 'src'"):
        open_source(str(path))
    np.savez(path, num_nodes=5, src=np.arange(5), dst=np.arange(5))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("feat.npy", b"no array")
    with pytest.raises(ValueError, match="graph.npz: .*key 'feat' holds bytes, expected an array"):
        open_source(str(path))


NUMBERS = {
    "u2": torch.int32, "u4": torch.int64, "u8": torch.int64, ">i4": torch.int32,
    ">f8": torch.float64, "f2": torch.float16, "?": torch.bool, "i1": torch.int8,
}  # fmt: skip


def test_numbers_are_stored_as_what_partitions_know(tmp_path: Path) -> None:
    values = {kind: np.array([[0, 1], [1, 0], [1, 1]], dtype=kind) for kind in NUMBERS}
    np.savez(tmp_path / "g.npz", num_nodes=3, src=np.arange(3), dst=np.arange(3), **values)
    graph = open_source(str(tmp_path / "g.npz"))
    path = write_partitions(graph, [0, 0, 0], tmp_path / "parts")
    features = load_partition(path, 0, verify=True).node_features
    for kind, dtype in NUMBERS.items():
        found = features[f"_N/{kind}"]
        assert found.dtype == (torch.uint8 if kind == "?" else dtype)
        assert found.tolist() == values[kind].astype(int).tolist()


COLUMNS = {
    "a string": np.array(list("abcde")),
    "bytes": np.array(list("abcde"), dtype="S3"),
    "a date": np.zeros(5, "M8[s]"),
    "complex": np.zeros((5, 2), complex),
    "wide": np.zeros(5, np.longdouble),
    "too large": np.full(5, 2**63, np.uint64),
    "fields": np.zeros(5, [("a", int)]),
}


def test_what_cannot_be_stored_is_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the cut, and by a training that cuts."""
    named = {f"{name}/a": values for name, values in COLUMNS.items()}
    np.savez(
        tmp_path / "g.npz", **{"num_nodes/a": 5, "edges/a/to/a": np.zeros((2, 3), int), **named}
    )
    words = ["--parts", "1", "--method", "random", "--out", str(tmp_path / "parts")]
    assert main(["partition", str(tmp_path / "g.npz"), *words]) == 0
    told = capsys.readouterr().err.splitlines()
    for line, (name, values) in zip(told, named.items(), strict=True):
        assert line.startswith(f"sar partition: warning: {name!r} is left out: got ")
        assert str(values.dtype) in line
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    columns = {"title": COLUMNS["a string"], "other": np.array(list("ab"))}
    np.savez(tmp_path / "h.npz", num_nodes=5, src=np.arange(5), dst=np.arange(5), **columns)
    assert main(["train", str(tmp_path / "h.npz"), "--method", "random"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("sar partition: warning: 'title' is left out: got <U1, expected")
    assert told[1].startswith("sar train: error: features: got 'feat', expected one of")
