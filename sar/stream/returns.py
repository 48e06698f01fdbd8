"""Gradients of halo rows on their way home, round by round, two of them in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from sar.stream.passes import WINDOW, Flight, Message
from sar.stream.plan import Combine, HaloPlan, Round


class GradientMessages:
    """Gradients of halo rows on their way to the owners of the rows.

    Args:
        width, dtype: of a row.
        combine: adds rows that come home to the owned ones.

    Attributes:
        row_bytes: of a row on the wire.
    """

    def __init__(self, plan: HaloPlan, width: int, dtype: torch.dtype, combine: Combine) -> None:
        self.plan, self.width, self.dtype, self.combine = plan, width, dtype, combine
        self.row_bytes = width * dtype.itemsize

    def rows(self, step: Round) -> Tensor:
        """[step.num_recv, width] uninitialised, from the pool."""
        return self._take(step.num_recv, step.most)

    def sent(self, step: Round, grads: Tensor) -> Message:
        """What this rank sends of ``grads`` [step.num_recv, width], which are given up."""
        return grads, step.recv_counts

    def received(self, step: Round) -> Message:
        """Room for what it gets."""
        return self._take(step.num_send, step.most), step.send_counts

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        """Add what it got, which goes back to the pool, to ``home`` [num_rows, width]."""
        self.plan.scatter_round(step, home, recv, self.combine)
        self.plan.group.pool.give(recv)

    def _take(self, num_rows: int, most: int) -> Tensor:
        plan = self.plan
        return plan.group.pool.take((num_rows, self.width), self.dtype, plan.device, most)


class GradientReturn:
    """Sends gradients of halo rows to their owners, takes in what comes home; a bounded window.

    Args:
        messages: what they travel in.
        local: computes the owned rows' own gradient, [num_rows, width] in the dtype to accumulate
            in; called once, when rounds are in flight already.
        window: rounds in flight; fewer where a fetch is in flight beside them.
        local_last: ``local`` is called once the first round has come home and what was sent in it
            is free, in place of while it is on its way.
    """

    def __init__(
        self,
        messages: GradientMessages,
        local: Callable[[], Tensor],
        window: int = WINDOW,
        local_last: bool = False,
    ) -> None:
        self._messages = messages
        self._local, self._window, self._local_last = local, window, local_last
        self._home: Tensor | None = None
        self._flights: deque[Flight] = deque()

    def buffer(self, step: Round) -> Tensor:
        """[step.num_recv, width] uninitialised; fill every row, then :meth:`send` it.

        When the window is full, first adds the oldest round home.
        """
        while len(self._flights) >= self._window:
            self._add_home()
        return self._messages.rows(step)

    def send(self, step: Round, grads: Tensor) -> None:
        """Post one round."""
        plan = self._messages.plan
        send, send_counts = self._messages.sent(step, grads)
        recv, recv_counts = self._messages.received(step)
        distances: Sequence[int] = ()
        if plan.is_large(self._messages.row_bytes):
            distances = [-distance for distance in step.distances]
        work = plan.group.exchange(recv, send, recv_counts, send_counts, distances)
        if plan.group.meter.told is not None:
            plan.group.meter.count_rows(step.num_recv, step.num_send)
        self._flights.append(Flight(step, work, send, recv))

    def each(self, rounds: Sequence[Round]) -> Iterator[tuple[Round, Tensor]]:
        """A buffer for every round, sent when the next one is asked for."""
        for step in rounds:
            grads = self.buffer(step)
            yield step, grads
            self.send(step, grads)
            del grads

    def finish(self) -> Tensor:
        """Wait for what is in flight; the whole gradient of the owned rows."""
        home = self.own()
        self.settle()
        return home

    def settle(self) -> None:
        """Wait for what is in flight, whose buffers are free then."""
        while self._flights:
            self._add_home()

    def own(self) -> Tensor:
        """The gradient of the owned rows as far as it has come, without waiting for the rest."""
        if self._home is None:
            self._home = self._local()
            del self._local  # and what it holds
        return self._home

    def _add_home(self) -> None:
        pool = self._messages.plan.group.pool
        if not self._local_last:
            self.own()
        flight = self._flights.popleft()
        flight.work.wait()
        pool.give(flight.send)
        step, recv = flight.round, flight.recv
        del flight  # and what was sent, whose memory the pool may give back
        if self._home is None:
            pool.clear()
        self._messages.add(step, recv, self.own())
