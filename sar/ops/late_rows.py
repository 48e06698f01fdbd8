"""Sums over edges that are handed out while the last rows for them are still on the wire.

Note [Late rows]. ``self.fc_self(h) + self.fc_neigh(neigh)`` needs the rows of others only where the
two are added. So where the code of DGL's layers sums rows over edges, the sum is handed out with
this rank's own edges in it; the product of the own rows is computed while the others' rows
travel, and whoever looks at the sum waits for them first. That is told by a torch function mode,
which sees every function that gets the tensor; see :mod:`sar.ops.linear_sum`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class LateRows:
    """Sums that are not whole yet; not to be looked at before :meth:`settle`."""

    def __init__(self) -> None:
        self._finish: dict[int, tuple[Tensor, Callable[[], None]]] = {}

    def add(self, rows: Tensor, finish: Callable[[], None]) -> None:
        """``rows`` are whole once ``finish`` is called."""
        self._finish[id(rows)] = rows, finish

    @property
    def are_due(self) -> bool:
        """Whether any sum is not whole."""
        return bool(self._finish)

    def any_of(self, ids: Iterable[int]) -> bool:
        """Whether one of the tensors with these ``id``s is not whole."""
        return not self._finish.keys().isdisjoint(ids)

    def settle(self) -> None:
        """Wait for the rows of all sums, in the order in which they were begun."""
        while self._finish:
            _, finish = self._finish.pop(next(iter(self._finish)))
            with torch.no_grad(), torch._C.DisableTorchFunction():
                finish()


class _State(threading.local):
    late: LateRows | None = None


_state = _State()


def late_rows() -> LateRows | None:
    """Where sums may be added now, if anywhere."""
    return _state.late


def swap_late_rows(late: LateRows | None) -> LateRows | None:
    """Say where they may be added from now on; where they could before."""
    before, _state.late = _state.late, late
    return before
