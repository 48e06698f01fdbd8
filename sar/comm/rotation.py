"""The stream of rounds: halo rows in, gradients home, two rounds in flight, no barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm.group import Work
from sar.comm.halo import HaloPlan, Round

WINDOW = 2  # rounds in flight


@dataclass
class _Flight:
    """A posted exchange and the two buffers it owns until it has landed."""

    round: Round
    work: Work
    send: Tensor
    recv: Tensor


def fetch(
    plan: HaloPlan, rows: Tensor | Sequence[Tensor], rounds: Sequence[Round], keep: bool = False
) -> Iterator[tuple[Round, Tensor]]:
    """Stream the halo of ``rows``; the first rounds are on the wire when this returns.

    Args:
        rows: [num_rows, width] contiguous, owned; or several of one dtype, whose columns travel
            side by side as one row of the sum of their widths.
        rounds: the plan's rounds; every rank passes as many.
        keep: yield buffers that stay valid after the step.

    Yields:
        (round, [round.num_recv, width]): the halo rows of the round, ordered by source rank and by
        the order they were asked for. Overwritten when the next round is taken, unless ``keep``.
    """
    flights: deque[_Flight] = deque()
    columns = [rows] if isinstance(rows, Tensor) else rows
    for step in rounds[:WINDOW]:
        flights.append(_post_fetch(plan, columns, step, keep))
    return _land(plan, columns, rounds, keep, flights)


def _land(
    plan: HaloPlan,
    rows: Sequence[Tensor],
    rounds: Sequence[Round],
    keep: bool,
    flights: deque[_Flight],
) -> Iterator[tuple[Round, Tensor]]:
    for index in range(len(rounds)):
        flight = flights.popleft()
        flight.work.wait()
        plan.group.pool.give(flight.send)
        yield flight.round, flight.recv
        if not keep:
            plan.group.pool.give(flight.recv)
        del flight
        if index + WINDOW < len(rounds):
            flights.append(_post_fetch(plan, rows, rounds[index + WINDOW], keep))


def _post_fetch(plan: HaloPlan, rows: Sequence[Tensor], step: Round, keep: bool) -> _Flight:
    group, like, width = plan.group, rows[0], sum(part.shape[1] for part in rows)
    send = group.pool.take((step.num_send, width), like.dtype, like.device)
    start = 0
    for peer in step.targets:
        stop = start + step.send_counts[peer]
        _gather(rows, plan.send_idx[peer], send[start:stop])
        start = stop
    shape = (step.num_recv, width)
    recv = like.new_empty(shape) if keep else group.pool.take(shape, like.dtype, like.device)
    work = group.exchange(recv, send, step.recv_counts, step.send_counts)
    return _Flight(step, work, send, recv)


def _gather(rows: Sequence[Tensor], idx: Tensor | None, out: Tensor) -> None:
    """Fill ``out`` [n, width] with rows ``idx`` of each tensor, side by side."""
    for part, columns in zip(rows, out.split([p.shape[1] for p in rows], dim=1), strict=True):
        if idx is None:
            columns.copy_(part)
        else:
            torch.index_select(part, 0, idx, out=columns)


def add_rows(home: Tensor, idx: Tensor, rows: Tensor) -> None:
    """home[idx] += rows, an index as often as it comes."""
    home.index_add_(0, idx.long(), rows)  # twice as fast as int32


class GradientReturn:
    """Sends gradients of halo rows to their owners and adds what comes home; a bounded window.

    Args:
        width, dtype: of the rows on the wire.
        local: computes the owned rows' own gradient, [num_rows, width] in the dtype to accumulate
            in; called once, when rounds are in flight already.
        combine: what is done with rows that come home instead of adding them.
        window: rounds in flight; fewer where a fetch is in flight beside them.
    """

    def __init__(
        self,
        plan: HaloPlan,
        width: int,
        dtype: torch.dtype,
        local: Callable[[], Tensor],
        combine: Callable[[Tensor, Tensor, Tensor], None] = add_rows,
        window: int = WINDOW,
    ) -> None:
        self.plan, self.width, self.dtype, self._local = plan, width, dtype, local
        self._combine, self._window = combine, window
        self._home: Tensor | None = None
        self._flights: deque[_Flight] = deque()

    def buffer(self, step: Round) -> Tensor:
        """[step.num_recv, width] uninitialised; fill every row, then :meth:`send` it.

        When the window is full, first adds the oldest round home.
        """
        while len(self._flights) >= self._window:
            self._add_home()
        return self._take(step.num_recv)

    def send(self, step: Round, grads: Tensor) -> None:
        """Post one round."""
        recv = self._take(step.num_send)
        work = self.plan.group.exchange(recv, grads, step.send_counts, step.recv_counts)
        self._flights.append(_Flight(step, work, grads, recv))

    def finish(self) -> Tensor:
        """Wait for what is in flight; the whole gradient of the owned rows."""
        home = self._own()
        while self._flights:
            self._add_home()
        return home

    def _own(self) -> Tensor:
        if self._home is None:
            self._home = self._local()
        return self._home

    def _take(self, num_rows: int) -> Tensor:
        pool, device = self.plan.group.pool, self.plan.device
        return pool.take((num_rows, self.width), self.dtype, device)

    def _add_home(self) -> None:
        home, flight = self._own(), self._flights.popleft()
        flight.work.wait()
        pool = self.plan.group.pool
        pool.give(flight.send)
        start = 0
        for peer in flight.round.targets:
            stop = start + flight.round.send_counts[peer]
            idx = self.plan.send_idx[peer]
            grads = flight.recv[start:stop].to(home.dtype)
            if idx is not None:
                self._combine(home, idx, grads)
            elif self._combine is add_rows:
                home.add_(grads)
            else:
                self._combine(home, torch.arange(len(home), device=home.device), grads)
            start = stop
        pool.give(flight.recv)
