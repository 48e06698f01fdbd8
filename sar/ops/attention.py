"""Attention over the edges into each destination, streamed; scores and weights never stored.

Note [At the sources]. The gradients of an edge j -> i take v_j and k_j of its source, and of its
destination do_i and four numbers a head: q_i, m_i, 1 / s_i and delta_i. Computed where the edge
ends, v_j and k_j travel there and their gradients travel back: twice H (D + 1) numbers a row.
Where it starts, what is known of i travels there, H (D + 4) numbers, and dq_i back, H of them;
dv_j and dk_j are where they belong. Where about as many rows have edges to other ranks as from
them, that is half. The edges out of owned rows are told once (:mod:`sar.edges.out_edges`) and take
the place of edges by source among those that end here. Policies that keep one orientation only do
without, and so do scores that are not additive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import without_modes
from sar.edges.out_edges import OutEdges, out_edges_if_cheaper
from sar.edges.relation import LOCAL
from sar.kernels import Csc, add_rows, wide_dtype
from sar.kernels.attention import Columns, Incoming, Mask, Normalizer, attend_grad_additive, deltas
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.attention_passes import (
    Attention,
    Backward,
    Made,
    agreed,
    attention_forward,
    widened,
)
from sar.ops.saving import Writes, any_rank, first_order
from sar.stream import GradientMessages, GradientReturn, fetch


def attention(
    spec: Attention, value: Tensor, key: Tensor | None, query: Tensor, weight: Tensor | None
) -> Tensor:
    """o_i = sum over edges e = (j -> i) of a_e v_j with a = softmax of scores; collective.

    The scores are those of :mod:`sar.kernels.attention`.

    Args:
        value: [num_src, H * D] owned rows, float32, float64 or bfloat16.
        key: [num_src, H] for additive scores, else [num_src, H * D]; ``None``: the values are the
            keys.
        query: [num_dst, H] for additive scores, else [num_dst, H * D].
        weight: [H * D] of mixed scores.

    Returns:
        [num_dst, H * D] in the dtype of ``value``; 0 where no edge ends.
    """
    with without_modes():  # modes would slow it
        spec = agreed(spec, {"values": value, "keys": key, "queries": query, "weight": weight})
        return _Attention.apply(spec, value, key, query, weight)


def attention_backward(
    spec: Attention,
    sources: Sequence[Tensor],
    query: Tensor,
    weight: Tensor,
    incoming: Incoming,
    wanted: bool,
    kept: Sequence[Tensor] = (),
    made: Made | None = None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Gradients of the sources, of the queries and of the weight, in the wide dtype; collective.

    Args:
        incoming: of additive scores with the queries.
        wanted: whether anybody asks for gradients of the sources.
        kept: halos of the forward pass, if they were kept.
        made: as in :class:`Backward`.
    """
    edges = edges_to_compute_at(spec, sources) if wanted and made is None else None
    if edges is not None:
        return *BackwardAtSources(spec, edges, sources, incoming).run(), None
    return Backward(spec, sources, query, weight, incoming, wanted, made).run(kept)


