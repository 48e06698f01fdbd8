"""Backward of additive attention where edges start, in place of where they end.

A layer with 4 heads of 64 sends 276 numbers a row backward, not 520.

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

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sar.edges.out_edges import OutEdges, out_edges_if_cheaper
from sar.edges.relation import LOCAL
from sar.kernels import Csc, add_rows, wide_dtype
from sar.kernels.attention import Columns, Incoming, Mask, attend_grad_additive
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.attention_passes import Attention, Backward, Sources, widened
from sar.stream import GradientMessages, GradientReturn, fetch


def backward_of(sources: Sources) -> Callable[..., Any]:
    """:class:`BackwardAtSources` or :class:`Backward`: chosen once a relation, collective then.

    The former where it sends less and its rounds fit into the memory budget.
    """
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
        edges = out_edges_if_cheaper(relation, at_ends, row_bytes)
        if edges is None or not edges.plan.fitting_rounds(policy, row_bytes):
            return Backward
        return partial(BackwardAtSources, edges)

    return relation.derived(("backward of attention", policy, at_ends, row_bytes), choose)


def _row_bytes(spec: Attention, itemsize: int) -> int:
    """What travels of a destination, and comes home."""
    return spec.scores.heads * (spec.scores.width + 4 + 1) * itemsize


class BackwardAtSources:
    """One backward pass where edges start: the own shard, then rounds that send queries' gradients.

    Args:
        edges: out of owned rows.
        incoming: with the queries, which have no weight.
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
