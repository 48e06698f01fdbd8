"""A relation: the edges of one type that end in this rank's rows, and the halo they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sar.comm import Group, HaloPlan, build_halo_plan, join_plans
from sar.kernels import Csc, compress
from sar.ops.arrivals import Arrivals, arrange
from sar.ops.constant import Constants


class Relation:
    """Edges of one canonical edge type, grouped by the partition that owns their source.

    Shards are compressed for the rounds in use on first need; both orientations are kept.

    Args:
        plan: the halo plan of the source rows.
        num_src, num_dst: rows this rank owns on either side.
        src, dst, eid: int32 [E]; ``src`` is a row of the owned source tensor for the own partition
            and an index into that peer's halo rows for others; ``eid`` is the position among the
            local edges in ascending global edge id.
        offsets: edges of source partition p are [offsets[p], offsets[p + 1]), ascending ``eid``.
        make_keys: makes ``keys``.
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
        self.src, self.dst, self.eid, self.offsets = src, dst, eid, list(offsets)
        self.make_keys = make_keys
        self._shards: dict[tuple[int, bool, bool], list[Csc]] = {}
        self.constants = Constants(self.group)
        self.num_edges_global = int(self.group.all_reduce(torch.tensor(len(src)), "sum"))
        self.out_degrees = self._count_out_degrees()

    @cached_property
    def in_degrees(self) -> Tensor:
        """int64 [num_dst] edges that end in each owned row; all of them are local."""
        return torch.bincount(self.dst, minlength=self.num_dst)

    @cached_property
    def keys(self) -> Tensor:
        """int32 or int64 [num_edges]: names of the local edges in random numbers, by position.

        Those of :class:`sar.partition.keys.Keys`, which no cut changes; made at first need.
        """
        return self.make_keys().to(self.src.device)

    @cached_property
    def halo_starts(self) -> list[int]:
        """Where each peer's halo begins behind the owned rows when all of it is held at once."""
        counts = self.plan.recv_counts
        return [self.num_src + sum(counts[:peer]) for peer in range(self.group.size)]

    @cached_property
    def arrivals(self) -> Arrivals:
        """All edges by destination; sources are owned rows or rows behind ``halo_starts``."""
        src = self.src.clone()
        for peer, (low, high) in enumerate(pairwise(self.offsets)):
            src[low:high] += 0 if peer == self.group.rank else self.halo_starts[peer]
        return arrange(src, self.dst, self.eid, self.in_degrees)

    def local(self, *, reverse: bool = False, order: bool = False) -> Csc:
        """The shard whose sources are owned, by destination or (``reverse``) by source."""
        return self._cached(0, reverse, order)[0]

    def shards(self, num_rounds: int, *, reverse: bool = False, order: bool = False) -> list[Csc]:
        """One shard a round; sources index the round's halo rows. ``order`` keeps ``eid``."""
        return self._cached(num_rounds, reverse, order)

    def to(self, device: torch.device) -> Relation:
        """The same relation with its arrays on ``device``; no communication."""
        moved = object.__new__(Relation)
        moved.__dict__.update(self.__dict__)
        for name in ("in_degrees", "keys", "arrivals"):
            moved.__dict__.pop(name, None)
        moved.plan = self.plan.to(device)
        for name in ("src", "dst", "eid", "out_degrees"):
            setattr(moved, name, getattr(self, name).to(device))
        moved._shards = {}
        moved.constants = Constants(self.group)
        return moved

    def _cached(self, num_rounds: int, reverse: bool, order: bool) -> list[Csc]:
        """num_rounds 0 stands for the local shard. A shard with order serves without, too."""
        for known in ((num_rounds, reverse, True), (num_rounds, reverse, order)):
            if known in self._shards:
                return self._shards[known]
        if num_rounds == 0:
            shards = [self._build([self.group.rank], reverse, order)]
        else:
            rounds = self.plan.rounds(num_rounds) if self.group.size > 1 else ()
            shards = [self._build(step.sources, reverse, order) for step in rounds]
        self._shards[num_rounds, reverse, order] = shards
        self._shards.pop((num_rounds, reverse, False), None) if order else None
        return shards

    def _build(self, peers: Sequence[int], reverse: bool, order: bool) -> Csc:
        """Compress the edges of some source partitions; halo rows follow each other by peer."""
        own = list(peers) == [self.group.rank]
        spans = [slice(self.offsets[p], self.offsets[p + 1]) for p in peers]
        counts = [self.num_src if own else self.plan.recv_counts[p] for p in peers]
        starts = [sum(counts[:i]) for i in range(len(peers))]
        parts = [self.src[span] + start for span, start in zip(spans, starts, strict=True)]
        src = torch.cat(parts) if len(parts) > 1 else parts[0]
        dst = torch.cat([self.dst[span] for span in spans])
        eid = torch.cat([self.eid[span] for span in spans]) if order else None
        if reverse:
            csc = compress(src, dst, sum(counts), compact=False, order=order)
        else:
            csc = compress(dst, src, self.num_dst, compact=not own, order=order)
        if eid is None or csc.order is None:
            return csc
        eids = eid.index_select(0, csc.order)
        return Csc(csc.rows, csc.indptr, csc.indices, eids, csc.num_rows)

    def _count_out_degrees(self) -> Tensor:
        """int64 [num_src]: edges out of owned rows on all ranks; collective."""
        plan, rank = self.plan, self.group.rank
        local = slice(self.offsets[rank], self.offsets[rank + 1])
        degrees = torch.bincount(self.src[local], minlength=self.num_src)
        counts = [
            torch.bincount(self.src[self.offsets[p] : self.offsets[p + 1]], minlength=rows)
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
    offsets = [0]
    for peer in range(group.size):
        for number, relation in enumerate(relations):
            span = slice(relation.offsets[peer], relation.offsets[peer + 1])
            src = relation.src[span]
            if peer != group.rank:
                src = places[number][peer].index_select(0, src)
            dst, eid = relation.dst[span], relation.eid[span]
            parts.append((src, dst + dst_starts[number], eid + eid_starts[number]))
        offsets.append(sum(len(part[0]) for part in parts))
    src, dst, eid = (torch.cat(column) for column in zip(*parts, strict=True))

    def keys() -> Tensor:
        return torch.cat([relation.make_keys() for relation in relations])

    return Relation(plan, num_src, dst_starts[-1], src, dst, eid, offsets, keys)
