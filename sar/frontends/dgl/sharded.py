"""The graph that layers see: DGL's members over the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.config import Policy, usable_device
from sar.edges import AnyRelation, Relation
from sar.errors import UnsupportedMember
from sar.frontends.dgl import multi, passing
from sar.frontends.dgl import store as stores
from sar.frontends.dgl.edge_columns import EdgeColumns, refuse_compiled
from sar.frontends.dgl.frame import Frame, FrameSet
from sar.frontends.dgl.hints import missing_member
from sar.frontends.dgl.legacy import OriginalMembers
from sar.frontends.dgl.operators import GraphMarker
from sar.frontends.dgl.patches import install
from sar.graph.rows import current
from sar.graph.store import Structure
from sar.kernels.jit import untraced
from sar.nn import own_layers
from sar.nn.drift import watch_rows
from sar.partition.book import EType
from sar.tracing.lazy import eager
from sar.tracing.reducing import aggregate_rows

ALL = "__ALL__"  # dgl.ALL


class ShardedGraph(OriginalMembers):
    """One rank's share of a partitioned graph, with the members of a DGLGraph that layers use.

    Node and edge tensors hold this rank's rows: nodes in ascending global id per type, edges that
    end in them in ascending global id. :meth:`update_all`, :meth:`apply_edges` and
    :meth:`aggregate` are collective: every rank calls them in the same order. Made by
    :func:`sar.construct_full_graph` and :func:`sar.construct_mfgs`.

    Args:
        store: shared by the graph and its slices ``graph[etype]``.
        etypes: the relations this object shows.
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.
    """

    def __init__(
        self, store: Structure, etypes: Sequence[EType] | None = None, policy: Policy | None = None
    ) -> None:
        super().__init__(stores.framed(store), etypes, policy)
        install()

    # -- structure ------------------------------------------------------------------------------

    @property
    def idtype(self) -> torch.dtype:
        """Dtype of ids that are handed out."""
        return torch.int64

    def to(self, device: torch.device | str, **_: Any) -> ShardedGraph:
        """The graph on ``device``; itself when it is there already. No communication."""
        device = usable_device(device)
        if device == self.device:
            return self
        return self._over(self._store.to(device))

    def __getitem__(self, key: str | EType) -> ShardedGraph:
        """The slice of one relation, sharing data with this graph."""
        return self._over(self._store, [self._canonical(key)])

    def to_canonical_etype(self, etype: str | EType) -> EType:
        """The (source type, relation, destination type) of a relation name."""
        return self._canonical(etype)

    # -- data -----------------------------------------------------------------------------------

    def _frames(self, frames: dict[str, Frame], types: list[str]) -> Frame | FrameSet:
        if len(types) == 1:
            return frames[types[0]]
        return FrameSet({ntype: frames[ntype] for ntype in types}, lambda ntype: ntype)

    @property
    def srcdata(self) -> Any:
        """Columns of source rows: name to tensor, or to a dict per type when there are several."""
        return self._frames(self._store.src_frames, self.srctypes)

    @property
    def dstdata(self) -> Any:
        """Columns of destination rows; the same as ``srcdata`` on a whole graph."""
        return self._frames(self._store.dst_frames, self.dsttypes)

    @property
    def ndata(self) -> Any:
        """Columns of nodes; raises ``AttributeError`` on a block, which has two sides."""
        if self.is_block:
            raise AttributeError("a block has srcdata and dstdata, not ndata")
        return self._frames(self._store.src_frames, self.ntypes)

    @property
    def edata(self) -> Any:
        """Columns of the local edges in ascending global id, which is ``edata["_ID"]``. Floating
        point ones are edge tensors; ``.materialize()`` gives what was stored."""
        columns = {etype: self._edge_columns(etype) for etype in self.canonical_etypes}
        if len(columns) == 1:
            return next(iter(columns.values()))
        return FrameSet(columns, self._canonical)

    def _edge_columns(self, etype: str | EType) -> EdgeColumns:
        canonical = self._canonical(etype)
        return EdgeColumns(self._store.edge_frames[canonical], self.scope(canonical))

    @contextmanager
    def local_scope(self) -> Iterator[None]:
        """Changes of columns inside the ``with`` block are forgotten at its end."""
        install()
        frames = {id(f): f for f in self._all_frames()}
        saved = {key: frame.save() for key, frame in frames.items()}
        try:
            yield
        finally:
            for key, frame in frames.items():
                frame.restore(saved[key])

    def _all_frames(self) -> list[Frame]:
        store = self._store
        return [
            *(store.src_frames[ntype] for ntype in self.srctypes),
            *(store.dst_frames[ntype] for ntype in self.dsttypes),
            *(store.edge_frames[etype] for etype in self.canonical_etypes),
        ]

    def stored_columns(self) -> list[Tensor]:
        """All columns of nodes and edges that lie in memory."""
        return [column for frame in self._all_frames() for column in frame.in_memory()]

    def edge_column(self, name: str) -> Tensor:
        """[num_edges, ...] values of a column of the one relation; collective if computed now."""
        return self._store.edge_frames[self._canonical(None)].values_of(name)

    def put_edge_column(self, name: str, values: Tensor) -> None:
        """Let the one relation have a column [num_edges, ...]."""
        self.edata[name] = values

    def columns_put_back(self) -> AbstractContextManager[Any]:
        """Changes of columns inside are forgotten at the end."""
        return self.local_scope()

    def with_edges(
        self,
        etype: EType,
        relation: AnyRelation,
        edge_ids: Callable[[], Tensor],
        columns: Mapping[str, Tensor],
    ) -> ShardedGraph:
        """The slice of a graph in which ``etype`` has other edges, with these ids and columns."""
        store = stores.with_edges(self._store, etype, relation, edge_ids, columns)
        return self._over(store, [etype])

    def local_var(self) -> ShardedGraph:
        """A graph with the same columns whose later changes do not show here."""
        return self._over(stores.copy_frames(self._store))

    def add_self_loop(
        self, etype: str | EType | None = None, rows: Mapping[str, Tensor] | None = None
    ) -> ShardedGraph:
        """A graph with an edge from every node to itself added at the end; collective.

        ``rows`` are their columns, [num_nodes, ...] each; 0 in others.
        """
        store = stores.add_self_loop(self._store, self._canonical(etype), rows or {})
        return self._over(store)

    def remove_self_loop(self, etype: str | EType | None = None) -> ShardedGraph:
        """A graph without edges from a node to itself; collective."""
        return self._over(stores.remove_self_loop(self._store, self._canonical(etype)))

    def edge_subgraph(self, edges: Tensor, etype: str | EType | None = None) -> ShardedGraph:
        """A graph of all nodes and some edges, with their columns and ids; collective.

        What ``dgl.edge_subgraph`` gives with ``relabel_nodes=False``.

        Args:
            edges: bool [E], which local edges stay.

        Raises ``ValueError`` on every rank for anything else, and for a block.
        """
        canonical = self._canonical(etype)
        num_edges, error = self.num_edges(canonical), None
        if self.is_block:
            error = ValueError("edge_subgraph: got a block, expected a whole graph")
        elif not hasattr(edges, "dtype"):
            error = ValueError(f"edges: got {type(edges).__name__}, expected bool [{num_edges}]")
        elif edges.dtype != torch.bool or [*map(int, edges.shape)] != [num_edges]:
            got = f"{edges.dtype} {tuple(edges.shape)}"
            error = ValueError(f"edges: got {got}, expected bool [{num_edges}]")
        self.group.agree(error, "edge_subgraph")
        store = stores.edge_subgraph(self._store, canonical, eager(edges))
        return self._over(store)

    def reverse(self, copy_ndata: bool = True, copy_edata: bool = False) -> ShardedGraph:
        """A graph of the same edges the other way round, as ``dgl.reverse``; no communication.

        The edges stay where they are, so ``edata`` has the same rows. ``update_all`` there reduces
        by built-in functions and sends partial results to the owners of the nodes.
        """
        store = stores.reverse(self._store, self.canonical_etypes, copy_ndata, copy_edata)
        return self._over(store, list(store.relations) if self._is_slice else None)

    # -- messages -------------------------------------------------------------------------------

    @untraced
    def update_all(
        self,
        message_func: Any,
        reduce_func: Any,
        apply_node_func: Callable | None = None,
        etype: str | EType | None = None,
    ) -> None:
        """Send a message over every edge and reduce them at the destinations; collective.

        Args:
            message_func: a ``dgl.function`` message or a function of an edge batch.
            reduce_func: ``dgl.function`` sum, mean, max or min, or a function of a batch of nodes
                with a ``mailbox``, called once per in-degree and block. Rows without edges get 0;
                a tie of max or min gives its gradient to the edge of smallest global id.
            apply_node_func: called with the destination columns and, among them, what was reduced;
                returns the columns to store instead. As in DGL, it gets -inf or inf of max and min
                in rows without edges, and infinities in the first column that it returns become 0.
            etype: the relation; without, a graph of several reduces over the edges of all, by
                built-in functions, sum, max or min.

        Raises:
            NotSupportedError: another reduction.
            KeyError: a column or message that does not exist; ValueError: shapes that do not fit.
        """
        if etype is None and len(self.canonical_etypes) > 1:
            steps, op = multi.steps_of_all(self.canonical_etypes, message_func, reduce_func)
            multi.multi_update_all(self._store, steps, op, apply_node_func, self.policy)
        else:
            step = multi.Step(message_func, reduce_func, apply_node_func)
            multi.update_all(self._store, self._canonical(etype), step, self.policy)
        self._watch_rows()

    @untraced
    def multi_update_all(
        self,
        etype_dict: Mapping[Any, tuple],
        cross_reducer: str | Callable[[list[Tensor]], Tensor],
        apply_node_func: Callable | None = None,
    ) -> None:
        """Reduce messages over several relations, then the results of each node type; collective.

        Relations that copy the same column of the same source type fetch its rows once. All ranks
        name the relations in the same order.

        Args:
            etype_dict: relation to (message function, reduce function[, apply function]), as for
                :meth:`update_all`; the apply function sees that relation's result.
            cross_reducer: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"stack"`` (along
                dimension 1, relations in the graph's order) or a function of a list of tensors. A
                relation's max or min is infinite at nodes without edges, as in DGL; what is
                infinite after the cross reducer becomes 0.
            apply_node_func: called for each node type that was reduced into.

        Raises:
            ValueError: a relation that does not exist or comes twice, another cross reducer.
        """
        steps = multi.read_steps(etype_dict, cross_reducer, self._canonical)
        multi.multi_update_all(self._store, steps, cross_reducer, apply_node_func, self.policy)
        self._watch_rows()

    @partial(untraced, otherwise=partial(refuse_compiled, "graph.apply_edges"))
    def apply_edges(
        self, func: Any, edges: Any = ALL, etype: str | EType | None = None, inplace: bool = False
    ) -> None:
        """Compute columns of the local edges; collective.

        Args:
            func: a ``dgl.function`` message or a function of an edge batch.
            edges: int positions [n] of local edges to compute; others keep what they had, or 0.
                ``TypeError`` or ``ValueError`` for what are no positions of local edges.
        """
        chosen = None if isinstance(edges, str) and edges == ALL else edges
        passing.apply_edges(self._store, self._canonical(etype), func, chosen, self.policy)

    def create_formats_(self) -> None:
        """Compress the edges now, by destination and by source, instead of in the first epoch.

        For the rounds and the orientations of this graph's policy; under a memory budget rounds
        depend on the width of rows, and only the edges among owned rows are compressed. What
        layers are told by other ranks (sums, attention at the sources) comes with the first epoch.
        """
        for etype in self.canonical_etypes:
            stored = self._store.relations[etype]
            relation = stored if isinstance(stored, Relation) else stored.forward
            for reverse in (False, True) if self.policy.structure == "both" else (False,):
                relation.store.local(reverse=reverse)
                if self.policy.memory_budget is None:
                    relation.store.shards(relation.plan.num_rounds(self.policy, 1), reverse=reverse)

    @untraced
    def aggregate(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        edge_weight: Tensor | None = None,
        etype: str | EType | None = None,
    ) -> Tensor:
        """Reduce the rows of in-neighbors without naming columns; collective.

        Args:
            x: [num_src_nodes, ...] owned source rows.
            op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``.
            edge_weight: [num_edges] or [num_edges, 1], multiplies each message.

        Returns:
            [num_dst_nodes, ...] in the dtype of ``x``; 0 for rows without edges.
        """
        relation = self._relation(etype)
        out = aggregate_rows(relation, x, op, edge_weight, self.policy)
        self._watch_rows(x)
        return out

    halo, local_edges = own_layers.halo, own_layers.local_edges
    sum_rounds, fetch = own_layers.sum_rounds, own_layers.fetch

    def _watch_rows(self, *rows: Tensor) -> None:
        """Compare now and then what rows depend on, over ranks; DGL's layers do it themselves."""
        if all(call.module is None for call in current.stack):
            watch_rows(lambda: [*rows, *self.stored_columns()], self.group)

    # -- refusals -------------------------------------------------------------------------------

    @property
    def _graph(self) -> GraphMarker:
        """What DGL's edge operators get; they come back here."""
        install()
        return GraphMarker(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedMember(missing_member(name))

    def __repr__(self) -> str:
        kind = "block" if self.is_block else "graph"
        nodes = {ntype: self.num_nodes(ntype) for ntype in self.ntypes}
        edges = {etype[1]: self.num_edges(etype) for etype in self.canonical_etypes}
        where = f"rank {self.group.rank} of {self.group.size}"
        return f"ShardedGraph({kind}, {where}, local nodes {nodes}, local edges {edges})"
