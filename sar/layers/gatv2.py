"""Graph attention with mixed scores (arXiv 2105.14491) as one layer: projections and sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from sar.config import Policy
from sar.edges import Relation
from sar.kernels.attention import Scores
from sar.kernels.attention_loops import MIXED
from sar.layers.attending import AttentionLayer, Call, Done, Parameters, finish, grad_of_rows, like
from sar.ops.attention_passes import Attention, agreed

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

    Per head a_ij is the softmax over j of <attn, lrelu(v_j + q_i)>, dropped out or not. Messages
    are those of attention over rows of v, unless ``input_travels``.

    Args:
        src: W and c, which make v.
        dst: the same of q; ``None``: q = v.
        attn: H * D numbers of any shape.
        x, slope, dropout, input_travels, donate: as for :func:`sar.layers.gat.gat`.

    Returns [num_dst, H, D]; 0 where no edge ends.
    """
    if relation.group.meter.notes is not None:
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
    result = AttentionLayer.apply(call, _Parameters, x, *src, attn, *(dst or (None, None)))
    return finish(result, None, call).view(relation.num_dst, heads, width)


@dataclass(frozen=True)
class _Parameters(Parameters):
    """v = x W^T + c, which are keys, too, q = x V^T + d or v; z_e = <w, lrelu(v_j + q_i)> per head.

    ======  ====================  ==============================================
    tensor  shape                 owner and lifetime
    ======  ====================  ==============================================
    W, c    [H * D, F], [H * D]   replicated; copies are held
    w       H * D numbers         replicated; a copy is held
    V, d    as W and c, or none   replicated; copies are held
    ======  ====================  ==============================================

    Backward: t_e = lrelu' w dz_e give dv_j += t_e, dq_i = sum_e t_e, dw = sum_e lrelu(v_j + q_i)
    dz_e. Where there is no V, dv_i += dq_i. Then dW = dv^T x, dV = dq^T x, dc and dd sum rows,
    dx = dv W + dq V.
    """

    weight: Tensor
    bias: Tensor | None
    attn: Tensor
    dst_weight: Tensor | None
    dst_bias: Tensor | None

    num_source = 2
    num_saved = 0

    def make(self, spec: Attention, x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        value, num_dst = F.linear(x, self.weight, self.bias), spec.relation.num_dst
        if self.dst_weight is None:
            query = value[:num_dst]
        else:
            query = F.linear(x[:num_dst], self.dst_weight, self.dst_bias)
        return [value], query, self.attn.view(-1)

    def projection(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.weight, self.bias, None

    def grads(self, done: Done) -> tuple[Tensor | None, ...]:
        x, dtype, needs, (dvalue,) = done.x, done.x.dtype, done.needs, done.homes
        dquery, dattn = done.dquery, done.dweight
        if self.dst_weight is None:
            dvalue[: len(dquery)] += dquery
        dbias, ddst_bias = (
            wide.sum(0).to(dtype) if asked else None
            for wide, asked in ((dvalue, needs[2]), (dquery, needs[5]))
        )  # fmt: skip
        dvalue, dquery, rows = dvalue.to(dtype), dquery.to(dtype), x.detach()
        dweight = dvalue.t() @ rows if needs[1] else None
        ddst_weight = dquery.t() @ rows[: len(dquery)] if needs[4] else None
        dweight, dbias = done.sources.with_shares(dweight, dbias)
        value = done.sources.rows()[0]
        dx = grad_of_rows(x, dvalue, self.weight, value, done.gives) if needs[0] else None
        if dx is not None and self.dst_weight is not None:
            dx[: len(dquery)].addmm_(dquery, self.dst_weight)
        dattn = None if dattn is None else dattn.to(dtype).view_as(self.attn)
        return dx, dweight, dbias, dattn, ddst_weight, ddst_bias
