"""Requests to the owners of rows and their replies: two exchanges, and a status word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import Group
from sar.errors import CommError, SarError

_FINE, _FAILED, _STOPS = range(3)
_NOTHING = torch.empty(1, 0, dtype=torch.int64)
_TOGETHER = "expected every rank to go through its loader at the same time and as far"


class Stopped(SarError):
    """Some ranks of so many went no further.

    Attributes:
        is_misled: whether others would have.
    """

    def __init__(
        self, ranks: list[int], size: int, step: int, names: Sequence[str] = ()
    ) -> None:
        self.is_misled = len(ranks) < size
        named = ", ".join(names[rank] if names else str(rank) for rank in ranks)
        named = named if names else f"rank {named}"
        where = f" before step {step}" if step >= 0 else ""
        super().__init__(f"{named} left the loader{where}; {_TOGETHER}")


class Swap:
    """Ranks that ask each other for things of known sizes; all calls are collective.

    A status word and the step travel with the sizes of every request, so that an error on one rank
    is raised on all, and ranks that are not at the same step are told.

    Args:
        width: sizes of a request at most. Every request has room for them, since ranks that fail
            or stop do not know what the others ask for.

    Attributes:
        step: of this rank; the others have to be at the same. Below 0: none that means anything.
        is_over: whether no epoch has begun, or all ranks have come to its end, or to an error, or
            one has stopped.
        num_leaving: ranks that stop where a loop is left.
    """

    def __init__(self, group: Group, width: int) -> None:
        self.group, self.width = group, width
        self.step, self.is_over, self.num_leaving = 0, True, group.size
        self._left = _TOGETHER  # what may be why the others do not come

    def sizes(self, mine: Tensor) -> Tensor:
        """int64 [P, S] what each rank says to this one, of what this rank says to each."""
        return self._told(mine, _FINE, None)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` on every rank, in place of what they expect next."""
        self._told(_NOTHING.expand(self.group.size, 0), _FAILED, error)

    def stop(self) -> None:
        """Raise :class:`Stopped` on every rank, in place of what they expect next."""
        self._told(_NOTHING.expand(self.group.size, 0), _STOPS, None)

    def _told(self, mine: Tensor, status: int, error: Exception | None) -> Tensor:
        group, ones = self.group, [1] * self.group.size
        told = torch.zeros(group.size, 2 + self.width, dtype=torch.int64)
        told[:, 0], told[:, 1] = status, self.step
        told[:, 2 : 2 + mine.shape[1]] = mine
        try:
            came = group.all_to_all(told, ones, ones)
        except CommError as lost:
            if self.is_over:
                raise
            raise CommError(f"{lost}, in a loop over batches; {self._left}") from lost
        heads = came[:, :2].tolist()
        if any(head != [_FINE, self.step] for head in heads):
            self.is_over = True
            self._raise(heads, error)
        self._left = _TOGETHER
        return came[:, 2 : 2 + mine.shape[1]]

    def _raise(self, heads: list[list[int]], error: Exception | None) -> None:
        """What the ranks' status words and steps say."""
        states = [state for state, _ in heads]
        if _FAILED in states:
            self.group.agree(error, "sampling")
        if _STOPS in states:
            ranks = [p for p, state in enumerate(states) if state == _STOPS]
            stopped = Stopped(ranks, self.num_leaving, self.step, self.group.names)
            self._left = str(stopped) if stopped.is_misled else _TOGETHER
            raise stopped
        steps = [step for _, step in heads]
        raise SarError(f"ranks are at steps {steps} of their loaders; {_TOGETHER}")

    def meet(self) -> None:
        """Return when all ranks have come here; raises what another rank failed with."""
        self._told(_NOTHING.expand(self.group.size, 0), _FINE, None)

    def share(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, rank after rank, on every rank."""
        size = self.group.size
        came = self.sizes(torch.full((size, 1), len(rows))).view(-1).tolist()
        return self.send(rows.repeat(size, *[1] * (rows.dim() - 1)), [len(rows)] * size, came)

    def send_much(
        self, rows: Tensor, give: Sequence[int], take: Sequence[int], out: Tensor
    ) -> Tensor:
        """As :meth:`send`, large messages, none to this rank itself: one distance at a time."""
        distances = range(1, self.group.size)
        self.group.exchange(out, rows, list(take), list(give), distances).wait()
        return out

    def send(
        self, rows: Tensor, give: Sequence[int], take: Sequence[int], out: Tensor | None = None
    ) -> Tensor:
        """What all send, rank after rank; often nothing to this rank itself."""
        out = rows.new_empty((sum(take), *rows.shape[1:])) if out is None else out
        self.group.exchange(out, rows, list(take), list(give)).wait()
        return out
