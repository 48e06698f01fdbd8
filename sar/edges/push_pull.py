"""Pull or push: sums with the fewest rows on the wire, source rows or partial sums of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from sar.comm import Group
from sar.config import Policy
from sar.edges.relation import LOCAL, EdgeArrays, Ends, Relation, ShardStore, ends_of
from sar.kernels import Csc, compress, spmm_add, spmm_into, transpose, wide_dtype
from sar.partition.cover import cover_size, pulled_sources
from sar.stream import HaloPlan, Round
from sar.stream.plan import Combine

# The edges of rank p with sources on rank q are a matrix A_pq with a row for each destination and a
# column for each source; p needs A_pq x_q. What travels may be rows of x_q (pull), finished rows of
# the product (push), or a mixture: a set of sources and destinations such that each edge has an end
# in it. With the smallest such set,
#     A_pq = [K S] [G; B]
# where G selects the sources of the set, K has their edges, B has the edges out of all other
# sources by destination ("slot"), and S puts each slot into its destination. q sends [G; B] x_q, p
# multiplies by [K S]: the kernels of any other relation whose halo has as many rows. The [G; B] of
# all peers are one matrix, so that a round's message is one product. Backward is the transpose of
# either side, so as many rows travel home. q keeps the edges of B, p neither needs
# nor compresses them.

LEAST_SAVED = 0.05  # share of the halo's rows, over all ranks, below which nothing is changed

logger = logging.getLogger("sar")


class Outgoing:
    """[G; B] for all peers: what this rank sends is this matrix times its rows.

    Args:
        edges: a segment for each row sent, by peer; of each peer, rows as they are come first.
        keep: keep the edges by source, too, once backward has asked for them.
    """

    def __init__(self, edges: Csc, num_rows: int, keep: bool) -> None:
        self.edges, self.num_rows, self.keep = edges, num_rows, keep
        self._runs: dict[tuple[int, int], Csc] = {}
        self._by_source: dict[tuple[int, int], Csc] = {}

    def run(self, first: int, last: int) -> Csc:
        """The edges of rows [first, last) sent, each a row of the result; kept."""
        if (first, last) not in self._runs:
            self._runs[first, last] = self.edges.segments(first, last)
        return self._runs[first, last]

    def by_source(self, first: int, last: int) -> Csc:
        """The edges of rows [first, last) sent, by source; rows without edges left out."""
        found = self._by_source.get((first, last))
        if found is None:
            part = self.run(first, last)
            sent = part.row_of_edges()
            found = compress(part.indices, sent, self.num_rows, compact=True, order=False)
            if self.keep:
                self._by_source[first, last] = found
        return found


class LinearPlan(HaloPlan):
    """A plan that sends each peer some rows as they are and, behind them, partial sums.

    Args:
        outgoing: computes the rows sent from owned ones.
        num_pulled, num_slots: rows that each peer gets as they are, and partial sums.
        recv_pulled: rows that come from each peer as they are.
    """

    def __init__(
        self,
        group: Group,
        outgoing: Outgoing,
        num_pulled: list[int],
        num_slots: list[int],
        recv_counts: list[int],
        recv_pulled: list[int],
    ) -> None:
        self.num_pulled = num_pulled
        send_counts = [a + b for a, b in zip(num_pulled, num_slots, strict=True)]
        self._starts = [*accumulate(send_counts, initial=0)]
        sources, bounds = outgoing.edges.indices, outgoing.edges.indptr[self._starts].tolist()
        send_idx: list[Tensor | None] = [
            sources[low : low + num] for low, num in zip(bounds, num_pulled, strict=False)
        ]
        super().__init__(group, outgoing.num_rows, send_idx, recv_counts, send_counts)
        self.outgoing, self.recv_pulled = outgoing, recv_pulled
        self._sent: dict[range, list[tuple[Csc, int, int]]] = {}  # by the distances of a round
        self.device = sources.device

    def gather(self, peer: int, rows: Sequence[Tensor], start: int, out: Tensor) -> None:
        first = self._starts[peer] + start
        self._gather(self.outgoing.edges.segments(first, first + len(out)), rows, out)

    def gather_round(self, step: Round, rows: Sequence[Tensor], out: Tensor) -> None:
        runs = self._sent.get(step.distances)
        if runs is None:
            runs = [(self.outgoing.run(a, b), at, at + b - a) for a, b, at in self._runs(step)]
            self._sent[step.distances] = runs
        for edges, begin, end in runs:
            if len(rows) == 1:
                spmm_into(out[begin:end], edges, rows[0])
            else:
                self._gather(edges, rows, out[begin:end])

    def scatter_round(self, step: Round, home: Tensor, grads: Tensor, combine: Combine) -> None:
        for first, last, place in self._runs(step):
            part = grads[place : place + last - first]
            spmm_add(home, self.outgoing.by_source(first, last), part)

    def _gather(self, edges: Csc, rows: Sequence[Tensor], out: Tensor) -> None:
        widths = [part.shape[1] for part in rows]
        for part, sums in zip(rows, out.split_with_sizes(widths, dim=1), strict=True):
            spmm_into(sums, edges, part)

    def _runs(self, step: Round) -> Iterator[tuple[int, int, int]]:
        """Runs of rows [first, last) for peers in a row, and where each begins in the round's
        message."""
        first = last = place = 0
        for peer in step.targets:
            if self._starts[peer] != last:
                if first < last:
                    yield first, last, place
                place += last - first
                first = self._starts[peer]
            last = self._starts[peer + 1]
        if first < last:
            yield first, last, place


@dataclass
class FewestRows:
    """The edges and the plan that a relation keeps for its sums.

    Attributes:
        plan: what travels; ``None`` where the relation's own plan is as good.
        pulled: per peer the halo rows of the relation that travel as they are, bool.
        forward, reverse: edges of [K S] by destination and by source, by number of rounds.
        rest: the other edges of the relation, by destination; sources index the whole halo.
    """

    plan: LinearPlan | None
    pulled: list[Tensor]
    rest: Csc | None = None
    forward: dict[int, list[Csc]] = field(default_factory=dict)
    reverse: dict[int, list[Csc]] = field(default_factory=dict)


class LinearRelation:
    """A relation as sums of copied rows need it: the edges that this rank has left to sum.

    Its methods are those of :class:`Relation`; without values per edge, it keeps no order of edges.
    """

    def __init__(self, store: ShardStore, plan: LinearPlan, fewest: FewestRows) -> None:
        self.store, self.plan, self.fewest = store, plan, fewest

    def local(self, *, reverse: bool = False, order: bool = False) -> Csc:
        return self.store.local(reverse=reverse, order=order)

    def shards(self, num_rounds: int, *, order: bool = False) -> list[Csc]:
        known = self.fewest.forward
        if num_rounds not in known:
            edges = self.store.arrays()
            pulled, num_dst = self.fewest.pulled, self.store.num_dst
            rounds, first = self.plan.rounds(num_rounds), not known
            known[num_rounds] = [_left(edges, step, pulled, num_dst, first) for step in rounds]
        return known[num_rounds]

    def transposed(self, num_rounds: int, policy: Policy, *, order: bool = False) -> Iterator[Csc]:
        if num_rounds == LOCAL:
            return self.store.transposed(LOCAL, policy, order=order)
        known = self.fewest.reverse
        if policy.structure != "both" and num_rounds not in known:
            return self._transposed(num_rounds)
        if num_rounds not in known:
            known[num_rounds] = list(self._transposed(num_rounds))
        return iter(known[num_rounds])

    def _transposed(self, num_rounds: int) -> Iterator[Csc]:
        rounds = self.plan.rounds(num_rounds)
        for csc, step in zip(self.shards(num_rounds), rounds, strict=True):
            yield transpose(csc, step.num_recv, order=False)


def _left(edges: EdgeArrays, step: Round, pulled: list[Tensor], num_dst: int, order: bool) -> Csc:
    """Edges of [K S] of a round, by destination; the one out of each slot has position -1."""
    start, srcs, dsts, eids = 0, [], [], []
    for peer, num_rows in zip(step.sources, step.recv_rows, strict=True):
        src, dst, eid = _edges_from(edges, peer)
        mask = pulled[peer]
        place = mask.cumsum(0, dtype=torch.int32) + (start - 1)
        kept = mask[src.long()]
        slots = dst[~kept].unique()
        end = start + num_rows
        behind = torch.arange(end - len(slots), end, dtype=torch.int32, device=src.device)
        srcs += [place.index_select(0, src[kept]), behind]
        dsts += [dst[kept], slots]
        eids += [eid[kept], torch.full_like(slots, -1)]
        start = end
    positions = torch.cat(eids) if order else False
    return compress(torch.cat(dsts), torch.cat(srcs), num_dst, compact=True, order=positions)


def _rest(edges: EdgeArrays, plan: HaloPlan, pulled: list[Tensor], num_dst: int) -> Csc:
    """The edges out of rows that do not travel, by destination; see :class:`FewestRows`."""
    start, srcs, dsts, eids = 0, [], [], []
    for peer, num_rows in enumerate(plan.recv_counts):
        if peer != plan.group.rank:
            src, dst, eid = _edges_from(edges, peer)
            away = ~pulled[peer][src.long()]
            srcs.append(src[away] + start)
            dsts.append(dst[away])
            eids.append(eid[away])
            start += num_rows
    positions = torch.cat(eids)
    return compress(torch.cat(dsts), torch.cat(srcs), num_dst, compact=True, order=positions)


def _remote_edges(relation: HaloPlan, fewest: FewestRows, num_rounds: int) -> Iterator[Ends]:
    """The remote edges of the relation whose plan is ``relation``, from those kept for its sums."""
    peers = [peer for peer in range(relation.group.size) if peer != relation.group.rank]
    if fewest.rest is not None:
        yield ends_of(fewest.rest, peers, [relation.recv_counts[peer] for peer in peers])
    if fewest.plan is None:
        return
    steps = fewest.plan.rounds(num_rounds)
    for step, csc in zip(steps, fewest.forward[num_rounds], strict=True):
        ends = ends_of(csc, step.sources, step.recv_rows)
        kept, rows = ends.eid >= 0, []
        for peer, num_rows in zip(step.sources, step.recv_rows, strict=True):
            sources = fewest.pulled[peer].nonzero().view(-1).int()
            rows += [sources, sources.new_zeros(num_rows - len(sources))]  # slots have no source
        owner, _, dst, eid = (column[kept] for column in ends)
        src = torch.cat(rows).index_select(0, csc.indices[kept])
        yield Ends(owner, src, dst, eid)


def linear_relation(
    relation: Relation, x: Tensor, weight: Tensor | None, policy: Policy
) -> ShardStore | LinearRelation:
    """The edges and plan that a sum of rows ``x`` [num_src, width] streams over; collective.

    All edges where weights belong to them (the owner of a source does not know these), where ``x``
    is narrow (a partial sum would be rounded on its way), where ``policy`` says so and where too
    little is saved. Otherwise those left to do with the fewest rows, found at first need.
    """
    if relation.group.size == 1:
        return relation.store
    wanted = weight is None and policy.exchange == "auto" and wide_dtype(x.dtype) == x.dtype
    width = x.shape[1] * x.element_size()
    relation.plan.agree_once("(bytes per row, whether sums may be pushed)", width, int(wanted))
    if not wanted:
        return relation.store
    fewest = relation.derived(FewestRows, lambda: _fewest_rows(relation, policy))
    if fewest.plan is None:
        return relation.store
    return LinearRelation(relation.store, fewest.plan, fewest)


def _fewest_rows(relation: Relation, policy: Policy) -> FewestRows:
    """Find the fewest rows; no plan on any rank where less than ``LEAST_SAVED`` is saved;
    collective."""
    started, plan, ranks = time.perf_counter(), relation.plan, range(relation.group.size)
    edges = relation.arrays()
    covers = [_cover(edges, plan, peer) for peer in ranks]
    pulled, recv_counts = [one[0] for one in covers], [one[1] for one in covers]
    rows = torch.tensor([sum(plan.recv_counts), sum(recv_counts)])
    before, after = relation.group.all_reduce(rows).tolist()
    if after > (1 - LEAST_SAVED) * before:
        return FewestRows(None, [])
    num_pulled = [int(rows.sum()) for rows in pulled]
    outgoing, sent_rows, sent_sums = _tell(edges, plan, pulled, policy)
    made = LinearPlan(relation.group, outgoing, sent_rows, sent_sums, recv_counts, num_pulled)
    fewest = FewestRows(made, pulled)
    # For these edges are compressed first; under a budget it depends on the width of rows.
    num_rounds = min(policy.rounds or len(ranks) - 1, len(ranks) - 1)
    fewest.rest = _rest(edges, plan, pulled, relation.num_dst)
    LinearRelation(relation.store, made, fewest).shards(num_rounds)
    relation.store.lend(partial(_remote_edges, plan, fewest, num_rounds))
    seconds = time.perf_counter() - started
    logger.debug("sums: %d rows instead of %d, found in %.3f s", after, before, seconds)
    return fewest


def _edges_from(edges: EdgeArrays, peer: int) -> tuple[Tensor, Tensor, Tensor]:
    span = slice(edges.offsets[peer], edges.offsets[peer + 1])
    return edges.src[span], edges.dst[span], edges.eid[span]


def _cover(edges: EdgeArrays, plan: HaloPlan, peer: int) -> tuple[Tensor, int]:
    """Which halo rows of ``peer`` travel as they are, and how many rows in all."""
    if peer == plan.group.rank:
        return torch.zeros(0, dtype=torch.bool, device=plan.device), 0
    src, dst = (ends.cpu().numpy() for ends in _edges_from(edges, peer)[:2])
    pulled = pulled_sources(src, dst, plan.recv_counts[peer])
    return torch.from_numpy(pulled).to(plan.device), cover_size(src, dst, pulled)


def _tell(
    edges: EdgeArrays, plan: HaloPlan, pulled: list[Tensor], policy: Policy
) -> tuple[Outgoing, list[int], list[int]]:
    """Tell every peer what it sends to this rank, and hear what this one sends; collective.

    Returns how rows sent are computed from owned ones; per peer the number of rows as they are, and
    of partial sums.
    """
    group = plan.group
    sizes, parts = torch.zeros((group.size, 3), dtype=torch.int64), []
    for peer in range(group.size):
        if peer != group.rank:
            src, dst, _ = _edges_from(edges, peer)
            away = ~pulled[peer][src.long()]
            slots, slot = dst[away].unique(return_inverse=True)
            told = [pulled[peer].nonzero().view(-1).int(), src[away], slot.int()]
            sizes[peer] = torch.tensor([len(told[0]), len(told[1]), len(slots)])
            parts += told
    threes = [3] * group.size
    heard = group.all_to_all(sizes.view(-1), threes, threes).view(-1, 3)
    lengths = [(table[:, 0] + 2 * table[:, 1]).tolist() for table in (sizes, heard)]
    received = group.all_to_all(torch.cat([pulled[0].new_empty(0).int(), *parts]), *lengths)
    sent, sources, start = [], [], 0  # ends of the edges of Outgoing
    for peer, part in enumerate(received.split(lengths[1])):
        num_rows, num_edges, num_slots = heard[peer].tolist()
        mine = plan.rows_for(peer) if peer != group.rank else part
        idx, srcs, slot = part.split([num_rows, num_edges, num_edges])
        as_they_are = torch.arange(start, start + num_rows, dtype=torch.int32, device=slot.device)
        sent += [as_they_are, slot + (start + num_rows)]
        sources.append(mine.index_select(0, torch.cat([idx, srcs])))
        start += num_rows + num_slots
    joined = compress(torch.cat(sent), torch.cat(sources), start, compact=False, order=False)
    outgoing = Outgoing(joined, plan.num_rows, policy.structure == "both")
    return outgoing, heard[:, 0].tolist(), heard[:, 2].tolist()
