"""A relation: the edges of one type that end in this rank's rows, and the halo they need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy
from sar.edges.arrivals import Arrivals, arrange
from sar.edges.shard_store import LOCAL, EdgeArrays, ShardStore
from sar.kernels import INT32_EDGES, Csc
from sar.stream import HaloPlan, build_halo_plan, join_plans

T = TypeVar("T")


class Relation:
    """Edges of one canonical edge type, grouped by the partition that owns their source.

    Shards are compressed for the rounds in use on first need; see Note [Structure] in
    :mod:`sar.edges.shard_store`.

    Args:
        plan: the halo plan of the source rows.
        num_src, num_dst: rows this rank owns on either side.
        src, dst, eid, offsets: as in :class:`sar.edges.shard_store.EdgeArrays`; not kept.
        make_keys: makes ``keys``.

    Attributes:
        num_edges_global: edges of all ranks.
        in_degrees: int64 [num_dst] edges that end in each owned row; all of them are local.
        out_degrees: int64 [num_src] edges on all ranks that start in each owned row.

    Raises:
        ValueError: on every rank, where a rank has 2^31 edges or more.
    """

    def __init__(
        self,
        plan: HaloPlan,
        num_src: int,
        num_dst: int,
        src: Tensor,
        dst: Tensor,
        eid: Tensor,
        offsets: Sequence[int],
        make_keys: Callable[[], Tensor],
    ) -> None:
        self.plan, self.group = plan, plan.group
        self.num_src, self.num_dst, self.num_edges = num_src, num_dst, len(src)
        self.make_keys = make_keys
        edges = EdgeArrays(src, dst, eid, list(offsets))
        self.store = ShardStore(plan, num_src, num_dst, edges)
        self._derived: dict[Hashable, Any] = {}
        self.num_edges_global = self._count_edges()
        self.in_degrees = torch.bincount(dst, minlength=num_dst)
        self.out_degrees = self._count_out_degrees(edges)

    @property
    def offsets(self) -> list[int]:
        """Bounds of each source partition's edges in :meth:`arrays`."""
        return self.store.offsets

    @cached_property
    def keys(self) -> Tensor:
        """int32 or int64 [num_edges]: names of the local edges in random numbers, by position.

        Those of :class:`sar.partition.keys.Keys`, which no cut changes; made at first need.
        """
        return self.make_keys().to(self.plan.device)

    @cached_property
    def halo_starts(self) -> list[int]:
        """Where each peer's halo begins behind the owned rows when all of it is held at once."""
        return [*accumulate(self.plan.recv_counts, initial=self.num_src)][:-1]

    @cached_property
    def has_no_edge_somewhere(self) -> bool:
        """Whether an owned row is none in which an edge ends."""
        return bool((self.in_degrees == 0).any())

    @cached_property
    def arrivals(self) -> Arrivals:
        """All edges by destination; sources are owned rows or rows behind ``halo_starts``."""
        src, dst, eid, offsets = self.arrays()
        src = src.clone()
        for peer, (low, high) in enumerate(pairwise(offsets)):
            src[low:high] += 0 if peer == self.group.rank else self.halo_starts[peer]
        return arrange(src, dst, eid, self.in_degrees)

    def arrays(self) -> EdgeArrays:
        """The end points of all edges; made anew, and 12 bytes an edge, once they are compressed.

        Not to be written into, nor to be held.
        """
        return self.store.arrays()

    def local(self, *, reverse: bool = False, order: bool = False) -> Csc:
        """The shard whose sources are owned, by destination or (``reverse``) by source."""
        return self.store.shards(LOCAL, reverse=reverse, order=order)[0]

    def shards(self, num_rounds: int, *, reverse: bool = False, order: bool = False) -> list[Csc]:
        """One shard a round; sources index the round's halo rows. ``order`` gives positions."""
        return self.store.shards(num_rounds, reverse=reverse, order=order)

    def transposed(self, num_rounds: int, policy: Policy, *, order: bool = False) -> Iterator[Csc]:
        """The shards by source as ``policy.structure`` wants: kept, or each made for its turn.

        Args:
            num_rounds: ``LOCAL`` for the shard whose sources are owned.
        """
        return self.store.transposed(num_rounds, order=order, keep=policy.structure == "both")

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for ``key`` the first time; on another device it is made anew.

        Collective where ``make`` is.
        """
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def to(self, device: torch.device) -> Relation:
        """The same relation with its arrays on ``device``; no communication."""
        moved = copy(self)
        for name in ("keys", "arrivals"):
            moved.__dict__.pop(name, None)
        moved.plan = self.plan.to(device)
        moved.store = self.store.to(moved.plan)
        for name in ("in_degrees", "out_degrees"):
            setattr(moved, name, getattr(self, name).to(device))
        moved._derived = {}
        return moved

    def _count_edges(self) -> int:
        """Edges of all ranks; collective. Positions of a rank's edges are int32 numbers."""
        counts = [int(n) for n in self.group.all_gather(torch.tensor(self.num_edges))]
        largest = max(counts)
        if largest > INT32_EDGES:
            raise ValueError(
                f"edges: rank {counts.index(largest)} got {largest} of one type, expected at most "
                f"{INT32_EDGES}: cut the graph into more parts"
            )
        return sum(counts)

    def _count_out_degrees(self, edges: EdgeArrays) -> Tensor:
        """int64 [num_src]: edges out of owned rows on all ranks; collective."""
        plan, rank, offsets = self.plan, self.group.rank, edges.offsets
        local = slice(offsets[rank], offsets[rank + 1])
        degrees = torch.bincount(edges.src[local], minlength=self.num_src)
        counts = [
            torch.bincount(edges.src[offsets[p] : offsets[p + 1]], minlength=rows)
            for p, rows in enumerate(plan.recv_counts)
            if p != rank
        ]
        sent = torch.cat([degrees[:0], *counts])
        home = self.group.all_to_all(sent, plan.recv_counts, plan.send_counts)
        for idx, part in zip(plan.send_idx, home.split(plan.send_counts), strict=True):
            if idx is None and len(part) == self.num_src:
                degrees += part
            elif idx is not None and len(part):
                degrees.index_add_(0, idx, part)
        return degrees


