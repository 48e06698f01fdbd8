"""A relation: the edges of one type that end in this rank's rows, and the halo they need."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.mailbox_edges import MailboxEdges, in_mailbox_order
from sar.kernels import INT32_EDGES, Csc, compress, transpose
from sar.stream import HaloPlan

T = TypeVar("T")
LOCAL = 0  # stands for the shard of the own partition where a number of rounds is expected


class EdgeArrays(NamedTuple):
    """Edges grouped by the partition that owns their source, int32 [E] each.

    Attributes:
        src: a row of the owned source tensor for the own partition, and an index into that peer's
            halo rows for others.
        dst: an owned destination row.
        eid: the position among the local edges in ascending global edge id.
        offsets: edges of source partition p are [offsets[p], offsets[p + 1]), ascending ``eid``.
    """

    src: Tensor
    dst: Tensor
    eid: Tensor
    offsets: list[int]


class Ends(NamedTuple):
    """Some edges in any order, int32 [e] each: as :class:`EdgeArrays`, and the sources' owners."""

    owner: Tensor
    src: Tensor
    dst: Tensor
    eid: Tensor


class ShardStore:
    """The edges of a relation, as shards by number of rounds and orientation.

    The given ``edges`` are dropped as soon as they are compressed for the rounds of a layer. What
    stays is 8 bytes an edge, by destination (the source and ``eid``, which values per edge are
    addressed by), and 4 bytes an edge by source, for backward. The transposed edges are made from
    the others shard by shard; under ``structure="one"`` each time they are needed. Another number
    of rounds (a memory budget may want several, by the width of layers) costs 8 bytes more for each
    remote edge.
    """

    def __init__(self, plan: HaloPlan, num_src: int, num_dst: int, edges: EdgeArrays) -> None:
        self.plan, self.num_src, self.num_dst = plan, num_src, num_dst
        self.offsets = edges.offsets
        self._arrays: EdgeArrays | None = edges
        self._lent: Callable[[], Iterable[Ends]] | None = None
        self._base = LOCAL  # rounds of the shards that have taken the arrays' place
        self._forward: dict[int, list[Csc]] = {}
        self._reverse: dict[int, list[Csc]] = {}

    def shards(self, num_rounds: int, *, reverse: bool = False, order: bool = False) -> list[Csc]:
        """One shard a round, or the own one for ``LOCAL``; kept. By source with ``reverse``; with
        ``order`` each has the positions of its edges, and may have them without."""
        kept = self._reverse if reverse else self._forward
        known = kept.get(num_rounds)
        if known is None or (order and any(csc.order is None for csc in known)):
            make = self._transposed if reverse else self._compressed
            kept[num_rounds] = list(make(num_rounds, order))
        return kept[num_rounds]

    def local(self, *, reverse: bool = False, order: bool = False) -> Csc:
        """The shard whose sources are owned, by destination or (``reverse``) by source."""
        return self.shards(LOCAL, reverse=reverse, order=order)[0]

    def transposed(self, num_rounds: int, policy: Policy, *, order: bool = False) -> Iterator[Csc]:
        """The shards by source, or the own one for ``LOCAL``: kept, or made one by one, by
        ``policy.structure``."""
        if policy.structure == "both" or num_rounds in self._reverse:
            return iter(self.shards(num_rounds, reverse=True, order=order))
        return self._transposed(num_rounds, order)

    def arrays(self) -> EdgeArrays:
        """All edges, in the order in which they were given; made from the shards that replace
        them."""
        if self._arrays is not None:
            return self._arrays
        rank = self.plan.group.rank
        parts = [ends_of(self._forward[LOCAL][0], [rank], [self.num_src])]
        if self._lent is not None:
            parts += self._lent()
        else:
            for step, csc in zip(
                self.plan.rounds(self._base), self._forward[self._base], strict=True
            ):
                parts.append(ends_of(csc, step.sources, step.recv_rows))
        owner, src, dst, eid = (torch.cat(column) for column in zip(*parts, strict=True))
        order = torch.argsort(owner.long() * max(1, len(eid)) + eid)
        return EdgeArrays(src[order], dst[order], eid[order], self.offsets)

    def lend(self, remote: Callable[[], Iterable[Ends]]) -> None:
        """Keep the own shard only; ``remote`` gives the other edges back when they are needed."""
        self.shards(LOCAL)
        self._arrays, self._lent = None, remote
        self._forward = {LOCAL: self._forward[LOCAL]}
        self.forget_by_source()

    def forget_by_source(self) -> None:
        """Drop the remote edges by source, until they are asked for again."""
        self._reverse = {n: shards for n, shards in self._reverse.items() if n == LOCAL}

    def to(self, plan: HaloPlan) -> ShardStore:
        """The same edges on the device of ``plan``, without what can be made again."""
        moved = copy(self)
        moved.plan, device = plan, plan.device
        moved._reverse = {}
        kept = {LOCAL, self._base} & set(self._forward)
        moved._forward = {n: [csc.to(device) for csc in self._forward[n]] for n in kept}
        if self._arrays is not None or self._lent is not None:
            src, dst, eid, offsets = self.arrays()
            moved._lent = None
            moved._arrays = EdgeArrays(src.to(device), dst.to(device), eid.to(device), offsets)
        return moved

    def _compressed(self, num_rounds: int, order: bool) -> list[Csc]:
        """Shards by destination; the first of each kind have positions and replace the arrays."""
        arrays, first = self.arrays(), self._arrays is not None
        if LOCAL not in self._forward:
            rank = self.plan.group.rank
            own = self._build(arrays, [rank], [self.num_src], compact=False, order=True)
            self._forward[LOCAL] = [own]
        if num_rounds == LOCAL:
            return self._forward[LOCAL]
        made = [
            self._build(arrays, step.sources, step.recv_rows, compact=True, order=order or first)
            for step in self.plan.rounds(num_rounds)
        ]
        if first:
            self._arrays, self._base = None, num_rounds
        return made

    def _build(
        self,
        edges: EdgeArrays,
        peers: Sequence[int],
        num_rows: Sequence[int],
        *,
        compact: bool,
        order: bool,
    ) -> Csc:
        """Compress the edges of some source partitions, whose rows follow each other by peer."""
        spans = [slice(edges.offsets[p], edges.offsets[p + 1]) for p in peers]
        starts = accumulate(num_rows, initial=0)
        src = [edges.src[span] + start for span, start in zip(spans, starts, strict=False)]
        dst = [edges.dst[span] for span in spans]
        eid = torch.cat([edges.eid[span] for span in spans]) if order else False
        return compress(torch.cat(dst), torch.cat(src), self.num_dst, compact=compact, order=eid)

    def _transposed(self, num_rounds: int, order: bool) -> Iterator[Csc]:
        """Shards by source, one after the other, made from those by destination."""
        forward = self.shards(num_rounds, order=order)
        rows = [self.num_src]
        if num_rounds != LOCAL:
            rows = [step.num_recv for step in self.plan.rounds(num_rounds)]
        for csc, num_rows in zip(forward, rows, strict=True):
            yield transpose(csc, num_rows, order=order)


