"""Rows that each go to a rank of their own choice, and questions that come back answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sar.comm.group import Group


def exchange_counts(group: Group, counts: Sequence[int]) -> list[int]:
    """Tell each rank how many rows this one has for it; learn the same from each."""
    ones = [1] * group.size
    return group.all_to_all(torch.tensor(counts, dtype=torch.int64), ones, ones).tolist()


def send_rows(group: Group, owner: Tensor, rows: Tensor) -> Tensor:
    """Each row to the rank that ``owner`` names; collective.

    Args:
        owner: int64 [n] ranks.
        rows: [n, ...], equally wide on all ranks.

    Returns:
        The rows meant for this rank, by the rank they come from and then in the order given there.
    """
    order, sent, received = _plan(group, owner)
    return group.all_to_all(rows.index_select(0, order), sent, received)


def ask_rows(
    group: Group, owner: Tensor, rows: Tensor, answer: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each row to its owner, who answers it: the answers in the order of ``rows``; collective.

    Args:
        answer: called once on what this rank was asked, [m, ...]; returns m rows.
    """
    order, sent, received = _plan(group, owner)
    asked = group.all_to_all(rows.index_select(0, order), sent, received)
    home = group.all_to_all(answer(asked), received, sent)
    return torch.empty_like(home).index_copy_(0, order, home)


def _plan(group: Group, owner: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """The order by owner, and rows to and from each rank."""
    sent = torch.bincount(owner, minlength=group.size).tolist()
    return torch.argsort(owner, stable=True), sent, exchange_counts(group, sent)
