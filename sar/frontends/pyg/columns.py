"""Columns of nodes and edges under PyG's names; those of edges stay in their files until read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sar._private import version_of
from sar.frontends.pyg.graph import EdgeGraph
from sar.partition.features import FeatureStore
from sar.partition.load import TYPE_KEY
from sar.partition.sources.pyg import EDGE_NAMES, NODE_NAMES, TIME_NAMES
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import BLANK_ROWS, Leaf


def _back(names: dict[str, str]) -> dict[str, str]:
    return {here: there for there, here in names.items()}


_TAKEN = ("num_nodes", "edge_index")
_OF_NODES, _OF_EDGES, _TIMES = map(_back, (NODE_NAMES, EDGE_NAMES, TIME_NAMES))
_OF_NODES[TYPE_KEY], _OF_EDGES[TYPE_KEY] = "node_type", "edge_type"  # of to_homogeneous, in PyG too


def node_name(name: str) -> str:
    """PyG's name of a column of nodes."""
    return _OF_NODES.get(name, name)


def edge_name(name: str, taken: Iterable[str] | None = None) -> str:
    """PyG's name of a column of edges, beside those ``taken`` where nodes are in the same store."""
    if taken is None:
        return _OF_EDGES.get(name, name)
    found = {**_OF_EDGES, **_TIMES}.get(name, name)
    return f"edge_{found}" if found in taken else found


def names_of(store: FeatureStore, kind: str) -> Iterator[tuple[str, str]]:
    """(key, bare name) of each column of a type; ``ValueError`` for a name that has a meaning."""
    for key in store:
        owner, _, name = key.rpartition("/")
        if owner == kind and name in _TAKEN:
            raise ValueError(f"column {key!r}: PyG's data calls something else {name!r}")
        if owner == kind:
            yield key, name


def stored_column(
    graph: EdgeGraph, store: FeatureStore, key: str, name: str, some: Tensor | None = None
) -> EdgeTensor:
    """Lazy rows of a column of edges, or of int64 ``some`` of its rows, which its file keeps until
    something needs the values."""

    def read() -> Tensor:
        return store[key] if some is None else store[key][some]

    if store.in_memory(key):
        return graph.edge_columns(read().to(graph.device), name)
    dtype, shape = store.info(key)
    return read_later(graph, read, dtype, shape[1:], name)


def read_later(
    graph: EdgeGraph, read: Callable[[], Tensor], dtype: torch.dtype, row: Any, name: str
) -> EdgeTensor:
    """Lazy rows [num_edges, *row] of edges, read once when something needs the values."""
    scope = graph.scope()
    like = torch.empty((BLANK_ROWS, *row), dtype=dtype, device="meta")
    return EdgeTensor(_Later(lambda: read().to(scope.device), like, name), like, scope)


class _Later(Leaf):
    """A column of edges whose values are read at first use, and kept."""

    def __init__(self, read: Callable[[], Tensor], like: Tensor, name: str) -> None:
        self.side, self.name, self.like = "e", name, like
        self.inputs, self.asks, self._read = (), False, read

    @cached_property
    def tensor(self) -> Tensor:  # type: ignore[override]
        return self._read()

    @cached_property
    def versions(self) -> list[int]:  # type: ignore[override]
        return [version_of(self.tensor)]

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.tensor,)