class ReversedRelation:
    """The same edges the other way round; each stays where it ended before it was turned.

    Rows of sources and destinations change places. What a reduction needs is pushed to the owners,
    see :mod:`sar.ops.push`.
    """

    def __init__(self, forward: Relation) -> None:
        self.forward, self.plan, self.group = forward, forward.plan, forward.group
        self.num_src, self.num_dst = forward.num_dst, forward.num_src
        self.num_edges, self.num_edges_global = forward.num_edges, forward.num_edges_global
        self.in_degrees, self.out_degrees = forward.out_degrees, forward.in_degrees
        self.offsets, self.make_keys = forward.offsets, forward.make_keys
        self._derived: dict[Hashable, Any] = {}

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """As :meth:`Relation.derived`; nothing is shared with the relation that was turned."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    @property
    def keys(self) -> Tensor:
        """int64 [num_edges] names of the edges, which do not change when they are turned."""
        return self.forward.keys

    def to(self, device: torch.device) -> ReversedRelation:
        """The same with its arrays on ``device``; no communication."""
        return ReversedRelation(self.forward.to(device))


AnyRelation = Relation | ReversedRelation


def reverse_relation(relation: AnyRelation) -> AnyRelation:
    """The relation with all edges turned round; no communication."""
    return (
        relation.forward if isinstance(relation, ReversedRelation) else ReversedRelation(relation)
    )


def as_stored(relation: AnyRelation, what: str) -> Relation:
    """``relation`` itself; raises ``ValueError`` naming ``what`` for a reversed one."""
    if isinstance(relation, ReversedRelation):
        raise ValueError(f"{what}: got a reversed graph, expected one as it was loaded")
    return relation


def build_relation(
    group: Group,
    src: Tensor,
    dst: Tensor,
    eid: Tensor,
    offsets: Sequence[int],
    num_src: int,
    num_dst: int,
    make_keys: Callable[[], Tensor],
    position: Tensor | None = None,
) -> Relation:
    """Collective: agree the halo plan of one edge type and renumber remote sources by it.

    Args:
        src, dst, eid: int32 [E] as in :class:`Relation`, but ``src`` is everywhere the row inside
            the owner's partition.
        offsets: as in :class:`Relation`, length P + 1.
        num_src, num_dst: rows this rank owns on either side.
        make_keys: as in :class:`Relation`.
        position: for blocks, the row of the source tensor for each row of the partition, or -1.
    """
    compact = torch.empty_like(src)
    wanted: list[Tensor] = []
    for peer in range(group.size):
        span = slice(offsets[peer], offsets[peer + 1])
        if peer == group.rank:
            wanted.append(src[:0])
            own = src[span]
            compact[span] = own if position is None else position.index_select(0, own).int()
        else:
            rows, inverse = torch.unique(src[span], return_inverse=True)
            wanted.append(rows)
            compact[span] = inverse.int()
    plan = build_halo_plan(group, wanted, num_src, position)
    return Relation(plan, num_src, num_dst, compact, dst, eid, offsets, make_keys)


def join_relations(relations: Sequence[Relation]) -> Relation:
    """Collective: relations out of the same source rows as one, whose halo holds a row once.

    Their destination rows follow each other, and so do their edges.
    """
    group, num_src = relations[0].group, relations[0].num_src
    plan, places = join_plans([relation.plan for relation in relations])
    dst_starts = [0, *accumulate(relation.num_dst for relation in relations)]
    eid_starts = [0, *accumulate(relation.num_edges for relation in relations)]
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    arrays = [relation.arrays() for relation in relations]
    offsets = [0]
    for peer in range(group.size):
        for number, edges in enumerate(arrays):
            span = slice(edges.offsets[peer], edges.offsets[peer + 1])
            src = edges.src[span]
            if peer != group.rank:
                src = places[number][peer].index_select(0, src)
            dst, eid = edges.dst[span], edges.eid[span]
            parts.append((src, dst + dst_starts[number], eid + eid_starts[number]))
        offsets.append(sum(len(part[0]) for part in parts))
    src, dst, eid = (torch.cat(column) for column in zip(*parts, strict=True))

    def keys() -> Tensor:
        return torch.cat([relation.make_keys() for relation in relations])

    return Relation(plan, num_src, dst_starts[-1], src, dst, eid, offsets, keys)
