"""Small collectives of gloo as all-to-all exchanges.

gloo passes a reduction round a ring: 2 (P - 1) messages, each of which waits for the one before and
wakes a thread on two ranks. Exchanges carry as many bytes in one or two steps: a third of the
processor time on 8 ranks, and two latencies of the network instead of 14.

To gloo they are all the same operation on bytes. So each part begins with a label of what its
sender calls, by which ranks that call different things notice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 1 << 22  # bytes on a rank; above it, a ring saves buffers and latency does not count
_FEW = 64  # numbers
_EXTREMES = {"max": torch.amax, "min": torch.amin}
_CALLS = ("all_gather", "sum", "max", "min", "sum_if_all")
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_HEAD = 16  # bytes: how many numbers, the call, the dtype, whether the rank is ready, as int32

Swap = Callable[[Tensor, Tensor], None]  # fills the first with equal parts of all ranks' second


class CallsDiffer(Exception):
    """Ranks call different things; the message lists which, on every rank."""


def fits(tensor: Tensor, copies: int = 1) -> bool:
    """Whether ``copies`` of ``tensor`` are small enough for this module; the same on all ranks."""
    return 0 < copies * tensor.numel() * tensor.element_size() <= LARGEST


def all_gather(swap: Swap, tensor: Tensor, size: int) -> list[Tensor]:
    """The tensors of all ranks, in order. Raises :class:`CallsDiffer` if calls or sizes differ."""
    parts = _Parts(tensor, size, tensor.numel())
    parts.sent.copy_(tensor.reshape(1, -1))
    parts.swap_labelled(swap, tensor, "all_gather")
    return [part.view(tensor.shape) for part in parts.found]


def all_reduce(swap: Swap, tensor: Tensor, op: str, size: int, ready: bool | None = None) -> bool:
    """Reduce ``tensor`` (contiguous) in place; raises as :func:`all_gather`.

    A few whole numbers are sent to all. Others are reduced on one rank each, and the results sent
    to all, so that all get the same bits. With ``ready`` (``None`` does not ask) the tensor is left
    as it was unless all ranks are ready; returns whether it was reduced.
    """
    num, flat = tensor.numel(), tensor.view(-1)
    few = num <= _FEW and not tensor.is_floating_point()
    parts = _Parts(tensor, size, num if few else -(-num // size))
    if not few and num % size:
        flat = torch.cat([flat, flat.new_zeros(parts.sent.numel() - num)])
    parts.sent.copy_(flat.view(-1, parts.sent.shape[1]))
    call = op if ready is None else f"{op}_if_all"
    if not parts.swap_labelled(swap, tensor, call, ready is not False):
        return False
    result = _reduced(parts.found, op)
    if not few:
        parts.sent.copy_(result)
        parts.swap(swap)
        result = parts.found
    if result.numel() > num:
        result = result.reshape(-1)[:num]
    with torch.inference_mode(tensor.is_inference()):  # a view is not written outside of it
        tensor.view(result.shape).copy_(result)
    return True


class _Parts:
    """Two buffers of bytes, to send and received, with a labelled part for each rank. ``sent`` and
    ``found`` [size, n] are what lies behind the labels, in the dtype of ``like``."""

    def __init__(self, like: Tensor, size: int, num: int) -> None:
        end = _HEAD + num * like.element_size()
        length = -(-end // _HEAD) * _HEAD  # keeps all parts aligned
        buffers = [like.new_empty((size, length), dtype=torch.uint8) for _ in range(2)]
        self._heads = [buffer[:, :_HEAD].view(torch.int32) for buffer in buffers]
        self._bytes = [buffer.view(-1) for buffer in buffers]
        self.sent, self.found = (buffer[:, _HEAD:end].view(like.dtype) for buffer in buffers)

    def swap(self, swap: Swap) -> None:
        sent, found = self._bytes
        swap(found, sent)

    def swap_labelled(self, swap: Swap, tensor: Tensor, call: str, ready: bool = True) -> bool:
        """Swap and compare the labels: whether all ranks are ready; raises :class:`CallsDiffer`."""
        label = [tensor.numel(), _CALLS.index(call), _DTYPES.index(tensor.dtype), ready]
        sent, found = self._heads
        sent.copy_(torch.tensor(label, dtype=torch.int32, device=sent.device))
        self.swap(swap)
        labels = found.tolist()
        if any(other[:3] != labels[0][:3] for other in labels):
            calls = ", ".join(f"{r}: {_described(*one)}" for r, one in enumerate(labels[:16]))
            raise CallsDiffer(calls)
        return all(other[3] for other in labels)


def _described(num: int, call: int, dtype: int, _: int) -> str:
    known = 0 <= call < len(_CALLS) and 0 <= dtype < len(_DTYPES)
    return f"{_CALLS[call]} of {num} {_DTYPES[dtype]}" if known else "something else"


def _reduced(found: Tensor, op: str) -> Tensor:
    """Reduce over ranks, the first dimension; sums in rank order, which torch's do not keep."""
    if op != "sum":
        return _EXTREMES[op](found, dim=0)
    total, *others = found.unbind()
    total = total.clone()
    for one in others:
        total += one
    return total
