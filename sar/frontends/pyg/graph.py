"""Graphs as PyG's tensors of edges carry them: one rank's rows, and relations derived from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor

from sar.config import Policy
from sar.edges import AnyRelation, Relation, as_stored
from sar.errors import NotSupportedError
from sar.frontends.pyg.filters import Filters
from sar.graph import GraphView
from sar.graph.store import Structure
from sar.graph.transform import are_no_loops, whole_relation, with_loops, with_some_edges
from sar.ops.saving import any_rank
from sar.partition.book import EType
from sar.partition.features import Keys
from sar.tracing.lazy import EdgeTensor, eager
from sar.tracing.reducing import rows_of


class EdgeGraph(GraphView):
    """One rank's part of a graph, or one relation of it, without columns: PyG's data hold those.

    Attributes:
        num_loops: how many times loops were added at every node.
        whole: the graph of all relations, which its group knows for as long as this is there.
        origin: the structure of the graph that this was derived from, if it was.
        columns: what gives the values of the edges' columns, by name.
        may_have_more_rows: whether tensors of nodes may have rows behind those of the edges' ends.
        rows_seen: what looked right, of layers and of their rows.
    """

    num_loops = 0
    whole: EdgeGraph | None = None
    origin: Structure | None = None
    may_have_more_rows = False
    columns: Mapping[str, Callable[[], Tensor]] = MappingProxyType({})
    _looped: EdgeGraph | None = None

    def __init__(
        self, store: Structure, etypes: Sequence[EType] | None = None, policy: Policy | None = None
    ) -> None:
        super().__init__(store, etypes, policy)
        self.rows_seen: set[Any] = set()

    @property
    def sharing(self) -> Any:
        """The layer's call in progress whose modules share rows, if any."""
        return (self.origin or self._store).sharing

    def edge_columns(self, values: Tensor, name: str = "") -> EdgeTensor:
        """Lazy rows [num_edges, ...] of values of the relation's edges."""
        return rows_of(self.scope(), "e", values, name)

    def edge_column(self, name: str) -> Tensor:
        if name not in self.columns:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self.columns) or 'none'}")
        return self.columns[name]()

    def put_edge_column(self, name: str, values: Tensor) -> None:
        self.columns = {**self.columns, name: lambda: values}

    def with_edges(
        self, etype: EType, relation: AnyRelation, edge_ids: Any, columns: Mapping[str, Tensor]
    ) -> EdgeGraph:
        made = super().with_edges(etype, relation, edge_ids, columns)
        for name, values in columns.items():
            made.put_edge_column(name, values)
        return made

    def add_loops(self) -> EdgeGraph:
        """With a loop at every node, behind the other edges; no communication."""
        relation = self._between_nodes()
        etype = self.canonical_etypes[0]
        rows = self._store.dst_rows[etype[0]].cpu()
        keys = partial(_keys_of_loops, self._store.keys, etype, self.num_loops, rows)
        made = self._derived(relation.derived("with loops", lambda: with_loops(relation, keys)))
        made.num_loops = self.num_loops + 1
        return made

    def _between_nodes(self) -> Relation:
        """The relation, which must be between nodes of one type, for self loops."""
        src, _, dst = etype = self.canonical_etypes[0]
        if src != dst or self._store.dst_rows is not self._store.src_rows:
            raise NotSupportedError(
                f"self loops of edges from {src!r} to {dst!r}: no node is at both ends; expected "
                "add_self_loops=False"
            )
        return whole_relation(self._store, etype, "self loops")

    def with_own_loops(self) -> EdgeGraph:
        """With one loop at every node in place of those that it has; collective at first."""
        if self._looped is None:
            self._looped = self.drop_loops().add_loops()
        return self._looped

    def drop_loops(self) -> EdgeGraph:
        """Without edges from a node to itself, of which there may be none; collective at first."""
        relation = self._between_nodes()
        keep = self.are_no_loops()

        def make() -> Relation | None:
            has_some = any_rank(relation.group, not bool(keep.all()))
            return with_some_edges(relation, keep) if has_some else None

        made = relation.derived("without loops", make)
        return self._derived(relation if made is None else made)

    def are_no_loops(self) -> Tensor:
        """bool [num_edges]: which edges lead to another node; kept."""
        relation = self._between_nodes()
        return relation.derived("no loops", lambda: are_no_loops(relation))

    def filtered(self, keep: Tensor) -> EdgeGraph:
        """Only the edges where bool [num_edges] is true; collective unless such a mask, lazy, came
        before."""
        relation = as_stored(self.scope().relation, "a filter of edges")
        made = self._derived(self.filters.find(relation, keep))
        made.columns = {name: partial(_kept, read, keep) for name, read in self.columns.items()}
        return made

    @property
    def filters(self) -> Filters:
        """The relations of some of the edges."""
        return self.scope().relation.derived("filters", lambda: Filters(self.device))

    def trim_with(self, inner: EdgeGraph, kept: Tensor) -> None:
        """Say what is left of this one layer later: a graph, whose edges are those at int64
        ``kept``."""
        self.scope().relation.derived(_TRIMMED, lambda: (inner, kept))
        self.later = [inner, *inner.later]

    def trimmed(self) -> tuple[EdgeGraph, Tensor]:
        """What is left one layer later; raises ``NotSupportedError`` where nobody said it."""
        known = self.scope().relation.known
        if _TRIMMED not in known:
            raise NotSupportedError(
                "trim_to_layer: got the edges of a whole graph, or changed ones; expected an "
                "edge_index of sar.pyg.construct_neighborhood, as often as it has hops"
            )
        return known[_TRIMMED]

    def _derived(self, relation: Relation) -> EdgeGraph:
        etype = self.canonical_etypes[0]
        made = self.with_edges(etype, relation, self._store.edge_ids[etype], {})
        made.num_loops = self.num_loops
        made.origin = self.origin or self._store
        return made


def _keys_of_loops(keys: Keys, etype: EType, times: int, rows: Tensor) -> Tensor:
    return keys.loops(etype, times).index_select(0, rows)


def _kept(read: Callable[[], Tensor], keep: Tensor) -> Tensor:
    return eager(read())[eager(keep)]


_TRIMMED = "one layer later"
