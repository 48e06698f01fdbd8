"""Maximum and minimum of messages at the sources of their edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import wide_dtype
from sar.ops.message_blocks import Inputs, Messages, Rows
from sar.ops.push import push_largest, push_sum


def push_extreme(
    relation: Relation,
    messages: Messages,
    policy: Policy,
    inputs: Inputs,
    like: Tensor,
    *,
    largest: bool,
) -> Tensor:
    """Largest or smallest message of all edges that start in each owned source row; collective.

    out_j = sum over the edges e out of j of [e = w_j] m_e, where w_j is the edge with the extreme
    message, of equal ones that with the smallest of ``relation.keys``: a constant to the gradient,
    which is the winner's alone. Three streams forward: extreme, winner, message.

    Args:
        like: the message on some edges: trailing shape and floating point dtype.

    Returns:
        [num_src, ...]; 0 for a row without edges.

    Raises ``TypeError`` for messages that are not floating point.
    """
    if not like.is_floating_point():
        raise TypeError(f"messages: got {like.dtype}, expected a floating point dtype to reduce")
    of, sign = messages.function, 1 if largest else -1
    wide = like.to(wide_dtype(like.dtype))

    def run(
        function: Callable[[Rows, Rows, Rows, Tensor], Tensor], src: list[Tensor], like: Tensor
    ) -> Tensor:
        given = inputs._replace(src=[*src, *inputs.src])
        moved = replace(messages, function=lambda *rows: [function(*rows)])
        return push_largest(relation, moved, policy, given, like).view(-1, *like.shape[1:])

    def signed(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Tensor:
        return sign * of(src, dst, edge, position)[0].to(wide.dtype)

    def name_of_winner(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Tensor:
        values, best = signed(src[1:], dst, edge, position), src[0]
        won = (values == best) | (values.isnan() & best.isnan())
        return torch.where(won, _names(relation, position, values), -math.inf)

    def winner(src: Rows, dst: Rows, edge: Rows, position: Tensor) -> Rows:
        (values,) = of(src[1:], dst, edge, position)
        return [torch.where(_names(relation, position, values) == src[0], values, 0)]

    with torch.no_grad():
        best = run(signed, [], wide)
        names = run(name_of_winner, [best], like.double())
        del best
    chosen = replace(messages, function=winner, linear_in_src=False)
    given = inputs._replace(src=[names, *inputs.src])
    return push_sum(relation, chosen, policy, given, wide).to(like.dtype)


def _names(relation: Relation, position: Tensor, values: Tensor) -> Tensor:
    """float64 [e, 1, ...]: less the larger the edge's key is; exact below 2^53."""
    keys = relation.keys.index_select(0, position)
    return keys.double().neg_().view(-1, *[1] * (values.dim() - 1))
