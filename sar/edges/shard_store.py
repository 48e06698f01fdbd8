"""The edges of a relation, kept once in compressed form; everything else is derived from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sar.kernels import Csc, compress, transpose
from sar.stream import HaloPlan

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
    """Shards by number of rounds and orientation.

    Note [Structure]: arrays of end points are given up as soon as the edges are compressed for the
    rounds of a layer. What stays is 8 bytes an edge, by destination (the source and ``eid``, which
    values per edge are addressed by), and 4 bytes an edge by source, for backward. The transposed
    edges are made from the others shard by shard; under ``structure="one"`` each time they are
    needed. Another number of rounds (a memory budget may want several, by the width of layers)
    costs 8 bytes more for each remote edge.

    Args:
        plan: of the halo.
        num_src, num_dst: rows this rank owns on either side.
        edges: given up to the store.
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
        """One shard a round, or the own one for ``LOCAL``; kept.

        Args:
            reverse: by source instead of by destination.
            order: with the position of each edge; a shard may have it unasked.
        """
        kept = self._reverse if reverse else self._forward
        known = kept.get(num_rounds)
        if known is None or (order and any(csc.order is None for csc in known)):
            make = self._transposed if reverse else self._compressed
            kept[num_rounds] = list(make(num_rounds, order))
        return kept[num_rounds]

    def transposed(self, num_rounds: int, *, order: bool, keep: bool) -> Iterator[Csc]:
        """The shards by source, one by one: made when its turn comes unless they are kept."""
        if keep or num_rounds in self._reverse:
            return iter(self.shards(num_rounds, reverse=True, order=order))
        return self._transposed(num_rounds, order)

    def arrays(self) -> EdgeArrays:
        """All edges, in the order they were given in; made from the shards where they are all."""
        if self._arrays is not None:
            return self._arrays
        rank = self.plan.group.rank
        parts = [ends_of(self._forward[LOCAL][0], [rank], [self.num_src])]
        if self._lent is not None:
            parts += self._lent()
        else:
            for step, csc in zip(self._rounds(self._base), self._forward[self._base], strict=True):
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
        """Let the edges between ranks by source go, until they are asked for again."""
        self._reverse = {n: shards for n, shards in self._reverse.items() if n == LOCAL}

    def to(self, plan: HaloPlan) -> ShardStore:
        """The same on the device of ``plan``, without what can be made again."""
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

    def _rounds(self, num_rounds: int) -> tuple:
        return self.plan.rounds(num_rounds) if self.plan.group.size > 1 else ()

    def _compressed(self, num_rounds: int, order: bool) -> list[Csc]:
        """By destination; the first of each kind have their order and replace the arrays."""
        arrays, first = self.arrays(), self._arrays is not None
        if LOCAL not in self._forward:
            rank = self.plan.group.rank
            own = self._build(arrays, [rank], [self.num_src], compact=False, order=True)
            self._forward[LOCAL] = [own]
        if num_rounds == LOCAL:
            return self._forward[LOCAL]
        made = [
            self._build(arrays, step.sources, step.recv_rows, compact=True, order=order or first)
            for step in self._rounds(num_rounds)
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
        """Compress the edges of some source partitions; their rows follow each other by peer."""
        spans = [slice(edges.offsets[p], edges.offsets[p + 1]) for p in peers]
        starts = accumulate(num_rows, initial=0)
        src = [edges.src[span] + start for span, start in zip(spans, starts, strict=False)]
        dst = [edges.dst[span] for span in spans]
        csc = compress(torch.cat(dst), torch.cat(src), self.num_dst, compact=compact, order=order)
        if csc.order is None:
            return csc
        eids = torch.cat([edges.eid[span] for span in spans]).index_select(0, csc.order)
        return Csc(csc.rows, csc.indptr, csc.indices, eids, csc.num_rows)

    def _transposed(self, num_rounds: int, order: bool) -> Iterator[Csc]:
        """By source, one after the other, from the shards by destination."""
        forward = self.shards(num_rounds, order=order)
        rows = [self.num_src]
        if num_rounds != LOCAL:
            rows = [step.num_recv for step in self._rounds(num_rounds)]
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
