"""Losses of ``torch.nn.functional`` whose mean is over the rows of all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sar.comm import Group, current_group
from sar.kernels import wide_dtype
from sar.kernels.jit import untraced
from sar.nn.chosen import choose, problem_of_shape, problem_of_values, problem_of_weights
from sar.nn.loose import look_behind_loss
from sar.ops.readout import mean_of_rows
from sar.tracing.lazy import eager


@untraced
def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    group: Group | None = None,
) -> Tensor:
    """``F.cross_entropy`` of the rows of all ranks; collective.

    Value and gradient are those of torch on the whole graph; what flows back is this rank's share,
    for :func:`sar.gather_grads` to sum, as of :func:`sar.global_mean`.

    Args:
        logits: [N, C] float; N may differ between ranks and be 0.
        labels: [N] int classes, or [N, C] float probabilities. Nothing outside of the mask matters.
        mask: which rows count: bool [N] or int64 indices; ``None`` takes all.
        weight: [C] of the classes, equal on all ranks, without a gradient. As torch does, the sum
            of losses is divided by the weights of the labels, but for probabilities by the rows.
        ignore_index: a label of rows that do not count.
        label_smoothing: in [0, 1]: how much of each target is spread evenly over all classes.
        group: ranks that share the loss; the current group by default.

    Returns:
        A scalar, equal on every rank, float32 for 16-bit types, else of ``logits``' type.

    Raises, on every rank:
        TypeError: logits are not float, or something else is no tensor.
        ValueError: a shape does not fit, a label is no class, or no rank has a row that counts.
    """
    group, logits = group or current_group(), eager(logits)
    look_behind_loss(logits, group)
    error = _problem_of_classes(logits, labels, mask, weight, ignore_index)
    if error is not None:
        return mean_of_rows(logits, group, error)
    rows = choose(logits, mask).to(wide_dtype(logits.dtype))
    labels = choose(labels.to(rows.device), mask)
    labels = labels.to(rows.dtype if labels.is_floating_point() else torch.int64)
    weight = None if weight is None else weight.to(rows)
    losses = F.cross_entropy(
        rows,
        labels,
        weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    if labels.is_floating_point():
        total = float(len(labels))
    else:
        counted = labels[labels != ignore_index]
        total = float(len(counted) if weight is None else weight.double()[counted].sum())
    return mean_of_rows(losses, group, divisor=total, what="cross_entropy")


@untraced
def binary_cross_entropy_with_logits(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    group: Group | None = None,
) -> Tensor:
    """``F.binary_cross_entropy_with_logits`` of the rows of all ranks; collective.

    The mean is over single values, and, as torch's, not over the sum of weights.

    Args:
        logits: [N] or [N, C] float; N may differ between ranks and be 0.
        labels: as ``logits``, of any type: from 0 to 1.
        mask: which rows count: bool [N] or int64 indices; or bool [N, C], which single values.
        weight: as ``logits``, [C] of the columns or [N, 1] of the rows, without a gradient.
        pos_weight: likewise, of the positive part.
        group: ranks that share the loss; the current group by default.

    Returns, raises: as :func:`sar.cross_entropy`.
    """
    group, logits = group or current_group(), eager(logits)
    look_behind_loss(logits, group)
    weights = {"weight": weight, "pos_weight": pos_weight}
    error = problem_of_values(logits, mask, "logits")
    if error is None:
        error = problem_of_shape("labels", labels, logits.shape)
        shapes = logits.shape, logits.shape[-1:], (len(logits), 1)
        error = error or problem_of_weights(*shapes, **weights)
    if error is not None:
        return mean_of_rows(logits, group, error)
    rows, labels = _wide(logits, logits, mask), _wide(labels, logits, mask)
    given = {name: _wide(one, logits, mask) for name, one in weights.items() if one is not None}
    losses = F.binary_cross_entropy_with_logits(rows, labels, reduction="none", **given)  # type: ignore[arg-type]
    return mean_of_rows(losses, group, what="binary_cross_entropy_with_logits")


@untraced
def mse_loss(
    values: Tensor,
    targets: Tensor,
    mask: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    group: Group | None = None,
) -> Tensor:
    """``F.mse_loss`` of the rows of all ranks; collective.

    Args:
        values: [N] or [N, C] float; N may differ between ranks and be 0.
        targets: as ``values``; [N, 1] and [N] are not alike.
        mask: which rows count: bool [N] or int64 indices; or bool [N, C], which single values.
        weight: [N], or as ``values``, without a gradient. As torch does, the sum of losses is
            divided by the sum of weights.
        group: ranks that share the loss; the current group by default.

    Returns, raises: as :func:`sar.cross_entropy`.
    """
    group, values = group or current_group(), eager(values)
    look_behind_loss(values, group)
    error = problem_of_values(values, mask)
    if error is None:
        error = problem_of_shape("targets", targets, values.shape)
        error = error or problem_of_weights(values.shape, values.shape[:1], weight=weight)
    if error is not None:
        return mean_of_rows(values, group, error)
    rows, targets = _wide(values, values, mask), _wide(targets, values, mask)
    losses = F.mse_loss(rows, targets, reduction="none")
    total = None
    if weight is not None:
        weight = weight if weight.dim() == values.dim() else weight[:, None]
        weight = _wide(weight, values, mask)
        losses, total = losses * weight, float(weight.sum(dtype=torch.float64))
    return mean_of_rows(losses, group, divisor=total, what="mse_loss")


def _wide(given: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """What counts of a tensor that goes with ``values``, in the type to compute in."""
    given = given.to(values.device, wide_dtype(values.dtype))
    return choose(given.broadcast_to(values.shape), mask)


def _problem_of_classes(
    logits: Tensor, labels: Tensor, mask: Tensor | None, weight: Tensor | None, ignored: int
) -> Exception | None:
    error = problem_of_values(logits, mask, "logits", whole_rows=True)
    if error is not None:
        return error
    are_shares = isinstance(labels, Tensor) and labels.is_floating_point()
    shape = logits.shape if are_shares else logits.shape[:1]
    error = problem_of_shape("labels (classes [N], or probabilities [N, C])", labels, shape)
    error = error or problem_of_weights(logits.shape[1:], weight=weight)
    if error is not None or are_shares:
        return error
    labels = choose(labels, None if mask is None else mask.to(labels.device))
    wrong = labels[((labels < 0) | (labels >= logits.shape[1])) & (labels != ignored)]
    if not len(wrong):
        return None
    return ValueError(
        f"labels: got class {int(wrong[0])}, expected 0 to {logits.shape[1] - 1}, or "
        f"ignore_index={ignored}; is the mask right?"
    )
