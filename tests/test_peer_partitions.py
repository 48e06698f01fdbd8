"""Partitions of PyG and of GraphLearn-for-PyTorch, beside DGL's layout of the same graph."""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import dgl
import numpy as np
import pytest
import torch
from harness import run_threads
from harness.graphs import hetero, mixed, to_dgl
from torch import Tensor

import sar
from sar.comm import Group
from sar.errors import PartitionError
from sar.partition.arrays import ETYPE_HOMO, GraphArrays
from sar.sampling import NeighborLoader

PARTS = 3


def node_parts(graph: GraphArrays) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {n: torch.randint(PARTS, (c,), generator=rng) for n, c in graph.num_nodes.items()}


def write_pyg(graph: GraphArrays, root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """By PyG's own partitioner, told where nodes go instead of METIS."""
    from torch_geometric.data import Data, HeteroData
    from torch_geometric.distributed import Partitioner
    from torch_geometric.loader.cluster import ClusterData

    parts, is_one = node_parts(graph), len(graph.num_nodes) == 1
    data: Any = Data() if is_one else HeteroData()
    for ntype, count in graph.num_nodes.items():
        store = data if is_one else data[ntype]
        store.x, store.num_nodes = graph.node_data[ntype]["feat"], count
    for etype, ends in graph.edges.items():
        store = data if is_one else data[etype]
        store.edge_index = torch.stack(ends)
        store.edge_attr = graph.edge_data[etype]["weight"].view(-1, 1)
    order = list(graph.num_nodes) if is_one else data.node_types
    joint = torch.cat([parts[n] for n in order])
    monkeypatch.setattr(ClusterData, "_metis", lambda self, index, count: joint)
    Partitioner(data, PARTS, str(root)).generate_partition()
    return parts


def write_glt(graph: GraphArrays, root: Path, by_source: bool) -> dict[str, Tensor]:
    """In the layout of the format's description, edges by either end, features in chunks."""
    parts, is_one = node_parts(graph), len(graph.num_nodes) == 1

    def save(value: Any, *where: str) -> None:
        path = root.joinpath(*where)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, path)

    def dump(rows: Tensor, *where: str) -> None:
        path = root.joinpath(*where)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for chunk in rows.split(5):
                pickle.dump(chunk.clone(), file)

    root.mkdir(parents=True)
    meta = {
        "num_parts": PARTS, "data_cls": "homo" if is_one else "hetero",
        "node_types": None if is_one else list(graph.num_nodes),
        "edge_types": None if is_one else list(graph.edges),
    }  # fmt: skip
    (root / "META").write_bytes(pickle.dumps(meta))
    for ntype, home in parts.items():
        save(home, *(["node_pb.pt"] if is_one else ["node_pb", f"{ntype}.pt"]))
        for p in range(PARTS):
            ids = (home == p).nonzero().view(-1).flip(0)
            folder = [f"part{p}", "node_feat", *([] if is_one else [ntype])]
            dump(ids, *folder, "ids.pkl")
            dump(graph.node_data[ntype]["feat"][ids], *folder, "feats.pkl")
    for etype, ends in graph.edges.items():
        at = parts[etype[0]][ends[0]] if by_source else parts[etype[2]][ends[1]]
        for p in range(PARTS):
            eid = (at == p).nonzero().view(-1)
            folder = [f"part{p}", "graph", *([] if is_one else ["__".join(etype)])]
            for name, rows in (("rows", ends[0][eid]), ("cols", ends[1][eid]), ("eids", eid)):
                save(rows.clone(), *folder, f"{name}.pt")
            save(graph.edge_data[etype]["weight"][eid].clone(), *folder, "weights.pt")
    return parts


def check(group: Group, root: Path, graph: GraphArrays, homes: dict[str, Tensor]) -> None:
    """Nodes, rows, batches and full-batch results are those of the graph."""
    data = sar.load_partition_data(root, group.rank)
    for ntype, home in homes.items():
        own = data.node_features[f"{ntype}/orig_id"]
        assert torch.equal(own, (home == group.rank).nonzero().view(-1))
        rows = data.node_features[f"{ntype}/feat"]
        assert torch.equal(rows, graph.node_data[ntype]["feat"][own])
    ntype = next(iter(graph.num_nodes))
    for batch in NeighborLoader(data, [-1, -1], ntype, batch_size=7, as_="tensors"):
        for etype, columns in batch.edge_data.items():
            drawn = [hop[etype] for hop in batch.edges if etype in hop]
            ends = [torch.cat([one[k] for one in drawn]) for k in (0, 1)] if drawn else []
            if drawn:
                ids = [batch.node_ids[n][end] for n, end in zip(etype[::2], ends)]
                eid = columns["orig_eid"]
                assert torch.equal(torch.stack(ids), torch.stack(graph.edges[etype])[:, eid])
                weight = columns.get("weight", columns.get("feat")).view(-1)
                assert torch.equal(weight, graph.edge_data[etype]["weight"][eid])
    full = sar.construct_full_graph(data)
    whole = to_dgl(graph)
    for etype in graph.edges:
        src, dst = etype[0], etype[2]
        got = full[etype].aggregate(data.node_features[f"{src}/feat"].double(), "sum")
        x = graph.node_data[src]["feat"].double()
        want = torch.zeros(graph.num_nodes[dst], x.shape[1], dtype=torch.float64)
        want.index_add_(0, graph.edges[etype][1], x[graph.edges[etype][0]])
        own = data.node_features[f"{dst}/orig_id"]
        torch.testing.assert_close(got, want[own], rtol=1e-12, atol=1e-12)
    assert whole.num_edges() == full.num_edges_global()


