"""A bias that is added where the result of attention is, instead of beside it.

Note [Bias in place]. DGL's layers write ``rst + self.bias``, and what they add to stays saved for
attention's backward: two tensors of the size of a layer's rows that differ by one row. There the
sum takes the memory of the result, and backward takes out again what the bias brings:
<dout, out> = <dout, out + b> - <dout, b>. Only DGL's own code is treated so, which does not come
back to the result, and only where the sum has the digits of the result: where b is much larger than
that it would lose some. Each rank decides for itself. Whether attention has to be computed again,
as somebody wrote into its result, the ranks ask each other. Who writes into a sum does so in the
next epoch, too, where attention itself would be as it was computed: that bias is added beside then.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from sar.comm import Group
from sar.ops.reuse import is_plain
from sar.ops.saving import saves_as_is

_DTYPES = (torch.float32, torch.float64)  # of results that are not rounded
_LARGER = 4  # how many times a bias may exceed the root mean square of what it is added to
_SAMPLE = 1024  # rows that tell it


class Writes:
    """What was written into a result since it was saved, known without keeping its memory alive.

    The result is saved as ``data``, which autograd frees after backward like any saved tensor but
    does not guard: the count of writes that it would compare raises an error where the caller
    wrote, and here such a result is only computed again.

    Attributes:
        bias: [1, H, D] what has been added to the result by :func:`add_bias`.
    """

    def __init__(self, result: Tensor) -> None:
        self.bias: Tensor | None = None
        self._parameter: ReferenceType[Tensor] | None = None
        self._follow(result)

    def _follow(self, *tensors: Tensor) -> None:
        self._counters = []
        for tensor in tensors:
            counter = tensor.detach()  # one count for both; then empty, but still counting
            counter.data = tensor.new_empty(0)
            self._counters.append((counter, counter._version))

    @property
    def happened(self) -> bool:
        """Whether anybody else wrote."""
        return any(counter._version != version for counter, version in self._counters)

    def note(self) -> None:
        """Where it happened behind :func:`add_bias`, that bias is no more added in place."""
        parameter = None if self._parameter is None else self._parameter()
        if parameter is not None and self.happened:
            _written_after[parameter] = True

    def add(self, result: Tensor, bias: Tensor) -> Tensor:
        """result + bias in the memory of ``result``, as a tensor of its own."""
        written = result.detach().add_(bias)
        memory, start = written.untyped_storage(), written.storage_offset()
        out = written.new_empty(0).set_(memory, start, written.shape)  # type: ignore[call-overload]
        self.bias = bias.detach().clone()  # as it is now
        self._parameter = ref(_parameter_of(bias))
        self._follow(result, out)
        return out


def any_rank(group: Group, happened: bool) -> bool:
    """Whether it happened on any rank, which may differ; collective."""
    if group.size == 1:
        return happened
    return bool(group.all_reduce(torch.tensor(int(happened)), "max"))


def add_bias(result: Any, bias: Any) -> Tensor | None:
    """Their sum where ``result`` is, if Note [Bias in place] allows it; ``None`` otherwise.

    Args:
        result: [n, H, D], of attention or not.
        bias: what is added to it.
    """
    if not _is_bias(result, bias) or not saves_as_is():
        return None
    whole = result if result._base is None else result._base
    writes = getattr(whole.grad_fn, "writes", None)
    if not isinstance(writes, Writes) or whole.numel() != result.numel():
        return None
    if writes.bias is not None or writes.happened or not _fits(result, bias):
        return None
    if _parameter_of(bias) in _written_after:
        return None
    return _AddBias.apply(result, bias, writes)


_written_after = WeakTensorKeyDictionary()  # parameters into whose sums somebody wrote


def _parameter_of(bias: Tensor) -> Tensor:
    return bias if bias._base is None else bias._base


def _is_bias(result: Any, bias: Any) -> bool:
    """Whether one matrix, a parameter or a view of one, is added to each of some."""
    return (
        type(result) is Tensor
        and isinstance(bias, Tensor)
        and isinstance(_parameter_of(bias), Parameter)
        and result.dim() == 3
        and bias.shape == (1, *result.shape[1:])
        and result.dtype in _DTYPES
        and (bias.dtype, bias.device) == (result.dtype, result.device)
        and all(is_plain(t) and t.is_contiguous() for t in (result, bias))
        and torch.is_grad_enabled()
        and torch.autograd.forward_ad._current_level < 0
    )


def _fits(result: Tensor, bias: Tensor) -> bool:
    """Whether no head's sum loses digits of the result that matter."""
    some = result.detach()[:: max(1, len(result) // _SAMPLE)]
    size = torch.linalg.vector_norm(some, dim=(0, 2)) / (some[:, 0].numel() or 1) ** 0.5
    return bool((bias.detach().abs().amax((0, 2)) <= _LARGER * size).all())


class _AddBias(Function):
    """out = rst + b, where rst was.

    ======  =========  ==========================================================
    tensor  shape      owner and lifetime
    ======  =========  ==========================================================
    rst     [n, H, D]  this rank; written into: its memory is that of out
    b       [1, H, D]  replicated; a copy is kept for the backward pass of rst
    ======  =========  ==========================================================

    drst = dout; db = the sum of dout over n.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, bias: Tensor, writes: Writes) -> Tensor:
        return writes.add(result, bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        asks_result, asks_bias, _ = ctx.needs_input_grad
        dbias = dout.sum(0, keepdim=True) if asks_bias else None
        return (dout if asks_result else None), dbias, None
