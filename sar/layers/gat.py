"""Graph attention (arXiv 1710.10903) as one layer: projection, scores, weighted sum and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from sar.config import Policy
from sar.edges import Relation
from sar.kernels.attention import Scores, add_projected_grads
from sar.kernels.attention import head_sums as sums_of_heads
from sar.kernels.attention_loops import ADDITIVE
from sar.layers.attending import AttentionLayer, Call, Done, Parameters, finish, grad_of_rows, like
from sar.ops.attention_passes import Attention, agreed, widened


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
    Messages are those of attention over rows of v and their scores, unless ``input_travels``.

    Args:
        x: [num_src, F] owned source rows, on the processor; the first num_dst of them are the
            destinations. float32, float64 or bfloat16, as all that follows.
        weight, fc_bias: W [H * D, F] and c [H * D], or no c.
        attn_src, attn_dst, bias: H * D numbers each, of any shape; or no bias b.
        dropout: (seed, probability) of the weights a; ``None`` for none.
        input_travels: the answer of :func:`sar.layers.attending.input_travels`.
        donate: the gradient of ``x`` may take its memory, where it is no leaf and no view. That of
            the result is free by then, unless somebody reads it.

    Returns [num_dst, H, D]; ``bias`` alone where no edge ends.
    """
    if relation.group.meter.notes is not None:
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
    result = AttentionLayer.apply(call, _Parameters, x, weight, fc_bias, attn_src, attn_dst)
    out = finish(result, None if bias is None else bias.reshape(-1), call)
    return out.view(relation.num_dst, heads, width)


@dataclass(frozen=True)
class _Parameters(Parameters):
    """v = x W^T + c, k_j = <a_k, v_j> and q_i = <a_q, v_i> per head; z_e = lrelu(k_j + q_i).

    ======  ====================  ==============================================
    tensor  shape                 owner and lifetime
    ======  ====================  ==============================================
    W, c    [H * D, F], [H * D]   replicated; copies are held
    a_k     H * D numbers         replicated; saved, and a copy is held
    a_q     H * D numbers         replicated; like a_k
    ======  ====================  ==============================================

    Backward: dk_j and dq_i sum lrelu' dz_e, dv_j += dk_j a_k + dq_j a_q, da_k = sum_j dk_j v_j,
    da_q likewise, dW = dv^T x, dc = sum_j dv_j, dx = dv W.
    """

    weight: Tensor
    fc_bias: Tensor | None
    attn_src: Tensor
    attn_dst: Tensor

    num_source = 3
    num_saved = 2

    def make(self, spec: Attention, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        value = F.linear(x, self.weight, self.fc_bias)
        rows = widened(value).view(len(x), spec.scores.heads, spec.scores.width)
        key = sums_of_heads(rows, widened(self.attn_src))
        query = sums_of_heads(rows[: spec.relation.num_dst], widened(self.attn_dst))
        return [value, key.to(x.dtype)], query.to(x.dtype), query.new_zeros(0)

    def projection(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.fc_bias, self.attn_src

    def grads(self, done: Done) -> tuple[Tensor | None, ...]:
        x, dtype, (dvalue, dkey) = done.x, done.x.dtype, done.homes
        value = done.sources.rows()[0]
        dscores = [dkey, F.pad(done.dquery, (0, 0, 0, len(dkey) - len(done.dquery)))]
        vectors = [widened(vector).view(-1) for vector in done.saved]
        dvectors = list(add_projected_grads(dvalue, widened(value), dscores, vectors))
        dfc_bias = dvalue.sum(0).to(dtype) if done.needs[2] else None
        dvalue = dvalue.to(dtype)
        dweight = dvalue.t() @ x.detach() if done.needs[1] else None
        shared = done.sources.with_shares(dweight, dfc_bias, dvectors[0])
        dx = grad_of_rows(x, dvalue, self.weight, value, done.gives) if done.needs[0] else None
        dattn = zip((shared[2], dvectors[1]), done.saved, strict=True)
        return dx, *shared[:2], *[d.to(dtype).view_as(a) for d, a in dattn]
