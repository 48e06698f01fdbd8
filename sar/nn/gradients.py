"""Gradients that are summed over ranks, and clipped by their joint norm."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar import expect
from sar.comm import Group, current_group
from sar.kernels import wide_dtype
from sar.nn.drift import check_layout, check_sums, compare_at_end
from sar.nn.history import GradientWatch, history_of, is_due
from sar.nn.params import ShardedParameter, agree_on_layout, layout_of, trained


def gather_grads(model: nn.Module, *, group: Group | None = None) -> None:
    """Sum the gradients of all ranks, in place, so that every rank holds the same; collective.

    A rank whose gradient is ``None`` contributes zeros; a gradient stays ``None`` only where it is
    so on every rank. One flat bucket per dtype is sent; 16-bit gradients are summed in float32.
    Sharded parameters are left alone: their gradients are whole on their rank. Afterwards
    ``torch.nn.utils.clip_grad_norm_`` clips by the global norm as it stands, and
    :func:`clip_grad_norm_` does where there are sharded parameters.

    Calls 1, 2, 4, .. 32 and every 50th for a model compare its parameters over the ranks, as
    :func:`sar.check` does, and look at what was done to gradients since the last call. Ten calls in
    a row without a loss of :func:`sar.global_mean`, :func:`sar.global_sum` or
    :func:`sar.nn.link_loss` warn once that each rank's own mean may be the loss. Gradients that
    were clipped before are a warning, too.

    Raises, on every rank:
        ValueError: the ranks' parameters differ in number, name, shape or dtype; gradients that
            were summed before would be summed again.
        TypeError: a gradient is sparse.
        DriftError: parameters have become unequal.
    """
    group = group or current_group()
    named = trained(model)
    problem, factor = end_watch(model, group)
    sparse = [n for n, p in named.items() if p.grad is not None and p.grad.layout != torch.strided]
    error = TypeError(f"{sparse[0]}: got a sparse gradient, expected dense") if sparse else problem
    params = [param for param in named.values() if param.grad is not None]
    present = bytes(param.grad is not None for param in named.values())
    unclear = error is not None or any(map(is_lazy, named.values()))
    mine = None if unclear else _signature(named, present, params)
    if not _summed_as_before(params, mine, group):
        if agree_on_layout(named, group, error, present):
            _before[group] = mine
        else:
            _before.pop(group, None)
            here = torch.tensor(list(present), dtype=torch.int32)
            somewhere = group.all_reduce(here, "max").tolist() if len(here) else []
            params = [param for param, has_grad in zip(named.values(), somewhere) if has_grad]
        check_layout(model, len(named), group)
        for bucket in _buckets(params):
            sum_bucket(bucket, group)
    check_sums(model, group, factor)  # now that ranks agree on the model
    begin_watch(model, params, group)


def begin_watch(model: nn.Module, params: Iterable[nn.Parameter], group: Group) -> None:
    """After a sum: watch the smallest gradient until the next, if ranks compare there."""
    end_watch(model, group)
    compare_at_end(model, group)
    history = history_of(group)
    if group.size > 1 and is_due(history.calls["sum"][model] + 1):
        summed = [param for param in params if param.grad is not None]
        if summed:
            history.watches[model] = GradientWatch(min(summed, key=Tensor.numel))


def end_watch(model: nn.Module, group: Group) -> tuple[ValueError | None, float]:
    """Before a sum: what :meth:`sar.nn.history.GradientWatch.end` returns, if it was watched."""
    watch = history_of(group).watches.pop(model, None)
    return (None, math.nan) if watch is None else watch.end()


def clip_grad_norm_(model: nn.Module, max_norm: float, *, group: Group | None = None) -> Tensor:
    """Scale all gradients so that their joint L2 norm is at most ``max_norm``; collective.

    For after :func:`gather_grads`: gradients that all ranks share count once, rows of sharded
    parameters count on the rank that holds them.

    Returns:
        The norm before, a float64 scalar, equal on every rank.

    Raises:
        TypeError, ValueError: ``max_norm`` is not a number, or not positive.
    """
    if not hasattr(max_norm, "__float__"):
        raise expect.wrong_type(max_norm, "max_norm", "a number")
    if not max_norm > 0:
        raise ValueError(f"max_norm: got {max_norm!r}, expected more than 0")
    squares = torch.zeros(2, dtype=torch.float64)
    grads: list[Tensor] = []
    for param in model.parameters():
        if param.grad is not None:
            if param.grad.is_sparse:
                param.grad = param.grad.coalesce()
            grads.append(param.grad)
            values = param.grad.values() if param.grad.is_sparse else param.grad
            kind = int(isinstance(param, ShardedParameter))
            squares[kind] += values.double().square().sum().cpu()
    if any(isinstance(param, ShardedParameter) for param in model.parameters()):
        (group or current_group()).all_reduce(squares[1:])
    norm = squares.sum().sqrt()
    share = float(max_norm / (norm + 1e-6))  # as torch's
    if share < 1:
        for grad in grads:
            grad.mul_(share)
    return norm


# Gradients of unequal models must not be added, but asking first is a collective in every step.
# After a step in which all ranks had the same gradients, each sends as much as it did then, and
# says beside it whether it still has these. Only if one has not do they ask, and sum again.


@dataclass(frozen=True)
class _Signature:
    """What a rank sums: parameters, which have gradients, size and dtype of the first bucket."""

    layout: tuple[int, int, int]
    present: bytes
    size: int
    dtype: torch.dtype


_before: WeakKeyDictionary[Group, _Signature | None] = WeakKeyDictionary()  # equal on all ranks


def _signature(
    named: Mapping[str, Tensor], present: bytes, params: list[nn.Parameter]
) -> _Signature | None:
    """The signature of this rank's sum; ``None`` where there is nothing to sum."""
    if not params:
        return None
    first = _buckets(params)[0]
    size = sum(param.numel() for param in first)
    return _Signature(layout_of(named), present, size, wide_dtype(first[0].dtype))


