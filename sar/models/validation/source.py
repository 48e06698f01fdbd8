"""The graph that a model is validated on: the user's, or a piece of it, as arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar import registry
from sar.partition.arrays import EType, GraphArrays
from sar.partition.load import load_partition, read_book
from sar.partition.run import open_graph

MOST_NODES, MOST_EDGES = 1_000, 10_000
_MOST_READ = 2_000_000  # nodes and edges of partitions that are put together
_Edges = dict[EType, tuple[Tensor, Tensor]]
_Rows = Callable[[Any, Tensor], dict[str, Tensor]]  # columns of rows of a type


def kind_of(source: Any) -> str | None:
    """The front end whose library's graph this is; ``None`` where it is none's."""
    for name in registry.front_ends():
        is_graph = getattr(registry.front_end(name), "is_graph", None)
        if is_graph is not None and is_graph(source):
            return name
    return None


def small_graph(source: Any, scratch: Path) -> tuple[GraphArrays, str | None]:
    """The graph in memory, at most of a few thousand nodes, and what piece of it that is.

    Args:
        source: a graph of a library, ``GraphArrays``, a path of partitions, or what ``sar
            partition`` takes.

    Raises ``TypeError`` for anything else, and what reading it raises.
    """
    if isinstance(source, (str, os.PathLike)) and _are_partitions(os.fspath(source)):
        book = read_book(source)
        if book.num_nodes() + book.num_edges() > _MOST_READ:
            return _piece_of_part(source)
    if isinstance(source, GraphArrays):
        data = {n: dict(source.node_data.get(n, {})) for n in source.num_nodes}
        source = replace(source, node_data=data)  # which gets numbers of its rows
    graph = open_graph(source, scratch, True).graph
    if graph.total_nodes <= MOST_NODES and graph.total_edges <= MOST_EDGES:
        return graph, None

    def rows_of(data: Any) -> _Rows:
        return lambda kind, ids: {name: x[ids] for name, x in data.get(kind, {}).items()}

    rows = rows_of(graph.node_data), rows_of(graph.edge_data)
    made = _piece(graph.name, graph.num_nodes, graph.edges, *rows)
    return made, f"a piece of {graph.total_nodes:,} nodes, {graph.total_edges:,} edges"


def _are_partitions(path: str) -> bool:
    return path.endswith(".json") or os.path.isdir(path)


def _piece_of_part(path: Any) -> tuple[GraphArrays, str]:
    """A piece of the first part's own nodes; of its features a few rows are read."""
    data = load_partition(path, 0)
    counts = {ntype: data.num_nodes(ntype) for ntype in data.book.ntypes}
    edges, eids = _Edges(), dict[EType, Tensor]()
    for etype, shard in data.edges.items():
        own = slice(shard.offsets[0], shard.offsets[1])
        edges[etype] = (shard.src[own].long(), shard.dst[own].long())
        eids[etype] = shard.eid[own].long()

    def edge_rows(etype: EType, ids: Tensor) -> dict[str, Tensor]:
        return _read(data.edge_features, ":".join(etype) + "/", eids[etype][ids])

    def node_rows(ntype: str, ids: Tensor) -> dict[str, Tensor]:
        return _read(data.node_features, f"{ntype}/", ids)

    made = _piece(data.book.graph_name, counts, edges, node_rows, edge_rows)
    return made, f"a piece of part 0 of {data.book.num_nodes():,} nodes"


def _read(store: Any, prefix: str, ids: Tensor) -> dict[str, Tensor]:
    readers = {key: store.reader(key) for key in store if key.startswith(prefix)}
    return {
        key.removeprefix(prefix): torch.cat([read(0, 0), *(read(i, i + 1) for i in ids.tolist())])
        for key, read in readers.items()
    }


def _piece(
    name: str, num_nodes: dict[str, int], edges: _Edges, node_rows: _Rows, edge_rows: _Rows
) -> GraphArrays:
    """Some nodes that are near each other, and edges between them."""
    chosen = _around(num_nodes, edges)
    made = GraphArrays(name, {ntype: len(ids) for ntype, ids in chosen.items()}, {})
    for ntype, ids in chosen.items():
        made.node_data[ntype] = node_rows(ntype, ids)
    for etype, (src, dst) in edges.items():
        of_src, of_dst = chosen[etype[0]], chosen[etype[2]]
        rows = (torch.isin(src, of_src) & torch.isin(dst, of_dst)).nonzero()[:, 0]
        rows = _some(rows, MOST_EDGES).sort().values
        made.edges[etype] = (
            torch.searchsorted(of_src, src[rows]), torch.searchsorted(of_dst, dst[rows])
        )  # fmt: skip
        made.edge_data[etype] = edge_rows(etype, rows)
    return made


def _around(num_nodes: dict[str, int], edges: _Edges) -> dict[str, Tensor]:
    """Sorted ids by type of nodes around ends of some edges of each relation."""
    chosen = {ntype: torch.zeros(count, dtype=torch.bool) for ntype, count in num_nodes.items()}
    for ntype, mask in chosen.items():
        if not any(ntype in etype[::2] and len(edges[etype][0]) for etype in edges):
            mask[:10] = True
    for etype, (src, dst) in edges.items():
        some = _some(torch.arange(len(src)), 3)
        chosen[etype[0]][src[some]], chosen[etype[2]][dst[some]] = True, True
    before, count = 0, 1
    while before < count < MOST_NODES:
        before = count
        for etype, (src, dst) in edges.items():  # sources of edges that end in chosen nodes
            near = src[chosen[etype[2]][dst]]
            new = near[~chosen[etype[0]][near]].unique()
            room = MOST_NODES - sum(int(mask.sum()) for mask in chosen.values())
            chosen[etype[0]][_some(new, min(room, MOST_NODES // len(edges)))] = True
        count = sum(int(mask.sum()) for mask in chosen.values())
    return {ntype: mask.nonzero()[:, 0] for ntype, mask in chosen.items()}


def _some(ids: Tensor, most: int) -> Tensor:
    """At most so many of these, in any order, the same each time."""
    rng = torch.Generator().manual_seed(0)
    return ids[torch.randperm(len(ids), generator=rng)[: max(0, most)]]