class _Attention(Function):
    """out_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  =========================  ===================================================
    tensor      shape                      owner and lifetime
    ==========  =========================  ===================================================
    v, k        [num_src, H * D], [.., K]  this rank; saved (inputs, not copies); k may be v
    q           [num_dst, K]               this rank; saved (an input)
    w           [H * D]                    every rank; saved (an input); mixed scores only
    halo        [<= round, H * D + K]      peers; fetched per round in forward and again in
                                           backward (kept when policy.rematerialize is off)
    m, 1 / s    [num_dst, H] each          this rank; saved
    out         [num_dst, H * D]           this rank; saved; computed again in backward if the
                                           caller wrote into it on any rank
    dq          [threads, num_dst, H]      this rank; in backward; additive scores only, else
                                           [num_dst, K]
    z, a, r     one chunk of edges         recomputed where they are used, never stored
    ==========  =========================  ===================================================

    K is H for additive scores, else H * D; z_e = s(k_j, q_i; w) as :mod:`sar.kernels.attention`
    lists, m_i = max_e z_e, s_i = sum_e exp(z_e - m_i), r_e is 1 or the dropout's factor. Backward,
    with delta_i = <dout_i, out_i> per head: dz_e = a_e (r_e <dout_i, v_j> - delta_i),
    dv_j = sum_e r_e a_e dout_i, (dk_j, dq_i, dw) = sum_e (ds/d(k_j, q_i, w))^T dz_e;
    dv and dk of halo rows go home round by round, unless nobody asks for gradients of v and k.
    By Note [At the sources] rows [<= round, H * D + 4 H] of dout and of what is known of the
    destinations travel instead, and dq of them [<= round, H] goes home.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: Attention,
        value: Tensor,
        key: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
    ) -> Tensor:
        sources, used = _read(value, key, query, weight)
        wide, normalizer, kept = attention_forward(spec, sources, query, used)
        out = wide.to(value.dtype)
        ctx.spec, ctx.kept = spec, kept
        if not torch.is_inference_mode_enabled():
            ctx.writes = Writes(out)
        ctx.save_for_backward(value, key, query, weight, *normalizer, out.data)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        value, key, query, weight, largest, inverse, out = ctx.saved_tensors
        sources, used = _read(value, key, query, weight)
        if any_rank(ctx.spec.relation.group, ctx.writes.happened):
            out = attention_forward(ctx.spec, sources, query, used)[0]
        dout = widened(dout)
        delta = deltas(dout, widened(out), ctx.spec.scores.heads)
        queries = [widened(query)] if ctx.spec.scores.kind == ADDITIVE else []
        incoming = Incoming.of(dout, Normalizer(largest, inverse), delta, *queries)
        wanted = any(ctx.needs_input_grad[1:3])
        homes, dquery, dweight = attention_backward(
            ctx.spec, sources, query, used, incoming, wanted, ctx.kept
        )
        dvalue, dkey = (*homes, None)[:2] if wanted else (None, None)
        grads = (dvalue, dkey, dquery, None if weight is None else dweight)
        inputs = (value, key, query, weight)
        typed = [d if d is None else d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]
        return None, *typed


def _read(
    value: Tensor, key: Tensor | None, query: Tensor, weight: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The sources that travel, and a weight of no numbers where there is none."""
    sources = [part.contiguous() for part in (value, key) if part is not None]
    return sources, query.new_zeros(0) if weight is None else weight


def edges_to_compute_at(spec: Attention, sources: Sequence[Tensor]) -> OutEdges | None:
    """The edges out of owned rows, if backward sends less where it goes over these; collective.

    Args:
        sources: owned values and keys.
    """
    relation, policy = spec.relation, spec.policy
    whole = policy.rematerialize and policy.structure == "both" and policy.exchange == "auto"
    narrow = spec.scores.kind == ADDITIVE and len(sources) == 2  # values may be keys as well
    if relation.group.size == 1 or not (narrow and whole):
        return None
    wide = wide_dtype(sources[0].dtype).itemsize
    at_ends = sum(part.shape[1] * (part.element_size() + wide) for part in sources)
    row_bytes = _row_bytes(spec, wide)
    edges = out_edges_if_cheaper(relation, at_ends, row_bytes)
    fits = edges is not None and edges.plan.fitting_rounds(policy, row_bytes)
    return edges if fits else None


def _row_bytes(spec: Attention, itemsize: int) -> int:
    """What travels of a destination, and comes home."""
    return spec.scores.heads * (spec.scores.width + 4 + 1) * itemsize


class BackwardAtSources:
    """One backward pass where edges start: the own shard, then rounds that send queries' gradients.

    Args:
        incoming: with the queries.
    """

    def __init__(
        self, spec: Attention, edges: OutEdges, sources: Sequence[Tensor], incoming: Incoming,
    ) -> None:  # fmt: skip
        self.spec, self.edges, self.incoming = spec, edges, incoming
        self.value, self.key = map(Columns, map(widened, sources))
        self.dvalue = Columns(torch.empty_like(self.value.rows))
        self.dkey = Columns(torch.empty_like(self.key.rows))

    def run(self) -> tuple[list[Tensor], Tensor]:
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
        return [self.dvalue.rows, self.dkey.rows], dquery

    def _local(self) -> Tensor:
        """Over the edges between owned rows: the gradient of the queries."""
        spec, order = self.spec, self.spec.dropout is not None
        (csr,) = spec.relation.transposed(LOCAL, spec.policy, order=order)
        dquery = self.dkey.rows.new_empty((len(self.incoming.dout), spec.scores.heads))
        return self._shard(csr, self.incoming, spec.mask, dquery, adds=False)

    def _shard(
        self, csr: Csc, incoming: Incoming, mask: Mask | None, dquery: Tensor, *, adds: bool
    ) -> Tensor:
        """Take in a shard's gradients of values and keys; ``dquery`` filled with the queries'."""
        parts = dquery.new_zeros((torch.get_num_threads(), *dquery.shape))
        own = self.key, self.value, incoming, self.dkey, self.dvalue, parts
        attend_grad_additive(csr, self.spec.scores, *own, mask, adds)
        return torch.sum(parts, 0, out=dquery)

    def _mask(self) -> Mask | None:
        """Of the edges out of owned rows."""
        if self.spec.mask is None:
            return None
        return replace(self.spec.mask, keys=self.edges.keys(self.spec.relation))
