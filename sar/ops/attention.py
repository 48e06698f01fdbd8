"""Attention over the edges into each destination, streamed; scores and weights never stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import EXACT
from sar.kernels import wide_dtype
from sar.kernels.attention import Incoming, Normalizer, add_projected_grads
from sar.kernels.attention_loops import ADDITIVE
from sar.ops.arriving import Arriving, LinearRows, all_found, linear_of
from sar.ops.attention_at_sources import BackwardAtSources, edges_to_compute_at
from sar.ops.attention_passes import Attention, Backward, attention_forward, widened
from sar.ops.bias import Writes, any_rank
from sar.ops.callers import layer_of_dgl
from sar.ops.first_order import first_order
from sar.ops.overwrite import may_overwrite
from sar.ops.saving import spares_memory
from sar.stream.sampled import refuse_sampling
from sar.stream.wanted import agree_wanted


@dataclass(frozen=True)
class Projection:
    """Keys or queries that are ``(value * vector)`` summed over each head's columns.

    Note [Projected scores]. Gradients of such keys and queries are those of the values and of the
    vector: attention adds them there in one pass and returns none for the scores, so that autograd
    has nothing to compute on that way. It does so only if the scores are gone by then: nobody can
    ask for their gradient.

    Attributes:
        vector: H * D numbers of any shape, a leaf.
        scores: the keys or queries as the layer made them.
    """

    vector: Tensor
    scores: ReferenceType[Tensor]


def attention(
    spec: Attention,
    value: Tensor,
    key: Tensor | None,
    query: Tensor,
    weight: Tensor | None,
    projections: Mapping[str, Projection | None] = MappingProxyType({}),
) -> Tensor:
    """o_i = sum over edges e = (j -> i) of a_e v_j with a = softmax of scores; collective.

    The scores are those of :mod:`sar.kernels.attention`.

    Args:
        value: [num_src, H * D] owned rows, float32, float64 or bfloat16.
        key: [num_src, H] for additive scores, else [num_src, H * D]; ``None``: the values are the
            keys.
        query: [num_dst, H] for additive scores, else [num_dst, H * D].
        weight: [H * D] of mixed scores.
        projections: of additive scores, what ``"key"`` and ``"query"`` are where that is known.

    Returns:
        [num_dst, H * D] in the dtype of ``value``; 0 where no edge ends.
    """
    with torch._C.DisableTorchFunction():  # modes would slow it
        return _attention(spec, value, key, query, weight, projections)


def _attention(
    spec: Attention,
    value: Tensor,
    key: Tensor | None,
    query: Tensor,
    weight: Tensor | None,
    projections: Mapping[str, Projection | None],
) -> Tensor:
    refuse_sampling(spec.policy, "attention")
    named = {"values": value, "keys": key, "queries": query, "weight": weight}
    given = [(name, tensor) for name, tensor in named.items() if tensor is not None]
    agree_wanted(spec.relation.plan, given, 1 if key is None else 2)
    if spares_memory():
        spec = replace(spec, window=1)
    known = [projections.get(name) for name in ("key", "query")]
    vectors = [None if one is None else one.vector for one in known]
    scores = [None if one is None else one.scores for one in known]
    linear = _agreed_rows(spec, value, key, projections.get("key"))
    made_of = (None,) * 3 if linear is None else (linear.rows, linear.weight, linear.bias)
    return _Attention.apply(spec, value, key, query, weight, scores, *vectors, *made_of)


def _agreed_rows(
    spec: Attention, value: Tensor, key: Tensor | None, projection: Projection | None
) -> LinearRows | None:
    """What values and keys are made of, where that travels; collective in layers of DGL."""
    trained = value.requires_grad and torch.is_grad_enabled()
    if layer_of_dgl() is None or not trained or spec.policy.lossy != EXACT:
        return None
    found = linear_of(value)
    if found is None or not (key is None or projection is not None):
        fits = False
    else:
        width = value.shape[1] + (0 if key is None else key.shape[1])
        fits = value.dtype == wide_dtype(value.dtype) and found.rows.shape[1] <= width
    return all_found(spec.relation.group, found if fits else None)


class _Attention(Function):
    """out_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  =========================  ===================================================
    tensor      shape                      owner and lifetime
    ==========  =========================  ===================================================
    v, k        [num_src, H * D], [.., K]  this rank; saved (inputs, not copies), v not where x
                                           is; k may be v
    q           [num_dst, K]               this rank; saved (an input)
    w           [H * D]                    every rank; saved (an input); mixed scores only
    a_k, a_q    H * D numbers each         every rank; saved (inputs); where k_j = <a_k, v_j> or
                                           q_i = <a_q, v_i> per head, see Note [Projected scores]
    x           [num_src, F]               this rank; saved (an input); where v = x W^T + b and x
                                           travels instead, see Note [Projected on arrival]
    W, b        [H * D, F], [H * D]        every rank; what was made of them is held
    halo        [<= round, H * D + K or F] peers; fetched per round in forward and again in
                                           backward (kept when policy.rematerialize is off; of x in
                                           files, where Note [Constant halo] says so)
    m, 1 / s    [num_dst, H] each          this rank; saved
    out         [num_dst, H * D]           this rank; saved; computed again in backward if the
                                           caller wrote into it on any rank; with b added where
                                           Note [Bias in place] allows it. Becomes dv where nobody
                                           else has it, see Note [Overwritten]
    dq          [threads, num_dst, H]      this rank; in backward; additive scores only, else
                                           [num_dst, K]
    z, a, r     one chunk of edges         recomputed where they are used, never stored
    ==========  =========================  ===================================================

    K is H for additive scores, else H * D; z_e = s(k_j, q_i; w) as :mod:`sar.kernels.attention`
    lists, m_i = max_e z_e, s_i = sum_e exp(z_e - m_i), r_e is 1 or the dropout's factor. Backward,
    with delta_i = <dout_i, out_i> per head: dz_e = a_e (r_e <dout_i, v_j> - delta_i),
    dv_j = sum_e r_e a_e dout_i, (dk_j, dq_i, dw) = sum_e (ds/d(k_j, q_i, w))^T dz_e;
    dv and dk of halo rows go home round by round, unless nobody asks for gradients of v and k, or
    where x travels: then dW = dv^T x + .., see :class:`Arriving`, db and da_k are summed of them.
    By Note [At the sources] rows [<= round, H * D + 4 H] of dout and of what is known of the
    destinations travel instead, and dq of them [<= round, H] goes home.
    At last, of projected scores, dv_j += dk_j a_k + dq_j a_q, da_k = sum_j dk_j v_j, da_q likewise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: Attention,
        value: Tensor,
        key: Tensor | None,
        query: Tensor,
        weight: Tensor | None,
        scores: Sequence[ReferenceType[Tensor] | None],
        key_vector: Tensor | None,
        query_vector: Tensor | None,
        rows: Tensor | None,
        matrix: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        sources = [part.contiguous() for part in (value, key) if part is not None]
        used = query.new_zeros(0) if weight is None else weight
        arriving = None
        if rows is not None and matrix is not None:
            linear = LinearRows(rows, matrix, bias)
            arriving = Arriving.of(linear, key_vector, spec.scores.heads)
            ctx.matrices = arriving.weight, arriving.matrix
        wide, normalizer, kept = attention_forward(spec, sources, query, used, arriving)
        out = wide.to(value.dtype)
        ctx.spec, ctx.kept, ctx.scores = spec, kept, scores
        if not torch.is_inference_mode_enabled():
            ctx.writes = Writes(out)
        kept_value = value if arriving is None else None
        given = (kept_value, key, query, weight, key_vector, query_vector, rows)
        ctx.save_for_backward(*given, *normalizer, out.data)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        value, key, query, weight, *vectors, rows, largest, inverse, out = ctx.saved_tensors
        arriving = None if rows is None else Arriving(rows, *ctx.matrices)
        value = value if arriving is None else arriving.values()
        sources = [part.contiguous() for part in (value, key) if part is not None]
        used = query.new_zeros(0) if weight is None else weight
        normalizer = Normalizer(largest, inverse)
        bias = ctx.writes.bias
        ctx.writes.note()
        if any_rank(ctx.spec.relation.group, ctx.writes.happened):
            out = attention_forward(ctx.spec, sources, query, used, arriving)[0].to(value.dtype)
            bias = None
        wanted = any(ctx.needs_input_grad[1:3])
        queries = [widened(query)] if ctx.spec.scores.kind == ADDITIVE else []
        incoming = Incoming.of(widened(dout), widened(out), normalizer, *queries, bias=bias)
        fits = (out.shape, out.dtype) == (sources[0].shape, widened(sources[0]).dtype)
        place = out.detach() if fits and may_overwrite(out, dout) else None
        del out  # its last use: where autograd does not hold it, its memory is free now
        moves = wanted and arriving is None
        edges = edges_to_compute_at(ctx.spec, sources) if moves else None
        if edges is not None:
            homes, dquery = BackwardAtSources(ctx.spec, edges, sources, incoming, place).run()
            dweight = None
        else:
            passed = Backward(ctx.spec, sources, query, used, incoming, wanted, arriving, place)
            homes, dquery, dweight = passed.run(ctx.kept)
        dvalue, dkey = (*homes, None)[:2] if wanted else (None, None)
        ends: list[Tensor | None] = [dkey, dquery]
        dvectors: list[Tensor | None] = [None, None]
        if dvalue is not None:
            dvectors = _pass_on(dvalue, sources[0], ends, vectors, ctx.scores)
            ends = [d if vector is None else None for d, vector in zip(ends, dvectors, strict=True)]
        inputs = (value, key, query, weight)
        grads = (dvalue, *ends, None if weight is None else dweight)
        typed = [d if d is None else d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]
        dlinear: list[Tensor | None] = [None, None]
        if arriving is not None:
            *dlinear, dvector = arriving.finish(vectors[0])
            dvectors[0] = _sum(dvectors[0], dvector, vectors[0])
        return None, *typed, None, *dvectors, None, *dlinear


