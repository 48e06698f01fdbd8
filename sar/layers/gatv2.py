"""Graph attention with mixed scores (arXiv 2105.14491) as one layer: projections and sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges import Relation
from sar.kernels.attention import Incoming, Normalizer, Scores, deltas
from sar.kernels.attention_loops import MIXED
from sar.layers.attending import Arriving, Call, copies, finish, grad_of_rows, like
from sar.ops.attention import attention_backward
from sar.ops.attention_passes import Attention, agreed, attention_forward, widened
from sar.ops.saving import any_rank, first_order

Projection = tuple[Tensor, Tensor | None]  # W [H * D, F] and c [H * D] of x W^T + c


def gatv2(
    relation: Relation,
    x: Tensor,
    src: Projection,
    dst: Projection | None,
    attn: Tensor,
    policy: Policy,
    *,
    heads: int,
    slope: float,
    dropout: tuple[int, float] | None = None,
    input_travels: bool = False,
    donate: bool = False,
) -> Tensor:
    """out_i = sum over edges (j -> i) of a_ij v_j with v = x W^T + c; collective.

    Per head a_ij is the softmax over j of <attn, lrelu(v_j + q_i)>, dropped out or not. What the
    ranks send is what attention sends over rows of v, unless ``input_travels``.

    Args:
        x: [num_src, F] owned source rows, on the processor; the first num_dst of them are the
            destinations. float32, float64 or bfloat16, as all that follows.
        src: W and c, which make v.
        dst: the same of q; ``None``: q = v.
        attn: H * D numbers of any shape.
        slope, dropout, input_travels, donate: as for :func:`sar.layers.gat.gat`.

    Returns:
        [num_dst, H, D]; 0 where no edge ends.
    """
    relation.group.meter.tell("fused")
    width = src[0].shape[0] // heads
    spec = Attention(relation, policy, Scores(MIXED, heads, width, slope=slope), dropout)
    read = {
        "values": like(x, heads * width, [x, *src]),
        "keys": None,
        "queries": like(x, heads * width, [x, *(dst or src)]),
        "weight": attn.view(-1),
    }
    call = Call(agreed(spec, read), input_travels, donate)
    result = _GatV2.apply(call, x, attn, *src, *(dst or (None, None)))
    return finish(result, None, call).view(relation.num_dst, heads, width)


class _Parameters(NamedTuple):
    """What makes values and queries."""

    attn: Tensor
    weight: Tensor
    bias: Tensor | None
    dst_weight: Tensor | None
    dst_bias: Tensor | None

    def make(self, spec: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
        """v [num_src, H * D], q [num_dst, H * D] of the owned rows."""
        value, num_dst = F.linear(x, self.weight, self.bias), spec.relation.num_dst
        if self.dst_weight is None:
            return value, value[:num_dst]
        return value, F.linear(x[:num_dst], self.dst_weight, self.dst_bias)

    def arriving(self, call: Call, x: Tensor) -> Arriving | None:
        """What makes values of the rows of others, where x travels."""
        if not call.input_travels:
            return None
        return Arriving(x, self.weight, self.bias, call.spec.scores.heads, None)


class _GatV2(Function):
    """o_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  =====================  =======================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  =======================================================
    x           [num_src, F]           this rank; saved (an input). Donated and of another width
                                       than v it becomes dx
    W, c        [H * D, F], [H * D]    replicated; copies are held
    V, d        the same, or none      replicated; like W and c
    w           H * D numbers          replicated; a copy is held
    v           [num_src, H * D]       this rank; made in forward and again in backward, where dx
                                       takes its place if it is as wide
    q           [num_dst, H * D]       this rank; like v; the first rows of v where there is no V
    halo        [<= round, H * D]      peers; fetched per round in forward and again in backward
                                       (kept when policy.rematerialize is off); [<= round, F] where
                                       x travels, see Note [Projected on arrival], in files where
                                       Note [Constant halo] says so
    m, 1 / s    [num_dst, H] each      this rank; saved
    o           [num_dst, H * D]       this rank; not saved here, see Note [Result first]
    dv, dq      as v, q                this rank; in backward
    z, a, r     one chunk of edges     recomputed where they are used, never stored
    ==========  =====================  =======================================================

    z_e = <w, lrelu(v_j + q_i)> per head, v = x W^T + c, q = x V^T + d or v, m_i = max_e z_e,
    s_i = sum_e exp(z_e - m_i), r_e is 1 or the dropout's factor. Backward, with
    delta_i = <do_i, o_i>: dz_e = a_e (r_e <do_i, v_j> - delta_i) and t_e = lrelu' w dz_e give
    dv_j = sum_e r_e a_e do_i + t_e, dq_i = sum_e t_e, dw = sum_e lrelu(v_j + q_i) dz_e; dv of halo
    rows goes home round by round. Where there is no V, dv_i += dq_i. Then dW = dv^T x, dV = dq^T x,
    dc and dd sum rows, dx = dv W + dq V; where x travels, :class:`Arriving` adds what halo rows
    bring to W and c.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        x: Tensor,
        attn: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dst_weight: Tensor | None,
        dst_bias: Tensor | None,
    ) -> Tensor:
        given = copies(attn.view(-1), weight, bias, dst_weight, dst_bias)
        used = _Parameters(*given)  # type: ignore[arg-type]
        value, query = used.make(call.spec, x.detach())
        made = used.arriving(call, x)
        out, normalizer, kept = attention_forward(call.spec, [value], query, used.attn, made)
        ctx.call, ctx.used, ctx.kept, ctx.shape = call, used, kept, attn.shape
        ctx.save_for_backward(x, *normalizer)
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, largest, inverse = ctx.saved_tensors
        call, used, needs = ctx.call, ctx.used, ctx.needs_input_grad
        spec, made = call.spec, used.arriving(call, x)
        value, query = used.make(spec, x.detach())
        delta = call.take_delta()
        dout = widened(dout)
        if any_rank(spec.relation.group, call.is_written):
            out = attention_forward(spec, [value], query, used.attn, made)[0]
            delta = deltas(dout, out, spec.scores.heads)
        incoming = Incoming.of(dout, Normalizer(largest, inverse), delta)
        (dvalue,), dquery, dattn = attention_backward(
            spec, [value], query, used.attn, incoming, needs[1] or needs[3] or needs[4], ctx.kept,
            made,
        )  # fmt: skip
        del incoming, dout, delta, query
        if used.dst_weight is None:
            dvalue[: len(dquery)] += dquery
        dbias, ddst_bias = (
            wide.sum(0).to(x.dtype) if asked else None
            for wide, asked in ((dvalue, needs[4]), (dquery, needs[6]))
        )  # fmt: skip
        dvalue, dquery = dvalue.to(x.dtype), dquery.to(x.dtype)
        rows = x.detach()
        dweight = dvalue.t() @ rows if needs[3] else None
        ddst_weight = dquery.t() @ rows[: len(dquery)] if needs[5] else None
        if made is not None:
            others = made.finish()
            dweight = None if dweight is None else dweight + others[0]
            dbias = None if dbias is None else dbias + others[1]
        dx = grad_of_rows(x, dvalue, used.weight, value, call.gives()) if needs[1] else None
        if dx is not None and used.dst_weight is not None:
            dx[: len(dquery)].addmm_(dquery, used.dst_weight)
        dweight_of_scores = None if dattn is None else dattn.to(x.dtype).view(ctx.shape)
        return None, dx, dweight_of_scores, dweight, dbias, ddst_weight, ddst_bias
