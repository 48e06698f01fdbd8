"""Requests to the owners of rows and their replies: two exchanges, and a status word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import Group


class Swap:
    """Ranks that ask each other for things of known sizes; all calls are collective.

    A status word travels with the sizes of every request, so that an error on one rank, before
    what it would have sent, is raised on all.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def sizes(self, mine: Tensor, error: Exception | None = None) -> Tensor:
        """[P, S] what each rank says to this one; raises on every rank where one has an error.

        Args:
            mine: int64 [P, S], what this rank says to each.
        """
        status = torch.full((self.group.size, 1), int(error is not None))
        told = torch.cat([mine, status], dim=1)
        ones = [1] * self.group.size
        came = self.group.all_to_all(told, ones, ones)
        if came[:, -1].any():
            self.group.agree(error, "sampling")
        return came[:, :-1]

    def send(
        self, rows: Tensor, give: Sequence[int], take: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """What the others send, rank after rank; ``give`` and ``take`` are 0 for this rank."""
        out = rows.new_empty((sum(take), *rows.shape[1:])) if out is None else out
        self.group.exchange(out, rows, list(take), list(give)).wait()
        return out
