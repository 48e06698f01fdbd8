"""The mean and the sum over the nodes of all ranks, from which a loss is made."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.comm import Group, current_group
from sar.kernels.jit import untraced
from sar.nn.loose import look_behind_loss
from sar.ops.reduce import mean_of_rows, sum_of_rows
from sar.tracing.lazy import eager


@untraced
def global_mean(
    values: Tensor, mask: Tensor | None = None, *, group: Group | None = None
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
        group: ranks to average over; the current group by default.

    Returns:
        A scalar, equal on every rank, float32 for 16-bit types, else of ``values``' type.

    Raises, on every rank:
        TypeError: ``values`` is not float or ``mask`` neither bool nor int64.
        ValueError: the mask does not fit, or no rank has a value to average.
    """
    return mean_of_rows(*_checked(values, mask, group))


@untraced
def global_sum(
    values: Tensor, mask: Tensor | None = None, *, group: Group | None = None
) -> Tensor:
    """Sum of ``values`` over the rows of all ranks; collective.

    For a loss with a divisor of its own. The gradient of each value is 1, this rank's share, for
    :func:`sar.nn.gather_grads` to sum. Arguments and result are those of :func:`global_mean`; where
    no rank has a value the sum is 0.
    """
    return sum_of_rows(*_checked(values, mask, group))


def _checked(
    values: Tensor, mask: Tensor | None, group: Group | None
) -> tuple[Tensor, Group, Exception | None]:
    """The values that count, the ranks, and this rank's reason to give up."""
    group, values = group or current_group(), eager(values)
    look_behind_loss(values, group)
    error = _problem(values, mask)
    if error is None and mask is not None:
        values = _chosen(values, mask.to(values.device))
    return values, group, error


def _chosen(values: Tensor, mask: Tensor) -> Tensor:
    if mask.dim() == 2:
        return values.masked_select(mask)
    rows = mask.nonzero()[:, 0] if mask.dtype == torch.bool else mask
    return values.index_select(0, rows)


def _problem(values: Tensor, mask: Tensor | None) -> Exception | None:
    if not isinstance(values, Tensor):
        return TypeError(f"values: got {type(values).__name__}, expected a tensor")
    if not values.is_floating_point():
        return TypeError(f"values: got {values.dtype}, expected a floating point type")
    if values.dim() not in (1, 2):
        return ValueError(f"values: got shape {tuple(values.shape)}, expected [N] or [N, C]")
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        return TypeError(f"mask: got {type(mask).__name__}, expected a tensor")
    if mask.dtype not in (torch.bool, torch.int64):
        return TypeError(f"mask: got {mask.dtype}, expected bool or int64 indices")
    if mask.dtype == torch.bool:
        if mask.shape not in (values.shape, values.shape[:1]):
            shapes = sorted({tuple(values.shape[:1]), tuple(values.shape)})
            expected = " or ".join(map(str, shapes))
            return ValueError(f"mask: got shape {tuple(mask.shape)}, expected {expected}")
    elif mask.dim() != 1:
        return ValueError(f"mask: got shape {tuple(mask.shape)}, expected a vector of indices")
    elif len(mask) and not 0 <= int(mask.min()) <= int(mask.max()) < len(values):
        return ValueError(
            f"mask: got indices from {int(mask.min())} to {int(mask.max())}, "
            f"expected 0 to {len(values) - 1}"
        )
    return None
