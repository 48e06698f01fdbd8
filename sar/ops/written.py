"""Whether a result was written into since a backward pass was given it, on any rank."""

from __future__ import annotations

import torch
from torch import Tensor

from sar._private import version_of
from sar.comm import Group


class Writes:
    """What is written into a result from now on, known without keeping its memory alive.

    A backward pass that reads the result saves ``result.data``: autograd frees it like any saved
    tensor, but does not guard it. Its guard raises an error where the caller wrote, and here the
    result is computed again instead.
    """

    def __init__(self, result: Tensor) -> None:
        self._counter = result.detach()  # one count for both
        self._counter.data = result.new_empty(0)  # nothing is held, but it still counts
        self._version = version_of(self._counter)

    @property
    def happened(self) -> bool:
        """Whether anybody wrote."""
        return version_of(self._counter) != self._version


def any_rank(group: Group, happened: bool) -> bool:
    """Whether it happened on any rank, which may differ; collective."""
    if group.size == 1:
        return happened
    return bool(group.all_reduce(torch.tensor(int(happened)), "max"))