def _sum(a: Tensor | None, b: Tensor | None, like: Tensor | None) -> Tensor | None:
    """Of gradients that may be missing, in the shape of what they are of."""
    parts = [part.view_as(like) for part in (a, b) if part is not None and like is not None]
    return sum(parts[1:], parts[0]) if parts else None


def _pass_on(
    dvalue: Tensor,
    value: Tensor,
    dscores: Sequence[Tensor | None],
    vectors: Sequence[Tensor | None],
    scores: Sequence[ReferenceType[Tensor] | None],
) -> list[Tensor | None]:
    """Add gradients of keys and queries to ``dvalue`` where Note [Projected scores] allows it.

    Returns:
        The gradients of the vectors; ``None`` for keys or queries whose gradients are not added.
    """
    found: list[Tensor | None] = [None, None]
    known = zip(dscores, vectors, scores, strict=True)
    chosen = {
        n: (dscore, widened(vector).view(-1))
        for n, (dscore, vector, made) in enumerate(known)
        if dscore is not None and vector is not None and made is not None and made() is None
    }
    if chosen:
        sums = add_projected_grads(dvalue, widened(value), *zip(*chosen.values(), strict=True))
        for n, dvector in zip(chosen, sums, strict=True):
            found[n] = dvector.to(value.dtype).view(vectors[n].shape)  # type: ignore[union-attr]
    return found
