"""The graph that a model is validated on: the user's, or a piece of it, and two cuts of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sar import registry
from sar.partition.arrays import GraphArrays
from sar.partition.load import load_partition, read_book
from sar.partition.run import open_graph

MOST_NODES, MOST_EDGES = 1_000, 10_000
_MOST_READ = 2_000_000  # nodes and edges of partitions that are put together


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

    made = _piece(graph)
    return made, f"a piece of {graph.total_nodes:,} nodes, {graph.total_edges:,} edges"


def _are_partitions(path: str) -> bool:
    return path.endswith(".json") or os.path.isdir(path)


class _Rows:
    """A column in a file, of which rows are read one by one: those of ``ids``, if it says so."""

    def __init__(self, read: Callable[[int, int], Tensor], ids: Tensor | None = None) -> None:
        self._read, self._ids = read, ids

    def __getitem__(self, rows: Tensor) -> Tensor:
        found = rows if self._ids is None else self._ids[rows]
        return torch.cat([self._read(0, 0), *(self._read(i, i + 1) for i in found.tolist())])


def _piece_of_part(path: Any) -> tuple[GraphArrays, str]:
    """A piece of the first part's own nodes; of its features a few rows are read."""
    data = load_partition(path, 0)
    part = GraphArrays(data.book.graph_name, {n: data.num_nodes(n) for n in data.book.ntypes}, {})

    def columns(store: Any, kind: str, ids: Tensor | None = None) -> Any:
        keys = [key for key in store if key.startswith(f"{kind}/")]
        return {key.removeprefix(f"{kind}/"): _Rows(store.reader(key), ids) for key in keys}

    for ntype in part.num_nodes:
        part.node_data[ntype] = columns(data.node_features, ntype)
    for etype, shard in data.edges.items():
        own = slice(shard.offsets[0], shard.offsets[1])
        part.edges[etype] = shard.src[own].long(), shard.dst[own].long()
        ids = shard.eid[own].long()
        part.edge_data[etype] = columns(data.edge_features, ":".join(etype), ids)
    return _piece(part), f"a piece of part 0 of {data.book.num_nodes():,} nodes"


def _piece(graph: GraphArrays) -> GraphArrays:
    """Some nodes that are near each other, and edges between them."""
    chosen = torch.zeros(graph.total_nodes, dtype=torch.bool)
    chosen[_walk(graph, MOST_NODES)] = True
    nodes = {ntype: mask.nonzero()[:, 0] for ntype, mask in _by_type(graph, chosen).items()}
    made = GraphArrays(graph.name, {ntype: len(ids) for ntype, ids in nodes.items()}, {})
    for ntype, ids in nodes.items():
        made.node_data[ntype] = {k: x[ids] for k, x in graph.node_data.get(ntype, {}).items()}
    for etype, ends in graph.edges.items():
        own = nodes[etype[0]], nodes[etype[2]]
        rows = torch.stack(list(map(torch.isin, ends, own))).all(0).nonzero()[:, 0]
        rows = _some(rows, MOST_EDGES).sort().values
        src, dst = (torch.searchsorted(ids, one[rows]) for ids, one in zip(own, ends))
        made.edges[etype] = src, dst
        made.edge_data[etype] = {k: x[rows] for k, x in graph.edge_data.get(etype, {}).items()}
    return made


def _walk(graph: GraphArrays, most: int) -> Tensor:
    """int64 [n] nodes, types one after another, in the order of a walk in breadth from some nodes
    of each type and from ends of some edges of each relation."""
    ids = _by_type(graph, torch.arange(graph.total_nodes))
    near = [one[:3] for one in ids.values()]
    for etype, ends in graph.edges.items():
        some = _some(torch.arange(len(ends[0])), 3)
        near += [ids[ntype][one[some]] for ntype, one in zip(etype[::2], ends)]
    seen, order = torch.zeros(graph.total_nodes, dtype=torch.bool), list[int]()
    while len(new := torch.cat(near)) and len(order) < most:
        new = _some(new.unique(), most - len(order))
        order += new.tolist()
        last = torch.zeros_like(seen).index_fill(0, new, True)
        seen |= last
        near = []
        for (a, _, b), (src, dst) in graph.edges.items():
            for kind, of, other, to in ((a, src, b, dst), (b, dst, a, src)):
                found = ids[other][to[_by_type(graph, last)[kind][of]]]
                near.append(found[~seen[found]])
        near.append(new[:0])
    return torch.tensor(order)


def _by_type(graph: GraphArrays, rows: Tensor) -> dict[str, Tensor]:
    """Rows of all nodes by type."""
    return dict(zip(graph.num_nodes, rows.split(list(graph.num_nodes.values()))))


def _some(ids: Tensor, most: int) -> Tensor:
    """At most so many of these, in any order, the same each time."""
    rng = torch.Generator().manual_seed(0)
    return ids[torch.randperm(len(ids), generator=rng)[:most]]


def random_cut(graph: GraphArrays, parts: int) -> np.ndarray:
    """int64 [N] random parts, the first the largest, none empty."""
    rng = np.random.default_rng(3)
    shares = np.linspace(1.6, 1.0, parts)
    found = rng.choice(parts, graph.total_nodes, p=shares / shares.sum())
    found[rng.permutation(graph.total_nodes)[:parts]] = np.arange(parts)
    return found


def near_cut(graph: GraphArrays, parts: int) -> np.ndarray:
    """int64 [N] parts of nodes that are near each other, the last with one node."""
    last = graph.total_nodes - 1
    walked = _walk(graph, last + 1).numpy()
    order = np.append(walked, np.setdiff1d(np.arange(last + 1), walked))
    found = np.empty(last + 1, np.int64)
    found[order] = np.append(np.arange(last) * (parts - 1) // last, parts - 1)
    return found
