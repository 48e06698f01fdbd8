"""Partitions in PyG's layout, against those of its own partitioner and through its own readers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_files import edge_rows, write_pyg
from harness.graphs import ETYPE_HOMO, NTYPE_HOMO, GraphArrays, hetero, mixed
from harness.parts import load_partition, write_partitions
from torch_geometric.distributed import LocalFeatureStore, LocalGraphStore
from written_graphs import EDGES, NODES, plain

import sar

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.fixture
def pyg_reads_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its partitioner writes holds a ``defaultdict``, which its reader refuses today."""
    monkeypatch.setattr(
        "torch_geometric.io.fs.torch_load", lambda path: torch.load(path, weights_only=False)
    )


@pytest.mark.usefixtures("pyg_reads_its_own")
@pytest.mark.parametrize("make", [mixed, hetero])
def test_pyg_reads_the_same_as_of_its_own_partitioner(
    make: Callable[[], GraphArrays], tmp_path: Path
) -> None:
    graph = copy.deepcopy(make())
    parts = np.arange(graph.total_nodes) * 7 % 3
    theirs = write_pyg(graph, parts, 3, tmp_path / "theirs")
    for columns in graph.edge_data.values():  # as that one has them
        columns["feat"] = edge_rows(columns)
        for name in ("weight", "type"):
            del columns[name]
    ours = write_partitions(graph, parts, tmp_path / "ours", format="pyg")
    for part in range(3):
        one, two = (LocalGraphStore.from_partition(str(at), part) for at in (ours, theirs))
        assert one.meta == two.meta and one.is_sorted
        for attr in two.get_all_edge_attrs():
            assert edges_of(one, attr) == edges_of(two, attr)
        stores = [LocalFeatureStore.from_partition(str(at), part) for at in (ours, theirs)]
        tables = [
            {(a.group_name, a.attr_name): rows_of(store, a) for a in store.get_all_tensor_attrs()}
            for store in stores
        ]
        assert tables[0] == tables[1] != {}


def edges_of(store: object, attr: object) -> list[tuple[int, ...]]:
    ends, eids = store.get_edge_index(attr), store.get_edge_id(attr)  # type: ignore[attr-defined]
    assert (ends[1].diff() >= 0).all()
    return sorted(zip(ends[0].tolist(), ends[1].tolist(), eids.tolist(), strict=True))


def rows_of(store: object, attr: object) -> list[tuple[int, list[float]]]:
    """By id, since neither is bound to an order."""
    ids = store.get_global_id(attr.group_name)  # type: ignore[attr-defined]
    rows = store.get_tensor(attr.group_name, attr.attr_name)  # type: ignore[attr-defined]
    return sorted(zip(ids.tolist(), rows.tolist(), strict=True))


def test_pyg_reads_what_is_written(tmp_path: Path) -> None:
    """With its reader as it is."""
    graph = plain()
    whole = write_partitions(graph, [0] * NODES, tmp_path / "whole", format="pyg")
    assert sar.load_partition_data(whole, 0).num_edges("_E") == EDGES
    path = write_partitions(graph, np.arange(NODES) % 2, tmp_path / "out", format="pyg")
    for part in range(2):
        store = LocalGraphStore.from_partition(path, part)
        (attr,) = store.get_all_edge_attrs()
        assert attr.size == (NODES, NODES)
        src, dst, eids = torch.tensor(edges_of(store, attr)).T
        assert all(map(torch.equal, (src, dst), (one[eids] for one in graph.edges[ETYPE_HOMO])))
        features = LocalFeatureStore.from_partition(path, part)
        ids = features.get_global_id(None)
        assert torch.equal(ids, torch.arange(part, NODES, 2))
        expected = graph.node_data[NTYPE_HOMO]["feat"][ids]
        assert torch.equal(features.get_tensor(None, "x"), expected)


@pytest.mark.usefixtures("pyg_reads_its_own")
@pytest.mark.parametrize("time", ["nodes", "edges"])
def test_edges_of_pyg_are_ordered_by_time(time: str, tmp_path: Path) -> None:
    graph = copy.deepcopy(mixed())
    parts = np.arange(graph.total_nodes) % 2
    theirs = write_pyg(graph, parts, 2, tmp_path / "theirs", time)
    if time == "nodes":
        graph.node_data[NTYPE_HOMO]["time"] = torch.arange(graph.total_nodes) * 3 % 17
    else:
        graph.edge_data[ETYPE_HOMO]["time"] = torch.arange(graph.total_edges) * 5 % 13
    ours = write_partitions(graph, parts, tmp_path / "ours", format="pyg")
    for part in range(2):
        stores = [LocalGraphStore.from_partition(str(at), part) for at in (ours, theirs)]
        assert by_time(time, stores[0]) == by_time(time, stores[1])
        loaded = [load_partition(at, part) for at in (ours, theirs)]
        rows = [
            one.node_features["_N/time"] if time == "nodes" else one.edge_features["_N:_E:_N/time"]
            for one in loaded
        ]
        assert torch.equal(rows[0], rows[1])


def by_time(time: str, store: object) -> list[tuple[int, int]]:
    """Destination and time of each edge as they are stored."""
    (attr,) = store.get_all_edge_attrs()  # type: ignore[attr-defined]
    ends, eids = store.get_edge_index(attr), store.get_edge_id(attr)  # type: ignore[attr-defined]
    found = ends[0] * 3 % 17 if time == "nodes" else eids * 5 % 13
    return list(zip(ends[1].tolist(), found.tolist(), strict=True))


def test_types_that_pyg_cannot_name_are_told(tmp_path: Path) -> None:
    none = (torch.arange(0), torch.arange(0))
    clash = {("a", "b__c", "a"): none, ("a__b", "c", "a"): none}
    for sizes, edges in (({"a": 1, "a__b": 1}, clash), ({"..": 1}, {("..", "r", ".."): none})):
        graph = GraphArrays("g", sizes, edges)
        with pytest.raises(ValueError, match="PyG's partitions need"):
            write_partitions(graph, [0] * graph.total_nodes, tmp_path / "out", format="pyg")
    with pytest.raises(ValueError, match="format is 'glt', expected one of"):
        write_partitions(plain(), [0] * NODES, tmp_path / "out", format="glt")
    assert not list(tmp_path.iterdir())