def ends_of(csc: Csc, peers: Sequence[int], num_rows: Sequence[int]) -> Ends:
    """The edges of a shard whose sources are ``num_rows`` rows of each of ``peers``."""
    device = csc.indices.device
    ends = torch.tensor([*accumulate(num_rows)], dtype=torch.int32, device=device)
    slot = torch.bucketize(csc.indices, ends, right=True)
    owner = torch.tensor(peers, dtype=torch.int32, device=device)[slot]
    src = csc.indices - (ends - torch.tensor(num_rows, device=device).int())[slot]
    if csc.order is None:
        raise RuntimeError("unreachable: the shards that stand for the arrays have their order")
    return Ends(owner, src, csc.row_of_edges(), csc.order)


class Deriving:
    """Keeps what was derived from it; a reversed or moved relation shares nothing of it."""

    known: dict[Hashable, Any]

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for ``key`` the first time, in inference mode, too, for later calls
        outside of it; on another device it is made anew.

        Collective where ``make`` is. What it gives must not refer to the relation: neither would be
        freed.
        """
        if key not in self.known:
            with torch.inference_mode(False), torch.set_grad_enabled(torch.is_grad_enabled()):
                self.known[key] = make()
        return self.known[key]


class Relation(Deriving):
    """Edges of one canonical edge type, grouped by the partition that owns their source.

    Args:
        num_src, num_dst: rows this rank owns on either side.
        src, dst, eid, offsets: as in :class:`EdgeArrays`; not kept, see :class:`ShardStore`.

    Attributes:
        in_degrees: int64 [num_dst] edges that end in each owned row; all of them are local.
        out_degrees: int64 [num_src] edges on all ranks that start in each owned row.
        known: what was derived so far, see :meth:`derived`.

    Raises ``ValueError`` on every rank, where a rank has 2^31 edges or more.
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
        self.known: dict[Hashable, Any] = {}
        self.num_edges_global = self._count_edges()
        self.in_degrees = torch.bincount(dst, minlength=num_dst)
        self.out_degrees = self._count_out_degrees(edges)

    @property
    def offsets(self) -> list[int]:
        return self.store.offsets

    @cached_property
    def keys(self) -> Tensor:
        """Names of the local edges in random numbers, by position: int32 or int64 [num_edges].
        Those of :class:`sar.partition.features.Keys`, which no cut changes; made at first need."""
        return self.make_keys().to(self.plan.device)

    @cached_property
    def halo_starts(self) -> list[int]:
        """Where each peer's halo begins behind the owned rows when all of it is held at once."""
        return [*accumulate(self.plan.recv_counts, initial=self.num_src)][:-1]

    @cached_property
    def has_no_edge_somewhere(self) -> bool:
        """Whether there is an owned row in which no edge ends."""
        return bool((self.in_degrees == 0).any())

    @cached_property
    def mailbox_edges(self) -> MailboxEdges:
        """All edges by destination; sources are owned rows or rows behind ``halo_starts``."""
        src, dst, eid, offsets = self.arrays()
        src = src.clone()
        for peer, (low, high) in enumerate(pairwise(offsets)):
            src[low:high] += 0 if peer == self.group.rank else self.halo_starts[peer]
        return in_mailbox_order(src, dst, eid, self.in_degrees)

    def arrays(self) -> EdgeArrays:
        """The end points of all edges; made anew, 12 bytes an edge, once they are compressed. Not
        to be written into, nor to be held."""
        return self.store.arrays()

    def to(self, device: torch.device) -> Relation:
        """The same relation with its arrays on ``device``; no communication."""
        moved = copy(self)
        for name in ("keys", "mailbox_edges"):
            moved.__dict__.pop(name, None)
        moved.plan = self.plan.to(device)
        moved.store = self.store.to(moved.plan)
        for name in ("in_degrees", "out_degrees"):
            setattr(moved, name, getattr(self, name).to(device))
        moved.known = {}
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
        """Edges out of owned rows on all ranks, int64 [num_src]; collective."""
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


