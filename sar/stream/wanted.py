"""Which gradients are wanted: the same on all ranks, as backward passes of all ranks meet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.stream.plan import HaloPlan


def agree_wanted(
    plan: HaloPlan, tensors: Sequence[tuple[str, Tensor]], num_sent: int, fetches: bool = True
) -> None:
    """Raise where only some ranks want a gradient that takes all of them.

    A rank that wants none has no backward pass, and the others would wait for it; and rows that
    nobody trains take another way (:mod:`sar.edges.constant`). Collective when
    a combination of shapes and wishes comes for the first time, so that later calls cost nothing;
    a rank that changes its wishes alone to what has been seen before is not noticed.

    Args:
        tensors: what a pass reads, with names for the error; as many on all ranks.
        num_sent: how many of them, the first ones, have gradients that travel. Of all together
            it matters whether any is wanted.
        fetches: whether backward fetches rows again, where that follows from the wishes.

    Raises ``ValueError`` on every rank, which names the tensors and the ranks.
    """
    if plan.group.size == 1:
        return
    wants = [tensor.requires_grad for _, tensor in tensors]
    vital = (any(wants), fetches, *wants[:num_sent])
    key = (torch.is_grad_enabled(), vital, *[tuple(tensor.shape[1:]) for _, tensor in tensors])
    if key in plan.wanted:
        return
    numbers = torch.tensor([_number(vital), _number(wants)])
    found = [(int(a), int(b)) for a, b in plan.group.all_gather(numbers)]
    if len({code for code, _ in found}) > 1:
        raise ValueError(_difference([name for name, _ in tensors], [code for _, code in found]))
    plan.wanted.add(key)


def _number(bits: Sequence[bool]) -> int:
    return sum(1 << place for place, bit in enumerate(bits[:62]) if bit)


def _difference(names: list[str], codes: list[int]) -> str:
    parts = []
    for place, name in enumerate(names[:62]):
        asking = [rank for rank, code in enumerate(codes) if code >> place & 1]
        if 0 < len(asking) < len(codes):
            parts.append(f"{name} requires a gradient on ranks {asking[:16]} of {len(codes)} only")
    return f"{'; '.join(dict.fromkeys(parts)) or 'inputs'}: expected the same on all ranks"
