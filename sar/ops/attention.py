"""Attention over the edges into each destination, streamed; scores and weights never stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import without_modes
from sar.kernels.attention import Incoming, Normalizer, deltas
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.at_sources import backward_of
from sar.ops.at_table import TableAttention
from sar.ops.attention_passes import (
    Attention,
    Backward,
    Sources,
    agreed,
    forward_in_rounds,
    widened,
)
from sar.ops.saving import Writes, anybody_wrote, first_order


def attention(
    spec: Attention, value: Tensor, key: Tensor | None, query: Tensor, weight: Tensor | None
) -> Tensor:
    """o_i = sum over edges e = (j -> i) of a_e v_j with a = softmax of scores; collective.

    The scores are those of :mod:`sar.kernels.attention`. o is [num_dst, H * D], 0 without edges.

    Args:
        value: [num_src, H * D] owned rows, float32, float64 or bfloat16.
        key: [num_src, H] for additive scores, else [num_src, H * D]; ``None``: the values.
        query: [num_dst, H] for additive scores, else [num_dst, H * D].
        weight: [H * D] of mixed scores.
    """
    with without_modes():  # modes would slow it
        spec = agreed(spec, {"values": value, "keys": key, "queries": query, "weight": weight})
        return _Attention.apply(spec, value, key, query, weight)


def attention_forward(sources: Sources, query: Tensor, weight: Tensor) -> tuple[Tensor, Normalizer]:
    """out [num_dst, H * D], and m and 1 / s, which normalize the weights; collective."""
    table = sources.spec.relation.group.table
    if table is not None:
        return TableAttention(table, sources, query, weight).forward()
    return forward_in_rounds(sources, query, weight)


def attention_backward(
    sources: Sources, query: Tensor, weight: Tensor, incoming: Incoming, wanted: bool
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Gradients of the sources, the queries and the weight, in the wide dtype; collective.

    ``incoming`` includes the queries for additive scores; ``wanted``: somebody asks for gradients
    of the sources.
    """
    table = sources.spec.relation.group.table
    if table is not None:
        return TableAttention(table, sources, query, weight).backward(incoming, wanted)
    kind = backward_of(sources) if wanted else Backward
    return kind(sources, query, weight, incoming, wanted).run()


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
        sources, used = _read(spec, value, key, query, weight)
        wide, normalizer = attention_forward(sources, query, used)
        out = wide.to(value.dtype)
        ctx.spec, ctx.kept = spec, sources.kept
        if not torch.is_inference_mode_enabled():
            ctx.writes = Writes(out)
        ctx.save_for_backward(value, key, query, weight, *normalizer, out.data)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        value, key, query, weight, largest, inverse, out = ctx.saved_tensors
        sources, used = _read(ctx.spec, value, key, query, weight, ctx.kept)
        if anybody_wrote(ctx.spec.relation.group, ctx.writes.happened):
            out = attention_forward(sources, query, used)[0]
        dout = widened(dout)
        delta = deltas(dout, widened(out), ctx.spec.scores.heads)
        queries = [widened(query)] if ctx.spec.scores.kind == ADDITIVE else []
        incoming = Incoming.of(dout, Normalizer(largest, inverse), delta, *queries)
        wanted = any(ctx.needs_input_grad[1:3])
        homes, dquery, dweight = attention_backward(sources, query, used, incoming, wanted)
        dvalue, dkey = (*homes, None)[:2] if wanted else (None, None)
        grads = (dvalue, dkey, dquery, None if weight is None else dweight)
        inputs = (value, key, query, weight)
        typed = [d if d is None else d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]
        return None, *typed


def _read(
    spec: Attention, value: Tensor, key: Tensor | None, query: Tensor, weight: Tensor | None,
    kept: list[Tensor] | None = None,
) -> tuple[Sources, Tensor]:  # fmt: skip
    """The source rows, and an empty weight where there is none."""
    parts = [part for part in (value, key) if part is not None]
    return Sources(spec, parts, kept), query.new_zeros(0) if weight is None else weight
