"""Inputs of `sar partition`: npz files, DGL graphs, data sets by name, errors for the rest."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, community

import sar
from sar import MissingDependencyError, SarError
from sar.partition.sources.datasets import weights_only_loads
from sar.partition.sources.open import open_source


def save(path: Path, **content) -> str:
    np.savez(path, **content)
    return str(path)


def small(**changes) -> dict:
    content = {
        "name": np.array("small"),
        "num_nodes": np.array(4),
        "src": np.array([0, 1, 2, 0], dtype=np.int32),
        "dst": np.array([1, 2, 3, 0], dtype=np.int32),
        "feat": np.arange(8, dtype=np.float32).reshape(4, 2),
        "label": np.array([0, 1, -1, 1], dtype=np.int8),
        "train_mask": np.array([1, 0, 0, 1], dtype=np.uint8),
        "train_masks": np.array([[1, 0, 0, 1], [0, 0, 1, 0]], dtype=bool),
        "directed": np.array(True),
        "unlabelled_zero_rows": np.array([2], dtype=np.int32),
    }
    content.update(changes)
    return {key: value for key, value in content.items() if value is not None}


SPARSE = {
    "feat": None,
    "feat_data": np.array([5, 6, 7], dtype=np.float32),
    "feat_indices": np.array([1, 0, 2], dtype=np.uint16),
    "feat_indptr": np.array([0, 1, 1, 3, 3], dtype=np.int32),
    "feat_shape": np.array([4, 3]),
}


def test_npz(tmp_path):
    graph = open_source(save(tmp_path / "tiny.npz", **small()))
    assert graph.name == "tiny"
    assert graph.num_nodes == {NTYPE_HOMO: 4}
    src, dst = graph.edges[ETYPE_HOMO]
    assert (src.tolist(), dst.tolist()) == ([0, 1, 2, 0], [1, 2, 3, 0])
    data = graph.node_data[NTYPE_HOMO]
    assert set(data) == {"feat", "label", "train_mask", "train_masks", "orig_id"}
    assert data["label"].dtype == torch.int64 and data["label"].tolist() == [0, 1, -1, 1]
    assert data["train_mask"].dtype == torch.bool
    assert data["train_masks"].tolist() == [[1, 0], [0, 0], [0, 1], [1, 0]]
    assert data["orig_id"].tolist() == [0, 1, 2, 3]


def test_other_forms_of_npz(tmp_path):
    """Each edge once; sparse features; labels that are floats, of which NaN says that there is
    none and a fraction is a value to regress."""
    label = np.array([0, 1.5, np.nan, 1], dtype=np.float32)
    changes = {"undirected_once": np.array(True), "label": label, **SPARSE}
    graph = open_source(save(tmp_path / "g.npz", **small(**changes)))
    src, dst = graph.edges[ETYPE_HOMO]
    assert src.tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert dst.tolist() == [1, 2, 3, 0, 0, 1, 2, 0]
    data = graph.node_data[NTYPE_HOMO]
    assert data["feat"].tolist() == [[0, 5, 0], [0, 0, 0], [6, 0, 7], [0, 0, 0]]
    assert data["label"].dtype == torch.float32 and data["label"].isnan().tolist()[2]
    assert data["label"][:2].tolist() == [0, 1.5]


def test_npz_triples(tmp_path):
    path = save(
        tmp_path / "kg.npz",
        num_entities=np.array(5),
        num_relations=np.array(2),
        train=np.array([[0, 1, 2], [3, 0, 4]], dtype=np.int32),
        valid=np.array([[1, 1, 1]], dtype=np.int32),
        test=np.zeros((0, 3), dtype=np.int32),
    )
    graph = open_source(path)
    src, dst = graph.edges[ETYPE_HOMO]
    data = graph.edge_data[ETYPE_HOMO]
    assert (src.tolist(), data["etype"].tolist(), dst.tolist()) == ([0, 3, 1], [1, 0, 1], [2, 4, 1])
    assert data["train_mask"].tolist() == [True, True, False]
    assert data["val_mask"].tolist() == [False, False, True]
    assert not data["test_mask"].any()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"src": np.array([0, 1, 2, 4])}, "expected .0, 3."),
        ({"src": np.array([0, 1, 2, -1])}, "expected .0, 3."),
        ({"src": np.array([0, 1])}, "equal length"),
        ({"src": np.array([0.5, 1, 2, 3])}, "expected integers"),
        ({"src": None}, "expected 'src'"),
        ({"dst": None}, "dst"),
        ({"num_nodes": None}, "num_nodes"),
        ({"num_nodes": np.array(-4)}, "non-negative"),
        ({"num_nodes": np.array([4, 4])}, "one non-negative integer"),
        ({"feat": np.zeros((3, 2))}, "expected 4 rows"),
        ({"label": np.zeros(5, dtype=int)}, "expected 4 rows"),
        ({"train_mask": np.zeros(5, dtype=bool)}, "expected 4 rows"),
        ({**SPARSE, "feat_indices": np.array([1, 0, 3])}, "expected .0, 3"),
        ({**SPARSE, "feat_indices": np.array([1, 0, -1])}, "expected .0, 3"),
        ({**SPARSE, "feat_indptr": np.array([0, 2, 1, 3, 3])}, "ascending"),
        ({**SPARSE, "feat_indptr": np.array([0, 1, 1, 3])}, "ascending"),
        ({**SPARSE, "feat_indptr": np.array([0, 1, 1, 3, 9])}, "ends at 9"),
        ({**SPARSE, "feat_shape": np.array([5, 3])}, "feat_shape"),
        ({**SPARSE, "feat_shape": None}, "feat_shape"),
    ],
)
def test_damaged_npz(tmp_path, changes, words):
    path = save(tmp_path / "g.npz", **small(**changes))
    with pytest.raises(ValueError, match=words) as caught:
        open_source(path)
    assert path in str(caught.value)


def test_npz_files_that_are_none(tmp_path):
    path = save(tmp_path / "g.npz", **small(feat=np.array([None, 1, 2, 3], dtype=object)))
    with pytest.raises(ValueError, match="allow_pickle"):
        open_source(path)
    content = Path(save(tmp_path / "g.npz", **small())).read_bytes()
    for length in (0, 10, len(content) // 2, len(content) - 30):
        Path(path).write_bytes(content[:length])
        with pytest.raises(ValueError, match="not a graph"):
            open_source(path)
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(ValueError, match="neither"):
        open_source(str(tmp_path / "notes.txt"))


def test_saved_dgl_graph(tmp_path):
    dgl = pytest.importorskip("dgl")
    graph = dgl.graph((torch.tensor([0, 1, 1]), torch.tensor([1, 2, 2])), idtype=torch.int32)
    path = str(tmp_path / "graph.bin")
    dgl.save_graphs(path, [graph])
    found = open_source(path)
    assert found.name == "graph"
    src, dst = found.edges[ETYPE_HOMO]
    assert (src.dtype, src.tolist(), dst.tolist()) == (torch.int64, [0, 1, 1], [1, 2, 2])
    dgl.save_graphs(path, [graph, graph])
    with pytest.raises(ValueError, match="holds 2 graphs"):
        open_source(path)


@pytest.mark.parametrize(
    "text, words",
    [
        ("synthetik", "did you mean 'synthetic'"),
        ("ogbn-arxv", "did you mean 'ogbn-arxiv'"),
        ("ogbl-colab", "did you mean 'ogbl-collab'"),
        ("zzzzzz", "accepted: synthetic"),
        ("synthetic:nodez=3", "did you mean 'nodes'.*valid: nodes, edges, seed"),
        ("synthetic:nodes=many", "nodes is 'many', expected int"),
        ("synthetic:nodes", "nodes=VALUE"),
        ("synthetic:nodes=3,nodes=4", "once"),
        ("rmat:scale=99", "scale: got 99, expected .* 1 to 30"),
        (".", "is a folder"),
    ],
)
def test_unknown_inputs(text, words):
    with pytest.raises(ValueError, match=words):
        open_source(text)
    for text in ("nothing.npz", "no/such/graph", "old.bin"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            open_source(text)


def test_generators_take_options():
    graph = open_source("synthetic:nodes=50,edges=200,seed=2,features=3,homophily=0.5")
    assert (graph.total_nodes, graph.total_edges) == (50, 200)
    assert graph.node_data[NTYPE_HOMO]["feat"].shape == (50, 3)
    assert open_source("rmat:scale=4,samples=20").total_nodes == 16


def test_dgl_dataset_by_name():
    pytest.importorskip("dgl")
    for name in ("karateclub", "KarateClub", "KarateClubDataset"):
        graph = open_source(name)
        assert (graph.total_nodes, graph.total_edges) == (34, 156)
        assert {"label", "orig_id"} <= set(graph.node_data[NTYPE_HOMO])


def test_download_that_fails(monkeypatch):
    dgl = pytest.importorskip("dgl")

    def offline(*args, **kwargs):
        raise ConnectionError("name resolution failed")

    monkeypatch.setattr(dgl.data, "CoraGraphDataset", offline)
    with pytest.raises(SarError, match="cora.*without a network"):
        open_source("cora")


def test_only_files_below_the_folder_are_loaded(tmp_path):
    root, loader = tmp_path / "root", SimpleNamespace(torch=torch)
    root.mkdir()
    for path in (tmp_path / "outside.pt", root / "inside.pt"):
        torch.save({"a": torch.ones(2)}, path)
    with weights_only_loads(loader, root):
        with pytest.raises(SarError, match="outside"):
            loader.torch.load(str(root / ".." / "outside.pt"))
        assert loader.torch.load(str(root / "inside.pt"))["a"].tolist() == [1, 1]
        assert loader.torch.tensor is torch.tensor
    assert loader.torch is torch


def test_without_ogb(monkeypatch):
    pytest.importorskip("dgl")
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred.dataset_dgl", None)
    with pytest.raises(MissingDependencyError, match=r"sar-gnn\[data\]"):
        open_source("ogbn-arxiv")


@pytest.mark.parametrize("where", ["node_data", "edge_data"])
def test_graphs_in_memory_are_finite_unless_it_is_allowed(where: str, tmp_path: Path) -> None:
    graph = community(20, 40)
    count = {"node_data": graph.total_nodes, "edge_data": graph.total_edges}[where]
    key: Any = {"node_data": "_N", "edge_data": ("_N", "_E", "_N")}[where]
    column = torch.ones(count, 2)
    column[3, 1] = torch.nan
    getattr(graph, where).setdefault(key, {})["spoiled"] = column
    with pytest.raises(ValueError, match=r"source: 'spoiled' of .*: row 3 holds nan"):
        sar.partition_graph(graph, tmp_path / "refused", 2)
    sar.partition_graph(graph, tmp_path / "taken", 2, allow_nan=True)
