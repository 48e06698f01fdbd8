"""Graph attention (arXiv 1710.10903) as one layer: projection, scores, weighted sum and bias."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges import Relation
from sar.kernels.attention import Incoming, Normalizer, Scores, add_projected_grads, deltas
from sar.kernels.attention import head_sums as sums_of_heads
from sar.kernels.attention_loops import ADDITIVE
from sar.layers.attending import Arriving, Call, copies, finish, grad_of_rows, like
from sar.ops.attention import attention_backward
from sar.ops.attention_passes import Attention, agreed, attention_forward, widened
from sar.ops.saving import any_rank, first_order


def gat(
    relation: Relation,
    x: Tensor,
    weight: Tensor,
    attn_src: Tensor,
    attn_dst: Tensor,
    bias: Tensor | None,
    policy: Policy,
    *,
    heads: int,
    slope: float,
    fc_bias: Tensor | None = None,
    dropout: tuple[int, float] | None = None,
    input_travels: bool = False,
    donate: bool = False,
) -> Tensor:
    """out_i = sum over edges (j -> i) of a_ij v_j + b with v = x W^T + c; collective.

    Per head a_ij is the softmax over j of lrelu(<a_src, v_j> + <a_dst, v_i>), dropped out or not.
    What the ranks send is what attention sends over rows of v and their scores, unless
    ``input_travels``.

    Args:
        x: [num_src, F] owned source rows, on the processor; the first num_dst of them are the
            destinations. float32, float64 or bfloat16, as all that follows.
        weight, fc_bias: W [H * D, F] and c [H * D], or no c.
        attn_src, attn_dst: H * D numbers each, of any shape.
        bias: H * D numbers b of any shape, or none.
        slope: of lrelu.
        dropout: (seed, probability) of the weights a; ``None`` for none.
        input_travels: what :func:`sar.layers.attending.input_travels` said.
        donate: the gradient of ``x`` may take its memory, where it is no leaf and no view. That of
            the result is free by then, unless somebody reads it.

    Returns:
        [num_dst, H, D]; ``bias`` alone where no edge ends.
    """
    relation.group.meter.tell("fused")
    width = weight.shape[0] // heads
    spec = Attention(relation, policy, Scores(ADDITIVE, heads, width, slope=slope), dropout)
    made_of = [x, weight, fc_bias]
    read = {
        "values": like(x, heads * width, made_of),
        "keys": like(x, heads, [*made_of, attn_src]),
        "queries": like(x, heads, [*made_of, attn_dst]),
    }
    call = Call(agreed(spec, read), input_travels, donate)
    result = _Gat.apply(call, x, weight, fc_bias, attn_src, attn_dst)
    out = finish(result, None if bias is None else bias.reshape(-1), call)
    return out.view(relation.num_dst, heads, width)


class _Parameters(NamedTuple):
    """What makes values and scores: copies, as backward makes them of the same numbers again."""

    weight: Tensor
    fc_bias: Tensor | None
    attn_src: Tensor
    attn_dst: Tensor

    def make(self, spec: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """v [num_src, H * D], k [num_src, H], q [num_dst, H] of the owned rows."""
        value = F.linear(x, self.weight, self.fc_bias)
        rows = widened(value).view(len(x), spec.scores.heads, spec.scores.width)
        key = sums_of_heads(rows, widened(self.attn_src))
        query = sums_of_heads(rows[: spec.relation.num_dst], widened(self.attn_dst))
        return value, key.to(x.dtype), query.to(x.dtype)

    def arriving(self, call: Call, x: Tensor) -> Arriving | None:
        """What makes them of the rows of others, where x travels."""
        if not call.input_travels:
            return None
        heads = call.spec.scores.heads
        return Arriving(x, self.weight, self.fc_bias, heads, self.attn_src)


class _Gat(Function):
    """o_i = sum over edges e = (j -> i) of r_e a_e v_j, a_e = exp(z_e - m_i) / s_i.

    ==========  =====================  =======================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  =======================================================
    x           [num_src, F]           this rank; saved (an input). Donated and of another width
                                       than v it becomes dx
    W, c        [H * D, F], [H * D]    replicated; copies are held
    a_k, a_q    H * D numbers each     replicated; saved, and copies are held
    v           [num_src, H * D]       this rank; made in forward and again in backward, where dx
                                       takes its place if it is as wide
    k, q        [.., H]                this rank; like v
    halo        [<= round, H (D + 1)]  peers; fetched per round in forward and again in backward
                                       (kept when policy.rematerialize is off); [<= round, F] where
                                       x travels, see Note [Projected on arrival], in files where
                                       Note [Constant halo] says so
    m, 1 / s    [num_dst, H] each      this rank; saved
    o           [num_dst, H * D]       this rank; not saved here, see Note [Result first]
    dv, dk, dq  as v, k, q             this rank; in backward
    z, a, r     one chunk of edges     recomputed where they are used, never stored
    ==========  =====================  =======================================================

    z_e = lrelu(k_j + q_i), k_j = <a_k, v_j>, q_i = <a_q, v_i> per head, v = x W^T + c,
    m_i = max_e z_e, s_i = sum_e exp(z_e - m_i), r_e is 1 or the dropout's factor. Backward, with
    delta_i = <do_i, o_i>: dz_e = a_e (r_e <do_i, v_j> - delta_i), dv_j = sum_e r_e a_e do_i,
    dk_j and dq_i sum lrelu' dz_e; those of halo rows go home round by round, or by Note [At the
    sources] rows [<= round, H (D + 4)] of do and of what is known of the destinations travel and dq
    goes home. Then dv_j += dk_j a_k + dq_j a_q, da_k = sum_j dk_j v_j, da_q likewise, dW = dv^T x,
    dc = sum_j dv_j, dx = dv W; where x travels, :class:`Arriving` adds what halo rows bring to W,
    c and a_k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        x: Tensor,
        weight: Tensor,
        fc_bias: Tensor | None,
        attn_src: Tensor,
        attn_dst: Tensor,
    ) -> Tensor:
        used = _Parameters(*copies(weight, fc_bias, attn_src, attn_dst))  # type: ignore[arg-type]
        value, key, query = used.make(call.spec, x.detach())
        made = used.arriving(call, x)
        out, normalizer, kept = attention_forward(
            call.spec, [value, key], query, query.new_zeros(0), made
        )
        ctx.call, ctx.used, ctx.kept = call, used, kept
        ctx.save_for_backward(x, attn_src, attn_dst, *normalizer)
        return out.to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, attn_src, attn_dst, largest, inverse = ctx.saved_tensors
        call, used, needs = ctx.call, ctx.used, ctx.needs_input_grad
        spec, made = call.spec, used.arriving(call, x)
        value, key, query = used.make(spec, x.detach())
        delta = call.take_delta()
        dout, no_weight = widened(dout), query.new_zeros(0)
        if any_rank(spec.relation.group, call.is_written):
            out = attention_forward(spec, [value, key], query, no_weight, made)[0]
            delta = deltas(dout, out, spec.scores.heads)
        incoming = Incoming.of(dout, Normalizer(largest, inverse), delta, widened(query))
        del dout, delta
        (dvalue, dkey), dquery, _ = attention_backward(
            spec, [value, key], query, no_weight, incoming, any(needs[1:5]), ctx.kept, made,
        )  # fmt: skip
        del incoming
        dscores = [dkey, F.pad(dquery, (0, 0, 0, len(dkey) - len(dquery)))]
        vectors = [widened(vector).view(-1) for vector in (attn_src, attn_dst)]
        dvectors = list(add_projected_grads(dvalue, widened(value), dscores, vectors))
        dfc_bias = dvalue.sum(0).to(x.dtype) if needs[3] else None
        dvalue = dvalue.to(x.dtype)
        dweight = dvalue.t() @ x.detach() if needs[2] else None
        if made is not None:
            others = made.finish()
            dweight = None if dweight is None else dweight + others[0]
            dfc_bias = None if dfc_bias is None else dfc_bias + others[1]
            dvectors[0] = dvectors[0] + others[2]
        dx = grad_of_rows(x, dvalue, used.weight, value, call.gives()) if needs[1] else None
        given = (attn_src, attn_dst)
        dattn = [d.to(x.dtype).view_as(a) for d, a in zip(dvectors, given, strict=True)]
        return None, dx, dweight, dfc_bias, *dattn
