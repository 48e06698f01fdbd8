"""Requests to the owners of rows and their replies: two exchanges, and a status word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.comm import Group
from sar.errors import SarError

_FINE, _FAILED, _STOPS = range(3)
_NOTHING = torch.empty(1, 0, dtype=torch.int64)


class Stopped(SarError):
    """Some rank went no further."""

    def __init__(self, ranks: list[int], step: int) -> None:
        named = ", ".join(map(str, ranks))
        super().__init__(
            f"rank {named} left the loader before step {step}; expected every rank to go through "
            "its loader at the same time and as far"
        )


class Swap:
    """Ranks that ask each other for things of known sizes; all calls are collective.

    A status word and the step travel with the sizes of every request, so that an error on one rank
    is raised on all, and ranks that are not at the same step are told.

    Args:
        width: sizes of a request at most. Every request has room for them, since ranks that fail
            or stop do not know what the others ask for.

    Attributes:
        step: of this rank; the others have to be at the same.
        is_over: whether all ranks have come to their end, or to an error, or one has stopped.
    """

    def __init__(self, group: Group, width: int) -> None:
        self.group, self.width = group, width
        self.step, self.is_over = 0, False

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
        came = group.all_to_all(told, ones, ones)
        heads = came[:, :2].tolist()
        if any(head != [_FINE, self.step] for head in heads):
            self.is_over = True
            self._raise(heads, error)
        return came[:, 2 : 2 + mine.shape[1]]

    def _raise(self, heads: list[list[int]], error: Exception | None) -> None:
        """What the ranks' status words and steps say."""
        states = [state for state, _ in heads]
        if _FAILED in states:
            self.group.agree(error, "sampling")
        if _STOPS in states:
            raise Stopped([p for p, state in enumerate(states) if state == _STOPS], self.step)
        raise SarError(
            f"ranks are at steps {[step for _, step in heads]} of their loaders; expected every "
            "rank to go through its loader at the same time and as far"
        )

    def finish(self) -> None:
        """Return when all ranks have come to their end."""
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
