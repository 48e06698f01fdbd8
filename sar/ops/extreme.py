"""Maximum and minimum of source rows over edges; no row of an edge is ever made."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import ExtremeReducer, add_rows, add_to_winners
from sar.ops.first_order import first_order
from sar.stream import GradientMessages, GradientReturn, Pass


def extreme_of_rows(relation: Relation, x: Tensor, policy: Policy, *, largest: bool) -> Tensor:
    """The largest or smallest source row, number by number, of the edges that end in each row.

    Collective, as is its backward pass. Of equal numbers the edge with the smallest position wins,
    and gets the gradient alone; NaN wins over every number.

    Args:
        x: [num_src, ...] owned rows, that there is a kernel ``extremes`` for.

    Returns:
        [num_dst, ...]; 0 where no edge ends.
    """
    flat = x.reshape(len(x), math.prod(x.shape[1:])).contiguous()
    out = _Extreme.apply(flat, relation, policy, largest)
    return out.view(relation.num_dst, *x.shape[1:])


class _Extreme(Function):
    """out_id = the largest (smallest) x_jd over the edges e = (j -> i), of edge w_id.

    ========  ===================  =========================================================
    tensor    shape                owner and lifetime
    ========  ===================  =========================================================
    x         [num_src, width]     this rank; not saved
    halo      [<= round, width]    peers; fetched per round, compared, dropped
    w         [num_dst, width]     this rank; saved: int32 positions of edges
    out       [num_dst, width]     this rank; not saved
    dx        [num_src, width]     this rank; and [<= round, width] on its way to peers
    ========  ===================  =========================================================

    Forward: as above. Backward: dx_jd = sum over the edges e = (j -> i) of [e = w_id] dout_id,
    where gradients of peers' rows are computed here, round by round, and sent home; no row is
    fetched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, relation: Relation, policy: Policy, largest: bool) -> Tensor:
        running = ExtremeReducer(largest, relation.num_dst, x)
        for step in Pass(relation, policy, x, order=True):
            running.add_shard(step.shard, step.rows)
        ctx.save_for_backward(running.edge)
        ctx.relation, ctx.policy = relation, policy
        return running.result()

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (winner,) = ctx.saved_tensors
        relation, policy, plan = ctx.relation, ctx.policy, ctx.relation.plan
        num_rounds = plan.num_rounds(policy, dout.shape[1] * dout.element_size())

        def local() -> Tensor:
            dx = dout.new_zeros((relation.num_src, dout.shape[1]))
            add_to_winners(dx, relation.local(order=True), winner, dout)
            return dx

        messages = GradientMessages(plan, dout.shape[1], dout.dtype, add_rows)
        home = GradientReturn(messages, local)
        shards = relation.shards(num_rounds, order=True)
        each = home.each(plan.rounds(num_rounds))
        for (_, grads), shard in zip(each, shards, strict=True):
            add_to_winners(grads.zero_(), shard, winner, dout)
        return home.finish(), None, None, None
