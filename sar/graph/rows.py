"""Which nodes or edges the rows of a tensor are, told from their number or their type's name."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sar.edges import AnyRelation
from sar.graph.store import Structure
from sar.graph.view import GraphView
from sar.partition.book import EType
from sar.partition.features import Keys

Kind = str | EType
MOST_KEPT = 8  # lists of graphs that begin with the same one


@dataclass(eq=False)
class RowSet:
    """Nodes of a type, or edges of a relation, of which a tensor may have one row each.

    ``nodes`` are rows of the part: the nodes, or the destinations of edges of ``relation``.
    ``kind`` is the node type or the canonical edge type.
    """

    kind: Kind
    count: int
    nodes: Tensor
    relation: AnyRelation | None
    make_keys: Callable[[], Tensor]

    @cached_property
    def keys(self) -> Tensor:
        """int32 or int64 [count] as in :class:`sar.partition.features.Keys`."""
        return self.make_keys()

    def same(self, other: RowSet) -> bool:
        """Whether both are the same nodes or edges in the same order."""
        if self.kind != other.kind or self.count != other.count:
            return False
        if self.relation is None or self.relation is other.relation:
            return torch.equal(self.nodes, other.nodes)
        return torch.equal(self.keys, other.keys)


class KeyedRows:
    """The keys of tensors that belong to a whole graph, or to a model's blocks; collective to make.

    Rows are told apart by their number. Where two types have as many rows on some rank, the ranks
    vote at each call, which is collective then: what the rows are fits their number on every
    rank. Where nodes of a type and edges do on all of them, the rows are the nodes; two node types,
    or two relations without a node type, are an error.
    """

    def __init__(self, graphs: Sequence[GraphView]) -> None:
        stores = _stores_of(graphs)
        self._stores = [weakref.ref(store) for store in stores]  # the first one holds this
        self.group = stores[0].group
        self.sets = [one for store in stores for one in _row_sets(store)]
        differ = torch.tensor([[not a.same(b) for b in self.sets] for a in self.sets])
        counts = torch.tensor([one.count for one in self.sets])
        alike = (counts == counts.unsqueeze(1)) & (counts > 0) & differ
        agreed = self.group.all_reduce(torch.stack([differ, alike]).int(), "max").bool()
        self._differ, self._alike = agreed[0].tolist(), agreed[1].tolist()

    def are_of(self, stores: Sequence[Structure]) -> bool:
        return [id(ref()) for ref in self._stores] == [id(store) for store in stores]

    def keys(self, x: Tensor, kinds: Collection[Kind] | None = None) -> Tensor:
        """[len(x)] keys of the rows of ``x``, on its device.

        ``kinds`` are node types and canonical edge types that the rows may be, the same on all
        ranks; ``None``: all.

        Raises ``ValueError`` where nothing has as many rows, or several node types have, or no node
        type and several relations.
        """
        fits = [i for i, one in enumerate(self.sets) if kinds is None or one.kind in kinds]
        match = [x.dim() > 0 and self.sets[i].count == len(x) for i in fits]
        vote = any(self._alike[i][j] for i in fits for j in fits)
        if vote:
            match = self.group.all_reduce(torch.tensor(match).int(), "min").bool().tolist()
        found = [i for i, fit in zip(fits, match, strict=True) if fit]
        if not found:
            missing = " or ".join(map(repr, kinds or ()))
            have = ", ".join(f"{self.sets[i].count} of {self.sets[i].kind}" for i in fits)
            raise ValueError(
                f"input: got shape {tuple(x.shape)}, expected a row for each node or edge, "
                f"{have or f'but there is no type {missing}'}; for other rows give ids: rows=ids"
            )
        found = [i for i in found if isinstance(self.sets[i].kind, str)] or found
        others = {self.sets[i].kind for i in found if vote and self._differ[found[0]][i]}
        if others:
            names = sorted(map(str, {self.sets[found[0]].kind, *others}))
            raise ValueError(
                f"input: got {len(x)} rows, which may be those of {' or of '.join(names)}; "
                "expected to be told which: rows=type"
            )
        return self.sets[found[0]].keys.to(x.device)


def keyed_rows(graphs: Sequence[GraphView]) -> KeyedRows:
    """The :class:`KeyedRows` of ``graphs``, kept with the first; collective when they are new."""
    stores = _stores_of(graphs)
    known: list[KeyedRows] = stores[0].keyed_rows
    found = next((one for one in known if one.are_of(stores)), None)
    if found is None:
        found = KeyedRows(graphs)
        known[:] = [*known[1 - MOST_KEPT :], found]
    return found


def _stores_of(graphs: Sequence[GraphView]) -> list[Structure]:
    return list({id(graph._store): graph._store for graph in graphs}.values())


def _row_sets(store: Structure) -> list[RowSet]:
    sides = [store.src_rows, store.dst_rows] if store.is_block else [store.src_rows]
    sets = [
        RowSet(ntype, len(rows), rows, None, _node_keys(store.keys, ntype, rows))
        for side in sides
        for ntype, rows in side.items()
    ]
    for etype, relation in store.relations.items():
        nodes = store.dst_rows[etype[2]]
        keys = _edge_keys(relation)
        sets.append(RowSet(etype, relation.num_edges, nodes, relation, keys))
    return sets


def _node_keys(keys: Keys, ntype: str, rows: Tensor) -> Callable[[], Tensor]:
    return lambda: keys.nodes(ntype).index_select(0, rows.cpu()).to(rows.device)


def _edge_keys(relation: AnyRelation) -> Callable[[], Tensor]:
    return lambda: relation.keys


@dataclass(frozen=True, eq=False)
class Call:
    """Graphs that a module was called with, or that a user named, then without ``module``.

    ``rows``: what a layer got beside its graph, the rows of sources or a pair of both ends'.
    """

    module: object
    graphs: Sequence[GraphView]
    rows: object = None

    def kinds_of(self, x: Tensor) -> set[Kind]:
        """What the rows of ``x`` may be: one type for an input of the layer, else all it sees."""
        pair = self.rows if isinstance(self.rows, tuple) else (self.rows,)
        etypes = [etype for graph in self.graphs for etype in graph.canonical_etypes]
        if len(etypes) == 1:
            for end, ntype in zip(pair, etypes[0][::2]):
                if x is end:
                    return {ntype}
        return kinds_of(self.graphs)


def kinds_of(graphs: Sequence[GraphView]) -> set[Kind]:
    """The types of nodes and edges that graphs, or their slices, show."""
    found: set[Kind] = set()
    for graph in graphs:
        found.update(graph.srctypes, graph.dsttypes, graph.canonical_etypes)
    return found


class _Current(threading.local):
    """The calls that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Call] = []


current = _Current()


class SameDropoutRows:
    """A context, to be entered repeatedly, in which dropout knows the rows that it knows now."""

    def __init__(self, inside_of: AbstractContextManager | None = None) -> None:
        self.inside_of = inside_of or nullcontext()
        self.stack = list(current.stack)
        self.kept: list[list[Call]] = []

    def __enter__(self) -> None:
        self.inside_of.__enter__()
        self.kept.append(current.stack)
        current.stack = list(self.stack)

    def __exit__(self, *_: object) -> None:
        current.stack = self.kept.pop()
        self.inside_of.__exit__(None, None, None)
