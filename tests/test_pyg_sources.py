"""Graphs of PyG's objects and files, and in the chunks of DGL's tools."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
from table_files import DST, EDGES, FEAT, NODES, SRC, WEIGHT, Trap, chunks, ends

from sar.partition.sources.chunked import read_chunked
from sar.partition.sources.pyg import from_pyg, read_pyg_file


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
        "feat": (EDGES, 1), "edge_weight": (EDGES,), "time": (EDGES,)
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


def test_files_that_name_code_are_refused(tmp_path: Path) -> None:
    torch.save({"edge_index": torch.zeros(2, 1, dtype=torch.int64), "x": Trap()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: names code that is not run"):
        read_pyg_file(tmp_path / "a.pt", "x")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.zeros(3)}, "has no edge_index"),
        ({"edge_index": torch.zeros(3, 4)}, "expected integers"),
        ({"edge_index": torch.tensor([[0], [9]]), "num_nodes": 3}, r"span \[9, 9\]"),
        ({"edge_index": torch.tensor([[0], [1]]), "num_nodes": -3}, "expected a count"),
        ({"edge_index": torch.tensor([[0], [1]]), "x": torch.ones(2), "feat": torch.ones(2)},
         "two tensors are named 'feat'"),
    ],
)  # fmt: skip
def test_bad_data_of_pyg(content: dict, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=rf"a\.pt: .*{message}"):
        read_pyg_file(tmp_path / "a.pt", "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes_per_chunk": [[8, NODES - 8], [7, 13]]}, "feat0.npy: holds 7 rows, expected 8"),
        ({"num_edges_per_chunk": [[EDGES, 0]] * 3}, "e0.txt: holds 45 rows, expected 90"),
        ({"num_nodes_per_chunk": [[7, 3], [7, 13]]}, "is 1[0-9], expected 0 or more and below 10"),
        ({"num_nodes_per_chunk": [[7, -3], [7, 13]]}, "expected counts"),
        ({"edge_type": ["author:writes:papr"] * 3}, "twice"),
        ({"node_type": ["papers", "author"]}, "'paper' is unknown, did you mean 'papers'"),
        ({"edges": {}}, "edges.author:writes:paper: is None"),
        ({"graph_name": "a/b"}, "graph_name"),
    ],
)
def test_bad_chunks(change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_chunked(chunks(tmp_path, **change), tmp_path / "s")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pairs": (lambda d: d.update({"edge_label_index": d.edge_index}), "edge_label_index: pairs"),
    "no edges": (lambda d: d.__delattr__("edge_index"), "has no edge_index"),
    "transposed": (lambda d: d.update({"adj_t": d.__dict__["_store"].pop("edge_index")}), "adj_t"),
    "long ids": (lambda d: d.update({"num_nodes": 2}), "edges"),
    "slash": (lambda d: d.update({"a/b": d.x}), "a/b"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_bad_data_in_memory(name: str) -> None:
    change, words = CHANGES[name]
    data = pytest.importorskip("torch_geometric.data").Data(
        x=torch.rand(4, 2), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]])
    )
    change(data)
    with pytest.raises(ValueError, match=words):
        from_pyg(data, "x")


def test_a_bool_column_that_is_no_mask_warns() -> None:
    data = pytest.importorskip("torch_geometric.data").Data(
        x=torch.rand(2, 2), edge_index=torch.tensor([[0], [1]]), fraud=torch.ones(2) > 0
    )
    with pytest.warns(UserWarning, match="'fraud' is bool"):
        from_pyg(data, "x")
