"""Sums and means that read a random share of the remote rows: boundary-node sampling, lossy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import Relation
from sar.edges.shard_store import LOCAL
from sar.errors import NotSupportedError
from sar.kernels import Factors, add_rows, spmm, spmm_add, spmm_into
from sar.ops.first_order import first_order
from sar.ops.keyed import keyed_uniform
from sar.stream import GradientReturn, HaloPlan, Round, fetch

_PAIR = 0x9E3779B97F4A7C15  # spreads pairs of ranks over the seeds


class Sample:
    """Which rows of a halo plan travel this time; both ends of a pair know it without a word.

    Args:
        rate: probability of a row. seed: the same on every rank.

    Attributes:
        plan: the plan with the chosen rows only.
    """

    def __init__(self, plan: HaloPlan, rate: float, seed: int) -> None:
        rank, size = plan.group.rank, plan.group.size
        chosen = [_chosen(plan.send_counts[p], rate, seed, rank, p, size) for p in range(size)]
        self._heard = [_chosen(plan.recv_counts[p], rate, seed, p, rank, size) for p in range(size)]
        sent = [plan.rows_for(peer)[rows.to(plan.device)] for peer, rows in enumerate(chosen)]
        self.plan = plan.thinned(sent, [len(rows) for rows in self._heard])

    def places(self, step: Round) -> Tensor:
        """int64 [chosen] where the rows that come lie among those of a round of the whole plan."""
        found, start = [], 0
        for peer, num in zip(step.sources, step.recv_rows, strict=True):
            found.append(self._heard[peer] + start)
            start += num
        return torch.cat(found).to(self.plan.device)


def _chosen(count: int, rate: float, seed: int, src: int, dst: int, size: int) -> Tensor:
    """int64 places of the chosen ones of ``count`` rows that ``src`` has for ``dst``."""
    pair = (seed + (src * size + dst + 1) * _PAIR) % 2**63
    return (keyed_uniform(torch.arange(count), 1, pair)[:, 0] < rate).nonzero().view(-1)


def sampled_forward(
    relation: Relation, x: Tensor, factors: Factors, policy: Policy, sample: Sample
) -> Tensor:
    """[num_dst, width] sums in the wide dtype of ``x``, remote rows scaled by 1 / rate."""
    plan, order, rate = relation.plan, factors.edge is not None, policy.lossy.boundary_rate
    num_rounds = plan.num_rounds(policy, x.shape[1] * x.element_size())
    stream = fetch(sample.plan, x, sample.plan.rounds(num_rounds), lossy=policy.lossy)
    out = spmm(relation.local(order=order), x, factors)
    shards = relation.shards(num_rounds, order=order)
    for (_, rows), step, shard in zip(stream, plan.rounds(num_rounds), shards, strict=True):
        halo = plan.group.pool.take((step.num_recv, x.shape[1]), x.dtype, x.device).zero_()
        halo.index_copy_(0, sample.places(step), rows.div_(rate))
        spmm_add(out, shard, halo, factors)
        plan.group.pool.give(halo)
    return out


def sampled_backward(
    relation: Relation, dout: Tensor, factors: Factors, policy: Policy, sample: Sample
) -> Tensor:
    """[num_src, width] gradient of the owned rows: the chosen rows' come home, over rate."""
    plan, order, rate = relation.plan, factors.edge is not None, policy.lossy.boundary_rate
    num_rounds = plan.num_rounds(policy, dout.shape[1] * dout.element_size())
    shards = relation.transposed(num_rounds, policy, order=order)

    def local() -> Tensor:
        return spmm(next(relation.transposed(LOCAL, policy, order=order)), dout, factors)

    shape = (dout.shape[1], dout.dtype)
    home = GradientReturn(sample.plan, *shape, local, add_rows, lossy=policy.lossy)
    steps = zip(plan.rounds(num_rounds), sample.plan.rounds(num_rounds), shards, strict=True)
    for step, thin, shard in steps:
        grads = plan.group.pool.take((step.num_recv, dout.shape[1]), dout.dtype, dout.device)
        spmm_into(grads, shard, dout, factors)
        buffer = home.buffer(thin)
        torch.index_select(grads, 0, sample.places(step), out=buffer)
        plan.group.pool.give(grads)
        home.send(thin, buffer.div_(rate))
    return home.finish()


class _SampledAggregate(Function):
    """out_i = s_i (sum over local e of w_e x_j + sum over remote e of w_e b_j x_j / r).

    ========  ======================  =====================================================
    tensor    shape                   owner and lifetime
    ========  ======================  =====================================================
    x, w, s   as in the exact sum     this rank; w and s saved (inputs, not copies)
    b         [remote rows] of 0, 1   drawn from a seed that all ranks know; the places of
                                      its ones are kept, for backward
    halo      [<= round, width]       peers; the rows with b_j = 1, zeros for the others
    ========  ======================  =====================================================

    r = P(b_j = 1), so the mean of out is the exact sum (Wan et al. 2022, arXiv 2203.10983).
    Backward: dx = A^T (s * dout) with the same b_j / r on the rows that are sent home.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        scale: Tensor | None,
        relation: Relation,
        policy: Policy,
        sample: Sample,
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.relation, ctx.policy, ctx.sample = relation, policy, sample
        factors = Factors(edge=weight, row=scale)
        return sampled_forward(relation, x, factors, policy, sample).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale = ctx.saved_tensors
        dout = dout.contiguous()
        if scale is not None:
            dout = (dout * scale.unsqueeze(1)).to(dout.dtype)
        factors = Factors(edge=weight)
        dx = sampled_backward(ctx.relation, dout, factors, ctx.policy, ctx.sample)
        return dx.to(dout.dtype), None, None, None, None, None


def sampled_aggregate(
    relation: Relation, x: Tensor, weight: Tensor | None, scale: Tensor | None, policy: Policy
) -> Tensor:
    """As :func:`sar.ops.aggregate.aggregate` of flat rows, with ``policy.lossy.boundary_rate``."""
    group = relation.group
    sample = Sample(relation.plan, policy.lossy.boundary_rate, group.seeds.draw(group))
    return _SampledAggregate.apply(x, weight, scale, relation, policy, sample)


def refuse_sampling(policy: Policy, what: str) -> None:
    """Raise ``NotSupportedError`` where a computation has no unbiased sample of its rows."""
    if policy.lossy.boundary_rate < 1 and torch.is_grad_enabled():
        raise NotSupportedError(
            f"boundary_rate: got {policy.lossy.boundary_rate} and {what}, expected 1: only sums "
            "and means of source rows can be sampled"
        )
