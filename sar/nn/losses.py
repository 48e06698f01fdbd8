"""Losses over the rows of all ranks: means, sums, and those of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sar import expect
from sar.comm import Group, current_group
from sar.kernels import wide_dtype
from sar.kernels.jit import untraced
from sar.nn.drift import watch_loss
from sar.ops.readout import mean_of_rows, sum_of_rows
from sar.tracing.lazy import eager

Losses = tuple[Tensor, float | None]  # of each value; the divisor of their sum, if not the count


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
    parameter gradients are *summed* over ranks afterwards, by :func:`sar.nn.gather_grads`. That is
    right for a loss. Inside of a model, as in ``x - global_mean(x)``, the numbers are right and the
    gradients are not: what other ranks make of the mean does not flow back.

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

    def each(values: Tensor) -> Losses:
        _check_values(values, mask)
        _check_weights(values.shape, values.shape[:1], weight=weight)
        return _weighted(_choose(values, mask), values, mask, weight)

    return _mean("global_mean", values, each, group)


@untraced
def global_sum(values: Tensor, mask: Tensor | None = None, *, group: Group | None = None) -> Tensor:
    """Sum of ``values`` over the rows of all ranks; collective.

    For a loss with a divisor of its own. The gradient of each value is 1, this rank's share, for
    :func:`sar.nn.gather_grads` to sum. Arguments and result are those of :func:`global_mean`; where
    no rank has a value the sum is 0.
    """
    group, values = group or current_group(), eager(values)
    watch_loss(values, group)
    error = expect.problem(_check_values, values, mask)
    return sum_of_rows(values if error else _choose(values, mask), group, error)


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

    def each(logits: Tensor) -> Losses:
        _check_classes(logits, labels, mask, weight, ignore_index)
        rows = _choose(logits, mask).to(wide_dtype(logits.dtype))
        wanted = _choose(labels.to(rows.device), mask)
        wanted = wanted.to(rows.dtype if wanted.is_floating_point() else torch.int64)
        shares = None if weight is None else weight.to(rows)
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        losses = F.cross_entropy(rows, wanted, shares, reduction="none", **options)
        if wanted.is_floating_point():
            return losses, float(len(wanted))
        counted = wanted[wanted != ignore_index]
        return losses, float(len(counted) if shares is None else shares.double()[counted].sum())

    return _mean("cross_entropy", logits, each, group)


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
    weights = {"weight": weight, "pos_weight": pos_weight}

    def each(logits: Tensor) -> Losses:
        _check_values(logits, mask, "logits")
        _check_shape("labels", labels, logits.shape)
        _check_weights(logits.shape, logits.shape[-1:], (len(logits), 1), **weights)
        rows, wanted = _wide(logits, logits, mask), _wide(labels, logits, mask)
        given: dict[str, Any] = {
            name: _wide(one, logits, mask) for name, one in weights.items() if one is not None
        }
        function = F.binary_cross_entropy_with_logits
        return function(rows, wanted, reduction="none", **given), None

    return _mean("binary_cross_entropy_with_logits", logits, each, group)


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

    def each(values: Tensor) -> Losses:
        _check_values(values, mask)
        _check_shape("targets", targets, values.shape)
        _check_weights(values.shape, values.shape[:1], weight=weight)
        rows, wanted = _wide(values, values, mask), _wide(targets, values, mask)
        return _weighted(F.mse_loss(rows, wanted, reduction="none"), values, mask, weight)

    return _mean("mse_loss", values, each, group)


def _mean(
    what: str, values: Tensor, each: Callable[[Tensor], Losses], group: Group | None
) -> Tensor:
    """Mean of the losses that ``each`` makes of the values; what it raises, all ranks raise."""
    group, values = group or current_group(), eager(values)
    watch_loss(values, group)
    try:
        losses, divisor = each(values)
    except Exception as error:  # noqa: BLE001 - any, of memory as well: the others would wait
        return mean_of_rows(values, group, error)
    return mean_of_rows(losses, group, divisor=divisor, what=what)


def _weighted(losses: Tensor, values: Tensor, mask: Tensor | None, weight: Tensor | None) -> Losses:
    """Losses of the ``values`` that count, weighted; the sum of weights, if any, as divisor."""
    if weight is None:
        return losses, None
    weight = _wide(weight if weight.dim() == values.dim() else weight[:, None], values, mask)
    return losses * weight, float(weight.sum(dtype=torch.float64))


def _wide(given: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """The elements that count of ``given``, which is as ``values``, in the dtype to compute in."""
    given = given.to(values.device, wide_dtype(values.dtype))
    return _choose(given.broadcast_to(values.shape), mask)


def _choose(values: Tensor, mask: Tensor | None) -> Tensor:
    """The values that count: [K, ...] rows, or [K] where the mask is as wide as the values."""
    if mask is None:
        return values
    mask = mask.to(values.device)
    if mask.dim() == 2:
        return values.masked_select(mask)
    rows = mask.nonzero()[:, 0] if mask.dtype == torch.bool else mask
    return values.index_select(0, rows)


def _check_classes(
    logits: Tensor, labels: Tensor, mask: Tensor | None, weight: Tensor | None, ignored: int
) -> None:
    _check_values(logits, mask, "logits", whole_rows=True)
    are_shares = isinstance(labels, Tensor) and labels.is_floating_point()
    shape = logits.shape if are_shares else logits.shape[:1]
    _check_shape("labels (classes [N], or probabilities [N, C])", labels, shape)
    _check_weights(logits.shape[1:], weight=weight)
    if are_shares:
        return
    labels = _choose(labels, None if mask is None else mask.to(labels.device))
    wrong = labels[((labels < 0) | (labels >= logits.shape[1])) & (labels != ignored)]
    if len(wrong):
        raise ValueError(
            f"labels: got class {int(wrong[0])}, expected 0 to {logits.shape[1] - 1}, or "
            f"ignore_index={ignored}; is the mask right?"
        )


def _check_values(
    values: Tensor, mask: Tensor | None, name: str = "values", whole_rows: bool = False
) -> None:
    """Raise where ``mask`` cannot choose among ``values``; with ``whole_rows`` they are [N, C]."""
    expect.tensor(values, name, floating=True)
    if values.dim() != 2 and (whole_rows or values.dim() != 1):
        expected = "[N, C]" if whole_rows else "[N] or [N, C]"
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected {expected}")
    if mask is None:
        return
    expect.tensor(mask, "mask", dtypes=(torch.bool, torch.int64))
    if mask.dtype == torch.bool:
        _check_shape("mask", mask, values.shape[:1], *([] if whole_rows else [values.shape]))
    else:
        expect.tensor(mask, "mask", shape=("K",))
        expect.indices(mask, "mask", "indices", len(values))


def _check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    expect.instance(tensor, name, Tensor, "a tensor")
    if tensor.shape not in shapes:
        expected = " or ".join(str(tuple(shape)) for shape in dict.fromkeys(shapes))
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")


def _check_weights(*shapes: tuple[int, ...], **weights: Tensor | None) -> None:
    """Raise where a given weight has none of these shapes, or asks for a gradient."""
    for name, weight in weights.items():
        if weight is not None:
            _check_shape(name, weight, *shapes)
            if weight.requires_grad:
                raise ValueError(
                    f"{name}: got a tensor that asks for a gradient, expected a constant"
                )
