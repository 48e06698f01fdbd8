"""Small collectives of gloo as exchanges of everybody with everybody.

gloo passes a reduction round a ring: 2 (P - 1) messages, each of which waits for the one before and
wakes a thread on two ranks. Exchanges carry as many bytes in one or two steps: a third of the
processor time on 8 ranks, and two latencies of the network instead of 14.

To gloo they are all the same operation on bytes. So each part begins with what its sender is
calling, for ranks that call different things to notice.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sar.errors import CommError

LARGEST = 1 << 22  # bytes on a rank; above it, a ring saves buffers and latency does not count
_FEW = 64  # numbers
_EXTREMES = {"max": torch.amax, "min": torch.amin}
_CALLS = ("all_gather", "sum", "max", "min")
_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_HEAD = 16  # bytes: how many numbers, the call, the dtype, whether the rank is ready, as int32

Swap = Callable[[Tensor, Tensor], None]  # fills the first with equal parts of all ranks' second


def fits(tensor: Tensor, copies: int = 1) -> bool:
    """Whether :func:`all_gather`, with as many copies as ranks, or :func:`all_reduce` is meant
    for it; the same on all ranks."""
    return 0 < copies * tensor.numel() * tensor.element_size() <= LARGEST


def all_gather(swap: Swap, tensor: Tensor, size: int) -> list[Tensor]:
    """The tensors of ``size`` ranks.

    Raises ``CommError`` on every rank when ranks call something else, or with other numbers.
    """
    parts = tensor.reshape(1, -1).expand(size, -1)
    found, _ = _labelled_swap(swap, parts, tensor, "all_gather")
    return [part.view(tensor.shape) for part in found]


def all_reduce(swap: Swap, tensor: Tensor, op: str, size: int, ready: bool = True) -> bool:
    """Reduce ``tensor`` (contiguous) in place; raises as :func:`all_gather`.

    A few whole numbers are sent to all. Others are reduced on one rank each, and the results sent
    to all, so that all get the same bits.

    Returns:
        Whether all ranks were ``ready``; else it is left as it was.
    """
    num, sent = tensor.numel(), tensor.view(-1)
    if num <= _FEW and not tensor.is_floating_point():
        parts = sent.unsqueeze(0).expand(size, -1)
        found, all_ready = _labelled_swap(swap, parts, tensor, op, ready)
        result = _reduced(found, op)
    else:
        share = -(-num // size)
        if num < size * share:
            sent = torch.cat([sent, sent.new_zeros(size * share - num)])
        found, all_ready = _labelled_swap(swap, sent.view(size, share), tensor, op, ready)
        result = torch.empty_like(sent)
        if all_ready:
            swap(result, torch.cat([_reduced(found, op)] * size))
    if all_ready:
        tensor.copy_(result[:num].view_as(tensor))
    return all_ready


def _labelled_swap(
    swap: Swap, parts: Tensor, tensor: Tensor, call: str, ready: bool = True
) -> tuple[Tensor, bool]:
    """What comes for ``parts`` [size, n], part p of which goes to rank p; whether all are ready."""
    size, end = len(parts), _HEAD + parts.shape[1] * parts.element_size()
    label = torch.tensor(
        [tensor.numel(), _CALLS.index(call), _DTYPES.index(tensor.dtype), ready],
        dtype=torch.int32, device=tensor.device,
    )  # fmt: skip
    length = -(-end // _HEAD) * _HEAD  # keeps all parts aligned
    sent = torch.empty((size, length), dtype=torch.uint8, device=tensor.device)
    sent[:, :_HEAD] = label.view(torch.uint8)
    sent[:, _HEAD:end].view(parts.dtype).copy_(parts)
    found = torch.empty_like(sent)
    swap(found.view(-1), sent.view(-1))
    labels = found[:, :_HEAD].view(torch.int32).tolist()
    if any(label[:3] != labels[0][:3] for label in labels):
        calls = ", ".join(f"{rank}: {_described(*one)}" for rank, one in enumerate(labels[:16]))
        raise CommError(f"ranks call different things, or for different numbers; {calls}")
    return found[:, _HEAD:end].view(parts.dtype), all(label[3] for label in labels)


def _described(num: int, call: int, dtype: int, _: int) -> str:
    known = 0 <= call < len(_CALLS) and 0 <= dtype < len(_DTYPES)
    return f"{_CALLS[call]} of {num} {_DTYPES[dtype]}" if known else "something else"


def _reduced(found: Tensor, op: str) -> Tensor:
    """Over the first dimension; sums in the order of ranks, which torch's own do not keep."""
    if op != "sum":
        return _EXTREMES[op](found, dim=0)
    total, *others = found.unbind()
    total = total.clone()
    for one in others:
        total += one
    return total
