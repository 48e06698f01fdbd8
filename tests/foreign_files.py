"""Partitions as PyG and GraphLearn write them, of the graphs of these tests."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.distributed import Partitioner
from torch_geometric.loader.cluster import ClusterData

from sar.partition.arrays import GraphArrays

CHUNK = 7


def edge_rows(columns: dict[str, Tensor]) -> Tensor:
    """float32 [E, 2]: one feature of edges, as both formats have one."""
    return torch.stack([columns["weight"], columns["type"].float()], 1)


def pyg_data(graph: GraphArrays, time: str | None = None) -> Data | HeteroData:
    """``time``: ``"nodes"``, ``"edges"``, or none."""
    data = Data() if graph.is_homogeneous else HeteroData()
    for ntype, count in graph.num_nodes.items():
        store = data if graph.is_homogeneous else data[ntype]
        store.num_nodes = count
        if "feat" in graph.node_data[ntype]:
            store.x = graph.node_data[ntype]["feat"]
        if time == "nodes":
            store.time = torch.arange(count) * 3 % 17
    for etype, columns in graph.edge_data.items():
        store = data if graph.is_homogeneous else data[etype]
        store.edge_index = torch.stack(graph.edges[etype])
        store.edge_attr = edge_rows(columns)
        if time == "edges":
            store.edge_time = torch.arange(len(columns["type"])) * 5 % 13
    return data


def write_pyg(
    graph: GraphArrays, parts: np.ndarray, num_parts: int, folder: Path, time: str | None = None
) -> Path:
    """By PyG's own partitioner; only its METIS, which has to be compiled, is replaced."""
    cut = mock.patch.object(ClusterData, "_metis", lambda *_: torch.from_numpy(parts).long())
    partitioner = Partitioner(pyg_data(graph, time), 2, str(folder))
    partitioner.num_parts = num_parts  # it refuses 1
    with cut, contextlib.redirect_stderr(io.StringIO()):
        partitioner.generate_partition()
    return folder


def _append(path: Path, value: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        pickle.dump(value, file)


def _save(value: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


def write_glt(
    graph: GraphArrays, parts: np.ndarray, num_parts: int, folder: Path, side: str = "src"
) -> Path:
    """``side``: which end of an edge it lies with."""
    hetero, starts = not graph.is_homogeneous, graph.node_offsets()
    owner = {
        ntype: torch.from_numpy(parts[starts[ntype] : starts[ntype] + count]).long()
        for ntype, count in graph.num_nodes.items()
    }
    folder.mkdir(parents=True)
    meta = {
        "num_parts": num_parts,
        "data_cls": "hetero" if hetero else "homo",
        "node_types": list(graph.num_nodes) if hetero else None,
        "edge_types": list(graph.edges) if hetero else None,
    }
    (folder / "META").write_bytes(pickle.dumps(meta, pickle.HIGHEST_PROTOCOL))
    for ntype, table in owner.items():
        _save(table, folder / (f"node_pb/{ntype}.pt" if hetero else "node_pb.pt"))
        for part in range(num_parts):
            place = folder / f"part{part}/node_feat" / (ntype if hetero else "")
            _write_rows(place, (table == part).nonzero()[:, 0], graph.node_data[ntype]["feat"])
    for etype, (src, dst) in graph.edges.items():
        holder = owner[etype[0]][src] if side == "src" else owner[etype[2]][dst]
        _write_edges(graph, etype, holder, num_parts, folder)
    return folder


def _write_rows(place: Path, ids: Tensor, rows: Tensor) -> None:
    for some in ids.split(CHUNK) if len(ids) else ():
        _append(place / "feats.pkl", rows[some])
        _append(place / "ids.pkl", some.clone())


def _write_edges(
    graph: GraphArrays, etype: tuple, holder: Tensor, num_parts: int, folder: Path
) -> None:
    hetero, name = not graph.is_homogeneous, "__".join(etype)
    _save(holder, folder / (f"edge_pb/{name}.pt" if hetero else "edge_pb.pt"))
    for part in range(num_parts):
        ids = (holder == part).nonzero()[:, 0]
        place = folder / f"part{part}/graph" / (name if hetero else "")
        for file, values in zip(("rows", "cols"), graph.edges[etype]):
            _save(values[ids], place / f"{file}.pt")
        _save(ids, place / "eids.pt")
        _save(graph.edge_data[etype]["weight"][ids], place / "weights.pt")
        features = folder / f"part{part}/edge_feat" / (name if hetero else "")
        _write_rows(features, ids, edge_rows(graph.edge_data[etype]))
