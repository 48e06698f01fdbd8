"""One rank's share of a graph, or some of its relations, as every front end shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from sar._private import tree_leaves
from sar.config import BY_CONFIG, Config, Policy
from sar.edges import AnyRelation, Relation
from sar.graph.store import Structure, with_relation
from sar.partition.book import EType

G = TypeVar("G", bound="GraphView")


@dataclass(frozen=True)
class Scope:
    """The relation whose edges a tensor has a row for, and how they are streamed."""

    relation: AnyRelation
    policy: Policy
    device: torch.device


class GraphArgument:
    """What says a graph to layers, among their arguments: the graph, or what names its edges."""

    @property
    def sharded_graph(self) -> GraphView:
        """The graph."""
        raise NotImplementedError

    @property
    def is_turned(self) -> bool:
        """Whether its edges are to be read from their ends to their starts."""
        return False


READERS: list[Callable[[Any], Any]] = []
"""Of front ends: what gives the graph arguments, one or a nest of them, that an object of their
library holds, and all else as it is."""


def graph_of(given: Any) -> Any:
    """The graph that an argument says, itself or by what it holds; anything else as it is."""
    said = read_argument(given)
    return said.sharded_graph if isinstance(said, GraphArgument) else given


def graphs_among(nest: Any) -> list[GraphView]:
    """The graphs that arguments of a call name, also inside of tuples, lists and dicts."""
    leaves = tree_leaves([read_argument(leaf) for leaf in tree_leaves(nest)])
    return [leaf.sharded_graph for leaf in leaves if isinstance(leaf, GraphArgument)]


def read_argument(given: Any) -> Any:
    """The graph argument, or the nest of them, that an object holds; anything else as it is."""
    for read in READERS:
        given = read(given)
    return given


def canonical_of(etype: str | EType | None, known: Sequence[EType]) -> EType:
    """The one of ``known`` that ``etype`` names; ``ValueError`` for none or several."""
    if etype is None:
        if len(known) != 1:
            raise ValueError(f"etype: got None, expected one of {list(known)}")
        return known[0]
    matches = [one for one in known if etype in (one, one[1])]
    if len(matches) != 1:
        problem = "ambiguous" if matches else "unknown"
        raise ValueError(f"etype: got {problem} {etype!r}, expected one of {list(known)}")
    return matches[0]


class GraphView(GraphArgument):
    """Structure and counts; counts are local unless the name says global.

    Args:
        store: shared by the graph and its slices ``graph[etype]``.
        etypes: the relations this object shows; ``None`` are all.
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Attributes:
        group: the ranks that hold the other parts.
        is_block: true for a layer's block made by :func:`sar.construct_mfgs`.
        later: graphs of fewer of its rows, which a model's later layers run on.
    """

    later: Sequence[GraphView] = ()

    def __init__(
        self, store: Structure, etypes: Sequence[EType] | None = None, policy: Policy | None = None
    ) -> None:
        self._store = store
        self._is_slice = etypes is not None
        self.canonical_etypes = list(store.relations if etypes is None else etypes)
        self._policy = policy
        self.group, self.is_block = store.group, store.is_block
        if not self._is_slice:
            store.group.graphs.add(self)

    def _over(self: G, store: Structure, etypes: Sequence[EType] | None = None) -> G:
        """A graph over ``store``, the same slice if this is one and no others are named."""
        if etypes is None and self._is_slice:
            etypes = self.canonical_etypes
        return type(self)(store, etypes, self._policy)

    @property
    def sharded_graph(self) -> GraphView:
        """Itself."""
        return self

    @property
    def policy(self) -> Policy:
        """How halos stream."""
        return self._policy or BY_CONFIG[bool(Config.disable_sr)]

    def with_policy(self: G, policy: Policy | None) -> G:
        """The same graph, sharing all data, under another policy."""
        return type(self)(self._store, self.canonical_etypes if self._is_slice else None, policy)

    @property
    def device(self) -> torch.device:
        """Where the structure lies; features of layers are expected there."""
        return self._store.device

    @property
    def is_homogeneous(self) -> bool:
        """True with one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1

    @property
    def etypes(self) -> list[str]:
        """Relation names, in the order of ``canonical_etypes``."""
        return [etype[1] for etype in self.canonical_etypes]

    @property
    def ntypes(self) -> list[str]:
        """Node types: all, or those of a slice's relation."""
        if not self._is_slice:
            return list(self._store.book.ntypes)
        src, _, dst = self.canonical_etypes[0]
        return [src] if src == dst else [src, dst]

    @property
    def srctypes(self) -> list[str]:
        """Source node types: all, or a slice's one."""
        return [self.canonical_etypes[0][0]] if self._is_slice else list(self._store.book.ntypes)

    @property
    def dsttypes(self) -> list[str]:
        """Destination node types: all, or a slice's one."""
        return [self.canonical_etypes[0][2]] if self._is_slice else list(self._store.book.ntypes)

    def source_rows(self, ntype: str) -> Tensor:
        """int64 rows of the part (inside the type) that the source rows of a type are."""
        return self._store.src_rows[ntype]

    def node_names(self, ntype: str) -> tuple[Tensor, str]:
        """int64 ids that name this part's nodes of a type however the graph is cut, and their kind.

        The kind is ``"original"``; where the partitions hold no original ids, the ids are the
        partitioning's own and the kind is its digest.
        """
        return self._store.keys.node_names(ntype)

    def _canonical(self, etype: str | EType | None) -> EType:
        return canonical_of(etype, self.canonical_etypes)

    def _relation(self, etype: str | EType | None) -> AnyRelation:
        return self._store.relations[self._canonical(etype)]

    @cached_property
    def sole_relation(self) -> Relation | None:
        """The relation of a graph of one kind of rows and edges, whose own rows come first.

        ``None`` where there are several, where they are reversed, and for a block in another order.
        """
        if not (self.is_homogeneous and self._store.keep_seeds):
            return None
        relation = self._store.relations[self.canonical_etypes[0]]
        return relation if isinstance(relation, Relation) else None

    @property
    def sharing(self) -> Any:
        """The layer's call in progress whose modules share rows, if any."""
        return self._store.sharing

    def scope(self, etype: str | EType | None = None) -> Scope:
        """The relation, policy and device that lazy edge tensors of a relation carry with them."""
        return Scope(self._relation(etype), self.policy, self._store.device)

    def columns_put_back(self) -> AbstractContextManager[Any]:
        """Changes of columns inside are forgotten at the end."""
        return nullcontext()

    def stored_columns(self) -> list[Tensor]:
        """All columns of nodes and edges that lie in memory."""
        return []

    def edge_column(self, name: str) -> Tensor:
        """[num_edges, ...] values of a column of the one relation; collective if computed now."""
        raise KeyError(f"no column {name!r}: the graph has no columns")

    def put_edge_column(self, name: str, values: Tensor) -> None:
        """Let the one relation have a column [num_edges, ...]."""
        raise KeyError(f"no column {name!r}: the graph has no columns")

    def with_edges(
        self: G,
        etype: EType,
        relation: AnyRelation,
        edge_ids: Callable[[], Tensor],
        columns: Mapping[str, Tensor],
    ) -> G:
        """The slice of a graph in which ``etype`` has other edges, with these ids and columns."""
        return self._over(with_relation(self._store, etype, relation, edge_ids), [etype])

    def _num_rows(self, rows: dict[str, Tensor], types: list[str], ntype: str | None) -> int:
        if ntype is None:
            return sum(len(rows[name]) for name in types)
        if ntype not in types:
            raise KeyError(f"ntype: got {ntype!r}, expected one of {types}")
        return len(rows[ntype])

    def num_src_nodes(self, ntype: str | None = None) -> int:
        """Rows of sources, of one type or all."""
        return self._num_rows(self._store.src_rows, self.srctypes, ntype)

    def num_dst_nodes(self, ntype: str | None = None) -> int:
        """Rows of destinations, of one type or all."""
        return self._num_rows(self._store.dst_rows, self.dsttypes, ntype)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of this rank; on a block, those on either side, counted once."""
        store = self._store
        if not store.is_block:
            return self._num_rows(store.src_rows, self.ntypes, ntype)
        names = self.ntypes if ntype is None else [ntype]
        pairs = [(store.src_rows[name], store.dst_rows[name]) for name in names]
        return sum(len(torch.unique(torch.cat(pair))) for pair in pairs)

    def num_edges(self, etype: str | EType | None = None) -> int:
        """Edges that end in rows of this rank, of one relation or all shown."""
        etypes = self.canonical_etypes if etype is None else [self._canonical(etype)]
        return sum(self._store.relations[name].num_edges for name in etypes)

    def num_nodes_global(self, ntype: str | None = None) -> int:
        """Nodes of the whole graph on all ranks."""
        return self._store.book.num_nodes(ntype)

    def num_edges_global(self, etype: str | EType | None = None) -> int:
        """Edges on all ranks; on a block, the block's."""
        etypes = self.canonical_etypes if etype is None else [self._canonical(etype)]
        return sum(self._store.relations[name].num_edges_global for name in etypes)

    @cached_property
    def row_counts(self) -> frozenset[int]:
        """Of the nodes of each type and the edges of each relation on this rank, without 0."""
        store = self._store
        rows = [*store.src_rows.values(), *store.dst_rows.values()]
        edges = [relation.num_edges for relation in store.relations.values()]
        return frozenset([*map(len, rows), *edges]) - {0}

    def in_degrees(self, v: Any = "__ALL__", etype: str | EType | None = None) -> Tensor:
        """int64 edges that end in each destination row, or in rows ``v``."""
        degrees = self._relation(etype).in_degrees
        return degrees if isinstance(v, str) else degrees[torch.as_tensor(v)]

    def out_degrees(self, u: Any = "__ALL__", etype: str | EType | None = None) -> Tensor:
        """int64 edges on all ranks that start in each source row, or in rows ``u``."""
        degrees = self._relation(etype).out_degrees
        return degrees if isinstance(u, str) else degrees[torch.as_tensor(u)]
