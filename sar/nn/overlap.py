"""Summing gradients of late layers over ranks while those of early layers are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from sar._private import can_be_renumbered, sequence_number, set_sequence_number, version_of
from sar.comm import Group, current_group
from sar.comm.meter import Work
from sar.kernels import wide_dtype
from sar.nn.drift import check_sums
from sar.nn.gradients import (
    begin_watch,
    copy_back,
    end_watch,
    flat_grads,
    gather_grads,
    sum_bucket,
)
from sar.nn.local_norms import warn_of_local_norms
from sar.nn.params import agree_on_layout, trained
from sar.ops.aggregate import sends_gradients

BUCKET_BYTES = 1 << 18
_SHIFT = 40  # bits of a node's own number, which counts the operations of a thread
_OWN = (1 << _SHIFT) - 1


class OverlappedGradients:
    """Context manager around ``loss.backward()``; see :func:`overlap_gradients`.

    Parameters are packed into buckets, last first. A bucket is copied and sent when backward has
    finished its last gradient, and never before the bucket in front of it: ranks on which another
    parameter gets no gradient still send in one order. ``param.grad`` stays this rank's own until
    the end, so what changes after it was sent (another backward, a hook) is noticed and sent again.
    Where a rank trains other parameters than before, buckets are packed anew after that step, whose
    gradients are then summed as :func:`gather_grads` does.
    """

    def __init__(self, model: nn.Module, group: Group | None = None) -> None:
        self._group, self._model = group or current_group(), model
        self._handles: list[Any] = []
        self._factor = math.nan
        self._works: list[tuple[Tensor, Work]] = []
        self._sent: dict[nn.Parameter, tuple[Tensor | None, int]] = {}
        self._group.prepare_sums()
        warn_of_local_norms(model, self._group)
        agree_on_layout(trained(model), self._group)
        self._arrange()

    def _arrange(self) -> None:
        self._params = list(reversed(trained(self._model).values()))
        self._buckets = _pack(self._params)

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()`` inside this context manager, the paths to other ranks first."""
        wire_first(loss)
        with self:
            loss.backward()  # type: ignore[no-untyped-call]

    def __enter__(self) -> None:
        if self._handles:
            raise RuntimeError("overlap_gradients: entered inside itself")
        now = reversed(trained(self._model).values())
        self._is_changed = [id(p) for p in now] != [id(p) for p in self._params]
        self._ready: set[nn.Parameter] = set()
        for param in () if self._is_changed else self._params:
            hook = param.register_post_accumulate_grad_hook(self._accumulated)
            self._handles.append(hook)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        try:
            if kind is None:
                self._finish()
        finally:
            self._works.clear()
            self._sent.clear()
        if kind is None:
            check_sums(self._model, self._group, self._factor)
            begin_watch(self._model, self._params, self._group)

    def _accumulated(self, param: Any) -> None:
        self._ready.add(param)
        while len(self._works) < len(self._buckets):
            if not self._ready.issuperset(self._buckets[len(self._works)]):
                return
            self._send(self._buckets[len(self._works)])

    def _send(self, bucket: Sequence[nn.Parameter]) -> None:
        flat = flat_grads(bucket)
        for param in bucket:
            grad = param.grad
            self._sent[param] = (grad, -1 if grad is None else version_of(grad))
        self._works.append((flat, self._group.begin_sum(flat)))

    def _finish(self) -> None:
        for bucket in self._buckets[len(self._works) :]:
            self._send(bucket)
        problem, self._factor = end_watch(self._model, self._group)
        anywhere, stale, is_changed = self._compare(problem)
        if is_changed:
            for _, work in self._works:
                work.wait()
            gather_grads(self._model, group=self._group)
            self._arrange()
            return
        for bucket, (flat, work) in zip(self._buckets, self._works, strict=True):
            work.wait()
            copy_back(flat, bucket, anywhere - stale.keys())
        for dtype in dict.fromkeys(param.dtype for param in stale):
            sum_bucket([param for param in stale if param.dtype == dtype], self._group)

    def _compare(
        self, problem: Exception | None
    ) -> tuple[set[nn.Parameter], dict[nn.Parameter, None], bool]:
        """Parameters with a gradient on any rank, those that changed after they were sent, and
        whether a rank trains others than those packed."""
        flags = torch.zeros((len(self._params) + 1, 2), dtype=torch.int32)
        sparse = []
        for row, param in zip(flags, self._params):
            grad, (sent, version) = param.grad, self._sent[param]
            if grad is not None:
                if grad.layout != torch.strided:
                    sparse.append(param)
                row[0] = 1
            row[1] = grad is not sent or (grad is not None and version_of(grad) != version)
        error = TypeError("model: got a sparse gradient, expected dense") if sparse else problem
        flags[-1, 0], flags[-1, 1] = error is not None, self._is_changed
        if self._group.all_reduce(flags, "max")[-1, 0]:
            self._group.agree(error)
        present, changed = flags[:-1].T.tolist()
        anywhere = {param for param, here in zip(self._params, present) if here}
        stale = dict.fromkeys(p for p, was in zip(self._params, changed) if was)
        return anywhere, stale, bool(flags[-1, 1])


def overlap_gradients(model: nn.Module, *, group: Group | None = None) -> OverlappedGradients:
    """Sum gradients over ranks as :func:`gather_grads` does, while backward still runs; collective.

    Returns a context manager to be used around the last backward of every step::

        overlapped = sar.overlap_gradients(model)
        ...
        with overlapped:
            loss.backward()

    or, which also lets gradients travel while dense layers compute theirs (:func:`wire_first`)::

        overlapped.backward(loss)

    Afterwards the gradients are those of :func:`gather_grads`, which is not called. Backward calls
    before it only accumulate on their rank. Sharded parameters are left alone.

    Raises:
        ValueError: on every rank when the ranks' parameters differ in number, name, shape or dtype;
            on leaving, when they differ in which are trained.
        RuntimeError: the context manager is entered inside itself.
        TypeError: on leaving, on every rank, for a sparse gradient.
    """
    return OverlappedGradients(model, group)


def _pack(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, up to BUCKET_BYTES unless one alone is larger."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for param in params:
        size = param.numel() * wide_dtype(param.dtype).itemsize
        last = buckets[-1][0] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (param.dtype, param.device)
        if not alike or size > room:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(param)
        room -= size
    return buckets


def wire_first(loss: Tensor) -> None:
    """Let the backward of ``loss`` take the paths to other ranks first; call it just before.

    Of the gradients that can be computed next, torch takes the one whose operation came last in
    forward. So a layer that aggregates first and multiplies its own rows last would finish the
    latter before anything is sent. Afterwards, torch takes the one with most sums over edges still
    ahead, and the others fill the time in which gradients of remote rows travel. Results differ
    only in the order in which gradients of one tensor are added, the same one on every rank. A
    torch whose nodes cannot be renumbered keeps its own order.
    """
    ahead: dict[Any, int] = {}
    stack: list[Any] = [loss.grad_fn] if can_be_renumbered(loss.grad_fn) else []
    while stack:  # depth first: a node is done when all that follow it are
        node = stack[-1]
        following = [after for after, _ in node.next_functions if after is not None]
        waiting = [after for after in following if after not in ahead]
        if waiting and node not in ahead:
            ahead[node] = -1
            stack.extend(waiting)
            continue
        stack.pop()
        most = max((ahead[after] for after in following), default=0)
        ahead[node] = most + sends_gradients(node)
        if ahead[node]:
            own = sequence_number(node) & _OWN
            set_sequence_number(node, own | ahead[node] << _SHIFT)
