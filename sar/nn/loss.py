"""The mean and the sum over the nodes of all ranks, from which a loss is made."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.kernels import wide_dtype
from sar.kernels.jit import untraced
from sar.nn.chosen import choose, problem_of_values, problem_of_weights
from sar.nn.loose import look_behind_loss
from sar.ops.readout import mean_of_rows, sum_of_rows
from sar.tracing.lazy import eager


@untraced
def global_mean(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    group: Group | None = None,
) -> Tensor:
    """Mean of ``values`` over the rows of all ranks; collective.

    The gradient that flows back is this rank's share (1 / the number of values of all ranks), so
    parameter gradients are *summed* over ranks afterwards, by :func:`sar.nn.gather_grads`.

    Args:
        values: [N] or [N, C], float; N may differ between ranks and be 0. Of an edge tensor the
            values of the local edges, which are then held in memory.
        mask: which rows count: bool [N] (or bool [N, C] to choose single values), or int64
            indices of rows. ``None`` takes all. Values outside of the mask never matter, also NaN;
            but where the function that *made* them has a NaN derivative (a NaN label), select the
            rows before it: ``global_mean(loss(logits[rows], labels[rows]))``.
        weight: [N], or as ``values``: how much each counts, without a gradient. The result is the
            sum of weighted values over the sum of weights.
        group: ranks to average over; the current group by default.

    Returns:
        A scalar, equal on every rank, float32 for 16-bit types, else of ``values``' type.

    Raises, on every rank:
        TypeError: ``values`` is not float or ``mask`` neither bool nor int64.
        ValueError: mask or weight do not fit, no rank has a value, or the weights' sum is 0.
    """
    group, values = group or current_group(), eager(values)
    look_behind_loss(values, group)
    error = problem_of_values(values, mask)
    if error is None:
        error = problem_of_weights(values.shape, values.shape[:1], weight=weight)
    if error is not None or weight is None:
        return mean_of_rows(values if error else choose(values, mask), group, error)
    weight = weight.to(values.device, wide_dtype(values.dtype))
    if weight.dim() < values.dim():
        weight = weight[:, None].expand_as(values)
    weight = choose(weight, mask)
    total = float(weight.sum(dtype=torch.float64))
    return mean_of_rows(choose(values, mask) * weight, group, divisor=total)


@untraced
def global_sum(values: Tensor, mask: Tensor | None = None, *, group: Group | None = None) -> Tensor:
    """Sum of ``values`` over the rows of all ranks; collective.

    For a loss with a divisor of its own. The gradient of each value is 1, this rank's share, for
    :func:`sar.nn.gather_grads` to sum. Arguments and result are those of :func:`global_mean`; where
    no rank has a value the sum is 0.
    """
    group, values = group or current_group(), eager(values)
    look_behind_loss(values, group)
    error = problem_of_values(values, mask)
    return sum_of_rows(values if error else choose(values, mask), group, error)