def _summed_as_before(params: list[nn.Parameter], mine: _Signature | None, group: Group) -> bool:
    """Sum the gradients, and return True, if all ranks have the last sum's signature."""
    before = _before.get(group)
    if before is None:
        return False
    is_same = mine == before
    buckets = _buckets(params)
    if is_same:
        flat = flat_grads(buckets[0])
    else:
        flat = torch.zeros(before.size, dtype=before.dtype, device=group.device)
    if not group.sum_if_all(flat, is_same):
        return False
    copy_back(flat, buckets[0])
    for bucket in buckets[1:]:
        sum_bucket(bucket, group)
    return True


def _buckets(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    return [[p for p in params if p.dtype == d] for d in dict.fromkeys(p.dtype for p in params)]


def sum_bucket(params: list[nn.Parameter], group: Group) -> None:
    """Sum the gradients of parameters of one dtype over all ranks, ``None`` counting as 0."""
    if group.size > 1:
        copy_back(group.all_reduce(flat_grads(params)), params)


def flat_grads(params: Sequence[nn.Parameter]) -> Tensor:
    """Flat wide copy of gradients of one dtype; 0 for ``None`` and sparse ones."""
    sizes, like = [param.numel() for param in params], params[0]
    flat = torch.zeros(sum(sizes), dtype=wide_dtype(like.dtype), device=like.device)
    for param, part in zip(params, flat.split(sizes)):
        if param.grad is not None and param.grad.layout == torch.strided:
            part.copy_(param.grad.detach().reshape(-1))
    return flat


def copy_back(
    flat: Tensor, params: Sequence[nn.Parameter], chosen: Collection[nn.Parameter] | None = None
) -> None:
    """Write the sums in ``flat`` into the gradients of ``params``, or the ``chosen`` ones."""
    parts = flat.split([param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        if chosen is None or param in chosen:
            if param.grad is None:
                param.grad = torch.empty_like(param)
            param.grad.copy_(part.view_as(param))
