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
_HEAD = 16  # bytes: how many numbers, and the code of call and dtype, as int64

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
    return [part.view(tensor.shape) for part in _labelled_swap(swap, parts, tensor, "all_gather")]


def all_reduce(swap: Swap, tensor: Tensor, op: str, size: int) -> None:
    """Reduce ``tensor`` (contiguous) in place; raises as :func:`all_gather`.

    A few whole numbers are sent to all. Others are reduced on one rank each, and the results sent
    to all, so that all get the same bits.
    """
    num, sent = tensor.numel(), tensor.view(-1)
    if num <= _FEW and not tensor.is_floating_point():
        parts = sent.unsqueeze(0).expand(size, -1)
        found = _reduced(_labelled_swap(swap, parts, tensor, op), op)
    else:
        share = -(-num // size)
        if num < size * share:
            sent = torch.cat([sent, sent.new_zeros(size * share - num)])
        own = _reduced(_labelled_swap(swap, sent.view(size, share), tensor, op), op)
        found = torch.empty_like(sent)
        swap(found, torch.cat([own] * size))
    tensor.copy_(found[:num].view_as(tensor))


def _labelled_swap(swap: Swap, parts: Tensor, tensor: Tensor, call: str) -> Tensor:
    """What comes for ``parts`` [size, n], part p of which goes to rank p."""
    size, end = len(parts), _HEAD + parts.shape[1] * parts.element_size()
    code = _CALLS.index(call) * len(_DTYPES) + _DTYPES.index(tensor.dtype)
    label = torch.tensor([tensor.numel(), code], device=tensor.device)
    length = -(-end // _HEAD) * _HEAD  # keeps all parts aligned
    sent = torch.empty((size, length), dtype=torch.uint8, device=tensor.device)
    sent[:, :_HEAD] = label.view(torch.uint8)
    sent[:, _HEAD:end].view(parts.dtype).copy_(parts)
    found = torch.empty_like(sent)
    swap(found.view(-1), sent.view(-1))
    labels = found[:, :_HEAD].view(torch.int64).tolist()
    if any(label != labels[0] for label in labels):
        calls = ", ".join(f"{rank}: {_described(*one)}" for rank, one in enumerate(labels[:16]))
        raise CommError(f"ranks call different things, or for different numbers; {calls}")
    return found[:, _HEAD:end].view(parts.dtype)


def _described(num: int, code: int) -> str:
    call, dtype = divmod(code, len(_DTYPES))
    known = 0 <= call < len(_CALLS)
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
