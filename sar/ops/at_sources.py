"""Backward of additive attention where edges start, instead of where they end.

Note [At the sources]. The gradients of an edge j -> i take v_j and k_j of its source, and of its
destination do_i and four numbers a head: q_i, m_i, 1 / s_i and delta_i. Computed where the edge
ends, v_j and k_j travel there and their gradients travel back: twice H (D + 1) numbers a row.
Computed where it starts, H (D + 4) numbers of i travel there and dq_i, H numbers, travels back;
dv_j and dk_j are where they belong. Where about as many rows have edges to other ranks as from
them, that is half: 276 numbers a row, not 520, with 4 heads of 64. The edges out of owned rows are
sent to the ranks of their sources once (:class:`OutEdges`) and replace the edges by source among
those that end here. Policies that keep one orientation only do without, and so do scores that are
not additive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from sar.comm import exchange_counts
from sar.edges.relation import LOCAL, EdgeArrays, Relation, ShardStore
from sar.kernels import Csc, add_rows, wide_dtype
from sar.kernels.attention import Columns, Incoming, Mask, attend_grad_additive
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.attention_passes import Attention, Backward, Sources, widened
from sar.partition.features import narrow
from sar.stream import GradientMessages, GradientReturn, HaloPlan, fetch


def backward_of(sources: Sources) -> Callable[..., Any]:
    """:class:`BackwardAtSources` where it sends less and its rounds fit the memory budget, else
    :class:`Backward`; chosen once a relation, which is collective."""
    spec, policy, parts = sources.spec, sources.spec.policy, sources.parts
    relation = spec.relation
    whole = policy.rematerialize and policy.structure == "both" and policy.exchange == "auto"
    narrow = spec.scores.kind == ADDITIVE and len(parts) == 2  # values may be keys as well
    if relation.group.size == 1 or not (narrow and whole and sources.travel):
        return Backward
    wide = wide_dtype(parts[0].dtype).itemsize
    at_ends = sum(part.shape[1] * (part.element_size() + wide) for part in parts)
    row_bytes = _row_bytes(spec, wide)

    def choose() -> Callable[..., Any]:
        edges = relation.derived(OutEdges, lambda: OutEdges(relation))
        cheaper = edges.num_ends * row_bytes < edges.num_starts * at_ends
        if not cheaper or not edges.plan.fitting_rounds(policy, row_bytes):
            return Backward
        return partial(BackwardAtSources, edges)

    return relation.derived(("backward of attention", policy, at_ends, row_bytes), choose)


def _row_bytes(spec: Attention, itemsize: int) -> int:
    """Bytes of a destination that travel to its sources, and of its dq that comes home."""
    return spec.scores.heads * (spec.scores.width + 4 + 1) * itemsize


class OutEdges:
    """Edges that start in owned rows and end in rows of others, 4 bytes each once they are known.

    Collective. Each method gets ``relation``, the edges that end in owned rows: it is not kept.

    Attributes:
        plan: of the rows in which these edges end; each travels to the owners of its sources.
        num_starts, num_ends: rows in which edges between ranks start, and end, once for each rank
            that would need them; of all ranks.
    """

    def __init__(self, relation: Relation) -> None:
        group, spans = relation.group, _remote_spans(relation)
        dst = relation.arrays().dst
        ends = [dst[span].unique() for span in spans]
        recv_counts = exchange_counts(group, [len(idx) for idx in ends])
        plan = HaloPlan(group, relation.num_dst, [*ends], recv_counts)
        self.plan = plan.to(relation.plan.device)
        rows = torch.tensor([sum(relation.plan.send_counts), sum(plan.send_counts)])
        self.num_starts, self.num_ends = group.all_reduce(rows).tolist()
        self._told = [span.stop - span.start for span in spans]  # edges, to each rank
        self._heard = exchange_counts(group, self._told)
        self._shards: dict[int, list[Csc]] = {}
        self._keys: Tensor | None = None

    def shards(self, relation: Relation, num_rounds: int, *, order: bool) -> list[Csc]:
        """One shard a round, by owned row; the other ends index the rows that come in that round.
        Collective when a number of rounds, or ``order`` (positions in :meth:`keys`), is new."""
        known = self._shards.get(num_rounds)
        if known is None or (order and any(csc.order is None for csc in known)):
            relation.store.forget_by_source()  # these take their place
            made = self._hear(relation).shards(num_rounds)
            known = made if order else [replace(csc, order=None) for csc in made]
            self._shards[num_rounds] = known
        return known

    def keys(self, relation: Relation) -> Tensor:
        """:attr:`Relation.keys` of these edges, by position; collective the first time."""
        if self._keys is None:
            eid = relation.arrays().eid
            eids = torch.cat([eid[span] for span in _remote_spans(relation)])
            self._keys = narrow(self._tell(relation.keys.index_select(0, eids).long()))
        return self._keys

    def _hear(self, relation: Relation) -> ShardStore:
        """Receive both ends of these edges, in any order, from the ranks where they end."""
        edges, spans = relation.arrays(), _remote_spans(relation)
        ends = [
            torch.searchsorted(self.plan.rows_for(peer), edges.dst[span], out_int32=True)
            for peer, span in enumerate(spans)
        ]
        starts = [edges.src[span] for span in spans]
        dst, src = self._tell(torch.cat(ends)), self._tell(torch.cat(starts)).split(self._heard)
        own = [relation.plan.rows_for(peer).index_select(0, part) for peer, part in enumerate(src)]
        eid = torch.arange(len(dst), dtype=torch.int32, device=dst.device)
        offsets = [*accumulate(self._heard, initial=0)]
        arrays = EdgeArrays(dst, torch.cat(own), eid, offsets)
        return ShardStore(self.plan, 0, relation.num_src, arrays)

    def _tell(self, numbers: Tensor) -> Tensor:
        """Send one number per edge to the owner of its source."""
        return self.plan.group.all_to_all(numbers, self._told, self._heard)


def _remote_spans(relation: Relation) -> list[slice]:
    """For each rank, where the edges that start there are in a relation; none for the own rank."""
    bounds, rank = pairwise(relation.offsets), relation.group.rank
    return [slice(low, low if peer == rank else high) for peer, (low, high) in enumerate(bounds)]


class BackwardAtSources:
    """One backward pass where edges start: the own shard, then rounds that send queries' gradients.

    ``edges`` are those out of owned rows; ``incoming`` includes the queries, which have no weight.
    """

    def __init__(
        self, edges: OutEdges, sources: Sources, query: Tensor, weight: Tensor, incoming: Incoming,
        wanted: bool,
    ) -> None:  # fmt: skip
        self.spec, self.edges, self.incoming = sources.spec, edges, incoming
        self.value, self.key = map(Columns, map(widened, sources.parts))
        self.dvalue = Columns(torch.empty_like(self.value.rows))
        self.dkey = Columns(torch.empty_like(self.key.rows))

    def run(self) -> tuple[list[Tensor], Tensor, None]:
        """Gradients of values and keys, and of the queries, in the wide dtype."""
        spec, plan, incoming = self.spec, self.edges.plan, self.incoming
        heads, itemsize = spec.scores.heads, incoming.dout.element_size()
        num_rounds = plan.num_rounds(spec.policy, _row_bytes(spec, itemsize))
        is_dropped = spec.dropout is not None
        plan.agree_once("(rounds of backward, whether weights are dropped)", num_rounds, is_dropped)
        shards = self.edges.shards(spec.relation, num_rounds, order=is_dropped)
        mask = self._mask()
        columns = [incoming.dout, incoming.known]
        # Where nothing travels while this rank computes, a second round in flight gains no time.
        window = spec.window if plan.group.has_wire else 1
        stream = fetch(plan, columns, plan.rounds(num_rounds), window=window)
        messages = GradientMessages(plan, heads, incoming.dout.dtype, add_rows)
        home = GradientReturn(messages, self._local)
        home.own()
        for (step, halo), shard in zip(stream, shards, strict=True):
            known = Incoming(halo, halo, incoming.dout.shape[1])
            home.send(step, self._shard(shard, known, mask, home.buffer(step), adds=True))
        dquery = home.finish()
        spec.end_pass()
        return [self.dvalue.rows, self.dkey.rows], dquery, None

    def _local(self) -> Tensor:
        """dq [num_dst, H] of the edges between owned rows."""
        spec, order = self.spec, self.spec.dropout is not None
        (csr,) = spec.relation.store.transposed(LOCAL, spec.policy, order=order)
        dquery = self.dkey.rows.new_empty((len(self.incoming.dout), spec.scores.heads))
        return self._shard(csr, self.incoming, spec.mask, dquery, adds=False)

    def _shard(
        self, csr: Csc, incoming: Incoming, mask: Mask | None, dquery: Tensor, *, adds: bool
    ) -> Tensor:
        """Write, or add, a shard's gradients of values and keys; ``dquery`` gets that of q."""
        parts = dquery.new_zeros((torch.get_num_threads(), *dquery.shape))
        own = self.key, self.value, incoming, self.dkey, self.dvalue, parts
        attend_grad_additive(csr, self.spec.scores, *own, mask, adds)
        return torch.sum(parts, 0, out=dquery)

    def _mask(self) -> Mask | None:
        """The dropout of the edges out of owned rows."""
        if self.spec.mask is None:
            return None
        return replace(self.spec.mask, keys=self.edges.keys(self.spec.relation))
