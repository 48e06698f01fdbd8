"""The graph that layers see: DGL's members over the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy, current_policy
from sar.graph import multi, passing, transform
from sar.graph.counts import Counts
from sar.graph.dispatch import GraphMarker, install
from sar.graph.edge_columns import EdgeColumns
from sar.graph.frame import Frame, FrameSet
from sar.graph.lazy import Scope, eager
from sar.graph.legacy import OriginalMembers
from sar.graph.store import EType, GraphStore
from sar.graph.support import check_module_of, unsupported_member
from sar.graph.undistributed import refuse_undistributed
from sar.ops import AnyRelation, Relation
from sar.ops.callers import layer_of_dgl
from sar.ops.linear_sum import LinearSums, may_wait

ALL = "__ALL__"  # dgl.ALL


class ShardedGraph(Counts, OriginalMembers):
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
        self, store: GraphStore, etypes: Sequence[EType] | None = None, policy: Policy | None = None
    ) -> None:
        self._store = store
        self._is_slice = etypes is not None
        self.canonical_etypes = list(store.relations if etypes is None else etypes)
        self._policy = policy
        install(ShardedGraph)

    # -- structure ------------------------------------------------------------------------------

    @property
    def group(self) -> Group:
        """The ranks that hold the other parts."""
        return self._store.group

    @property
    def policy(self) -> Policy:
        """How halos stream."""
        return current_policy(self._policy)

    def with_policy(self, policy: Policy | None) -> ShardedGraph:
        """The same graph, sharing all data, under another policy."""
        etypes = self.canonical_etypes if self._is_slice else None
        return ShardedGraph(self._store, etypes, policy)

    @property
    def device(self) -> torch.device:
        """Where the structure lies; features of layers are expected there."""
        return self._store.device

    @property
    def idtype(self) -> torch.dtype:
        """Dtype of ids that are handed out."""
        return torch.int64

    def to(self, device: torch.device | str, **_: Any) -> ShardedGraph:
        """The graph on ``device``; itself when it is there already. No communication."""
        refuse_undistributed()
        device = torch.device(device)
        if device == self.device:
            return self
        etypes = self.canonical_etypes if self._is_slice else None
        return ShardedGraph(self._store.to(device), etypes, self._policy)

    @property
    def is_block(self) -> bool:
        """True for a layer's block made by :func:`sar.construct_mfgs`."""
        return self._store.is_block

    @property
    def is_homogeneous(self) -> bool:
        """True with one node type and one edge type."""
        return len(self.ntypes) == 1 and len(self.canonical_etypes) == 1

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

    def node_names(self, ntype: str) -> tuple[Tensor, str]:
        """int64 ids that name this part's nodes of a type however the graph is cut, and their kind.

        The kind is ``"original"``; where the partitions hold no original ids, the ids are the
        partitioning's own and the kind is its digest.
        """
        return self._store.keys.node_names(ntype)

    def __getitem__(self, key: str | EType) -> ShardedGraph:
        """The slice of one relation, sharing data with this graph."""
        etype = self._canonical(key)
        check_module_of(etype, self.canonical_etypes)
        return ShardedGraph(self._store, [etype], self._policy)

    def to_canonical_etype(self, etype: str | EType) -> EType:
        """The (source type, relation, destination type) of a relation name."""
        refuse_undistributed()
        return self._canonical(etype)

    def _canonical(self, etype: str | EType | None) -> EType:
        if etype is None:
            if len(self.canonical_etypes) != 1:
                raise ValueError(f"etype: got None, expected one of {self.canonical_etypes}")
            return self.canonical_etypes[0]
        matches = [known for known in self.canonical_etypes if etype in (known, known[1])]
        if len(matches) != 1:
            problem = "ambiguous" if matches else "unknown"
            raise ValueError(
                f"etype: got {problem} {etype!r}, expected one of {self.canonical_etypes}"
            )
        return matches[0]

    def _relation(self, etype: str | EType | None) -> AnyRelation:
        return self._store.relations[self._canonical(etype)]

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
        refuse_undistributed()
        frames = {id(f): f for f in self._all_frames()}
        saved = {key: frame.save() for key, frame in frames.items()}
        try:
            with LinearSums() if may_wait(layer_of_dgl()) else nullcontext():
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
        return [column for frame in self._all_frames() for column in frame.save()[0].values()]

    def local_var(self) -> ShardedGraph:
        """A graph with the same columns whose later changes do not show here."""
        return self._over(transform.copy_frames(self._store))

    def _over(self, store: GraphStore) -> ShardedGraph:
        """A graph over ``store``, the same slice if this is one."""
        etypes = self.canonical_etypes if self._is_slice else None
        return ShardedGraph(store, etypes, self._policy)

    def add_self_loop(self, etype: str | EType | None = None) -> ShardedGraph:
        """A graph with an edge from every node to itself added at the end; collective."""
        return self._over(transform.add_self_loop(self._store, self._canonical(etype)))

    def remove_self_loop(self, etype: str | EType | None = None) -> ShardedGraph:
        """A graph without edges from a node to itself; collective."""
        return self._over(transform.remove_self_loop(self._store, self._canonical(etype)))

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
        elif edges.dtype != torch.bool or tuple(edges.shape) != (num_edges,):
            got = f"{edges.dtype} {tuple(edges.shape)}"
            error = ValueError(f"edges: got {got}, expected bool [{num_edges}]")
        self.group.agree(error, "edge_subgraph")
        store = transform.edge_subgraph(self._store, canonical, eager(edges))
        return ShardedGraph(store, [canonical] if self._is_slice else None, self._policy)

    def reverse(self, copy_ndata: bool = True, copy_edata: bool = False) -> ShardedGraph:
        """A graph of the same edges the other way round, as ``dgl.reverse``; no communication.

        The edges stay where they are, so ``edata`` has the same rows. ``update_all`` there reduces
        by built-in functions and sends partial results to the owners of the nodes.
        """
        store = transform.reverse(self._store, self.canonical_etypes, copy_ndata, copy_edata)
        return ShardedGraph(store, list(store.relations) if self._is_slice else None, self._policy)

    # -- messages -------------------------------------------------------------------------------

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
            return
        step = multi.Step(message_func, reduce_func, apply_node_func)
        multi.update_all(self._store, self._canonical(etype), step, self.policy)

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
                relation.local(reverse=reverse)
                if self.policy.memory_budget is None:
                    relation.shards(relation.plan.num_rounds(self.policy, 1), reverse=reverse)

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
        return passing.aggregate_rows(relation, x, op, edge_weight, self.policy)

    # -- refusals -------------------------------------------------------------------------------

    @property
    def _graph(self) -> GraphMarker:
        """What DGL's edge operators get; they come back here."""
        return GraphMarker(self)

    def scope(self, etype: str | EType | None = None) -> Scope:
        """What lazy edge tensors of a relation carry with them."""
        return passing.scope_of(self._store, self._canonical(etype), self.policy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_undistributed()
        raise unsupported_member(name)

    def __repr__(self) -> str:
        kind = "block" if self.is_block else "graph"
        nodes = {ntype: self.num_nodes(ntype) for ntype in self.ntypes}
        edges = {etype[1]: self.num_edges(etype) for etype in self.canonical_etypes}
        where = f"rank {self.group.rank} of {self.group.size}"
        return f"ShardedGraph({kind}, {where}, local nodes {nodes}, local edges {edges})"
