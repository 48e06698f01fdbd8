"""Small collectives of gloo as exchanges of everybody with everybody.

gloo passes a reduction round a ring: 2 (P - 1) messages, each of which waits for the one before and
wakes a thread on two ranks. Exchanges carry as many bytes in one or two steps: a third of the
processor time on 8 ranks, and two latencies of the network instead of 14.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 1 << 22  # bytes on a rank; above it, a ring saves buffers and latency does not count
_FEW = 64  # numbers
_EXTREMES = {"max": torch.amax, "min": torch.amin}

Swap = Callable[[Tensor, Tensor], None]  # fills the first with equal parts of all ranks' second


def fits(tensor: Tensor, copies: int = 1) -> bool:
    """Whether :func:`all_gather`, with as many copies as ranks, or :func:`all_reduce` is meant
    for it; the same on all ranks."""
    return 0 < copies * tensor.numel() * tensor.element_size() <= LARGEST


def all_gather(swap: Swap, tensor: Tensor, size: int) -> list[Tensor]:
    """The tensors of ``size`` ranks."""
    found = tensor.new_empty((size, *tensor.shape))
    swap(found.view(-1), torch.cat([tensor.reshape(-1)] * size))
    return list(found.unbind())


def all_reduce(swap: Swap, tensor: Tensor, op: str, size: int) -> None:
    """Reduce ``tensor`` (contiguous) in place.

    A few whole numbers are sent to all. Others are reduced on one rank each, and the results sent
    to all, so that all get the same bits.
    """
    num = tensor.numel()
    if num <= _FEW and not tensor.is_floating_point():
        tensor.copy_(_reduced(torch.stack(all_gather(swap, tensor, size)), op))
        return
    share = -(-num // size)
    sent = tensor.view(-1)
    if num < size * share:
        sent = torch.cat([sent, sent.new_zeros(size * share - num)])
    found = torch.empty_like(sent)
    swap(found, sent)
    swap(found, torch.cat([_reduced(found.view(size, share), op)] * size))
    tensor.view(-1).copy_(found[:num])


def _reduced(found: Tensor, op: str) -> Tensor:
    """Over the first dimension; sums in the order of ranks, which torch's own do not keep."""
    if op != "sum":
        return _EXTREMES[op](found, dim=0)
    total, *others = found.unbind()
    total = total.clone()
    for one in others:
        total += one
    return total
