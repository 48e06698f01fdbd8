"""Any partitions as the graph that they were made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from harness.parts import edge_order
from torch import Tensor

from sar.partition.arrays import GraphArrays
from sar.partition.load import PartitionData, load_partition


@dataclass(frozen=True)
class Back:
    """All parts of partitions: nodes and edges by the ids of the source.

    Attributes:
        owner: by node type, the part of each node. graph: all else.
    """

    graph: GraphArrays
    owner: dict[str, Tensor]


def read_back(path: str, num_parts: int) -> Back:
    """Each node and edge is in one part."""
    parts = [load_partition(path, part) for part in range(num_parts)]
    book = parts[0].book
    node_data, owners, orig = {}, {}, []
    for ntype in book.ntypes:
        rows = {name: _joined(parts, f"{ntype}/{name}") for name in _names(parts[0], ntype)}
        owner = torch.arange(num_parts).repeat_interleave(
            torch.tensor([one.num_nodes(ntype) for one in parts])
        )
        ids = rows.pop("orig_id")
        order = _order(ids)
        node_data[ntype] = {name: column[order] for name, column in rows.items()}
        owners[ntype] = owner[order]
    for one in parts:  # of all nodes, in the order of the partitioning's ids
        orig += [one.node_features[f"{ntype}/orig_id"] for ntype in book.ntypes]
    ids = torch.cat(orig)
    edges, edge_data = {}, {}
    for etype in book.canonical_etypes:
        src, dst, eids = edge_order(parts, etype)
        order, prefix = _order(eids), ":".join(etype)
        edges[etype] = ids[src][order], ids[dst][order]
        names = [
            name.removeprefix(f"{prefix}/")
            for name in parts[0].edge_features
            if name.startswith(f"{prefix}/") and not name.endswith("/orig_eid")
        ]
        edge_data[etype] = {
            name: torch.cat([one.edge_features[f"{prefix}/{name}"] for one in parts])[order]
            for name in names
        }
    counts = {ntype: len(owner) for ntype, owner in owners.items()}
    return Back(GraphArrays(book.graph_name, counts, edges, node_data, edge_data), owners)


def _names(part: PartitionData, ntype: str) -> list[str]:
    names = [name for name in part.node_features if name.startswith(f"{ntype}/")]
    return [name.removeprefix(f"{ntype}/") for name in names]


def _joined(parts: list[PartitionData], name: str) -> Tensor:
    return torch.cat([one.node_features[name] for one in parts])


def _order(ids: Tensor) -> Tensor:
    """Where each id from 0 on is; they must all be there, and once."""
    assert torch.equal(ids.sort().values, torch.arange(len(ids)))
    return torch.argsort(ids)


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same(found: GraphArrays, graph: GraphArrays) -> None:
    """Nodes, edges and columns, in the same order of ids; partitions hold bool as uint8."""
    assert found.num_nodes == graph.num_nodes
    assert set(found.edges) == set(graph.edges)
    for etype, ends in graph.edges.items():
        assert all(map(torch.equal, found.edges[etype], ends)), etype
    for got, expected in ((found.node_data, graph.node_data), (found.edge_data, graph.edge_data)):
        for kind, columns in got.items():
            assert set(columns) == set(expected.get(kind, {})), kind
            for name, rows in columns.items():
                wanted = expected[kind][name]
                wanted = wanted.to(torch.uint8) if wanted.dtype == torch.bool else wanted
                assert rows.dtype == wanted.dtype or name.endswith("_mask"), (kind, name)
                assert torch.equal(rows.to(wanted.dtype), wanted), (kind, name)