@pytest.mark.parametrize("name", ["one type", "several"])
@pytest.mark.parametrize("kind", ["pyg", "glt by source", "glt by destination"])
def test_partitions_of_peers(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = mixed() if name == "one type" else hetero()
    root = tmp_path / "parts"
    if kind == "pyg":
        homes = write_pyg(graph, root, monkeypatch)
    else:
        homes = write_glt(graph, root, kind.endswith("source"))
    run_threads(PARTS, check, root, graph, homes)


def test_labels_by_original_ids(tmp_path: Path) -> None:
    """As the documentation says to add what these formats leave out."""
    graph = mixed()
    write_glt(graph, tmp_path / "parts", by_source=False)
    labels = graph.node_data["_N"]["label"]

    def case(group: Group) -> None:
        data = sar.load_partition_data(tmp_path / "parts", group.rank)
        data.node_features["_N/label"] = labels[data.node_features["_N/orig_id"]]
        for batch in NeighborLoader(data, [2], batch_size=9, as_="pyg"):
            assert torch.equal(batch.y, labels[batch.n_id])
            assert torch.equal(batch.x, graph.node_data["_N"]["feat"][batch.n_id])

    run_threads(PARTS, case)


class _Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch executed",)


@pytest.mark.parametrize("where", ["META", "part0/node_feat/feats.pkl", "node_pb.pt"])
def test_nothing_is_executed(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "parts"
    write_glt(mixed(), root, by_source=False)
    if where.endswith(".pt"):
        torch.save(_Evil(), root / where)
    else:
        (root / where).write_bytes(pickle.dumps(_Evil()))
    monkeypatch.chdir(tmp_path)

    def case(group: Group) -> None:
        with pytest.raises(PartitionError, match="which is no plain data"):
            sar.load_partition_data(root, group.rank)

    run_threads(PARTS, case)
    assert not (tmp_path / "executed").exists()


def test_damage_is_told(tmp_path: Path) -> None:
    """By the file's name, on every rank."""

    def broken(change: Any, text: str) -> None:
        root = tmp_path / f"parts{len(list(tmp_path.iterdir()))}"
        write_glt(mixed(), root, by_source=False)
        change(root)

        def case(group: Group) -> None:
            with pytest.raises(PartitionError, match=text):
                sar.load_partition_data(root, group.rank)

        run_threads(PARTS, case)

    home = node_parts(mixed())["_N"]
    broken(lambda root: (root / "node_pb.pt").unlink(), "node_pb.pt: cannot be read as torch's")
    broken(lambda root: (root / "node_pb.pt").write_bytes(b"no"), "cannot be read as torch's")
    broken(lambda root: torch.save(home + 1, root / "node_pb.pt"), "is in part 3, expected 0 to 2")
    broken(lambda root: torch.save(home[:9], root / "node_pb.pt"), "got node .*, expected 0 to 8")
    broken(
        lambda root: torch.save(torch.zeros(2).long(), root / "part1/graph/rows.pt"),
        "differ in length",
    )
    broken(
        lambda root: (root / "part1/node_feat/ids.pkl").write_bytes(
            pickle.dumps(torch.tensor([0, 1]))
        ),
        "rows for 2 ids|have no features",
    )
    broken(lambda root: (root / "META").unlink(), r"holds neither META.json \(PyG's partitions\)")


def test_a_defaultdict_is_plain(tmp_path: Path) -> None:
    """As PyG writes features of edges of several types."""
    from sar.partition.tensor_pickle import read_torch

    value = defaultdict(
        dict, {("a", "b", "c"): {"feats": {"edge_attr": torch.arange(6).view(3, 2)}}}
    )
    torch.save(value, tmp_path / "edge_feats.pt")
    found = read_torch(tmp_path / "edge_feats.pt")
    assert torch.equal(found[("a", "b", "c")]["feats"]["edge_attr"], torch.arange(6).view(3, 2))


def test_dgl_is_not_asked(tmp_path: Path) -> None:
    """The JSON of DGL's layout loads by the same name."""
    from sar.partition.write import write_partitions

    path = write_partitions(mixed(), np.zeros(57, dtype=np.int64), tmp_path / "parts")
    data = sar.load_partition_data(path, 0)
    assert data.num_edges(ETYPE_HOMO) == dgl.graph(mixed().edges[ETYPE_HOMO]).num_edges()