class ReversedRelation(Deriving):
    """The same edges reversed; each stays on the rank where it ended before.

    Sources and destinations change places. What a reduction needs is pushed to the owners, see
    :mod:`sar.ops.messages`.
    """

    def __init__(self, forward: Relation) -> None:
        self.forward, self.plan, self.group = forward, forward.plan, forward.group
        self.num_src, self.num_dst = forward.num_dst, forward.num_src
        self.num_edges, self.num_edges_global = forward.num_edges, forward.num_edges_global
        self.in_degrees, self.out_degrees = forward.out_degrees, forward.in_degrees
        self.offsets, self.make_keys = forward.offsets, forward.make_keys
        self.known: dict[Hashable, Any] = {}

    @property
    def keys(self) -> Tensor:
        return self.forward.keys

    def to(self, device: torch.device) -> ReversedRelation:
        return ReversedRelation(self.forward.to(device))


AnyRelation = Relation | ReversedRelation


def reverse_relation(relation: AnyRelation) -> AnyRelation:
    """The relation with all edges reversed; no communication."""
    return (
        relation.forward if isinstance(relation, ReversedRelation) else ReversedRelation(relation)
    )


def as_stored(relation: AnyRelation, what: str) -> Relation:
    """``relation`` itself; raises ``ValueError`` naming ``what`` for a reversed one."""
    if isinstance(relation, ReversedRelation):
        raise ValueError(f"{what}: got a reversed graph, expected one as it was loaded")
    return relation
