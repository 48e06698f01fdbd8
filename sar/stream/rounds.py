"""The stream of rounds: halo rows in, gradients home, two rounds in flight, no barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm.buffers import BufferPool
from sar.comm.group import Work
from sar.config import EXACT, Lossy
from sar.stream.codec import Codec, codec_of
from sar.stream.messages import GradientMessages, RowMessages
from sar.stream.plan import Combine, HaloPlan, Round

WINDOW = 2  # rounds in flight


@dataclass
class _Flight:
    """A posted exchange and the two buffers it owns until it has landed."""

    round: Round
    work: Work
    send: Tensor
    recv: Tensor

    def land(self, pool: BufferPool) -> tuple[Round, Tensor]:
        """Wait for it; the round and what came. What was sent is free then."""
        self.work.wait()
        pool.give(self.send)
        return self.round, self.recv


def fetch(
    plan: HaloPlan,
    rows: Tensor | Sequence[Tensor],
    rounds: Sequence[Round],
    keep: bool = False,
    lossy: Lossy = EXACT,
    window: int = WINDOW,
    ahead: bool = False,
) -> Stream:
    """Stream the halo of ``rows``; the first rounds are on the wire when this returns.

    Args:
        rows: [num_rows, width] contiguous, owned; or several of one dtype, whose columns travel
            side by side as one row of the sum of their widths.
        rounds: the plan's rounds; every rank passes as many.
        keep: yield buffers that stay valid after the step.
        lossy: says what rows travel as.
        window: rounds in flight.
        ahead: the next round goes out before the rows of one are used, not after: in place of a
            second in the window it takes a buffer less, and waits for whoever is slower.

    Yields:
        (round, [round.num_recv, width]): the halo rows of the round, ordered by source rank and by
        the order they were asked for. Overwritten when the next round is taken, unless ``keep``.
    """
    columns = [rows] if isinstance(rows, Tensor) else rows
    codec = codec_for(plan, lossy.wire_dtype, columns[0].dtype)
    return fetch_messages(RowMessages(plan, columns, keep, codec), rounds, window, ahead)


def fetch_messages(
    messages: RowMessages, rounds: Sequence[Round], window: int = WINDOW, ahead: bool = False
) -> Stream:
    """:func:`fetch` with the rows in other messages."""
    return Stream(messages, rounds, window, ahead)


def codec_for(plan: HaloPlan, name: str | None, dtype: torch.dtype) -> Codec | None:
    """What rows of a dtype are coded by; ``None``: they travel as they are."""
    group = plan.group
    return None if name is None else codec_of(name, dtype, group.seeds.noise(group.rank))


class Stream:
    """The rounds of one fetch, an iterator: what is on the wire, and what landed."""

    def __init__(
        self, messages: RowMessages, rounds: Sequence[Round], window: int, ahead: bool
    ) -> None:
        self._messages, self._window, self._ahead = messages, window, ahead
        self._waiting, self._flights = deque(rounds), deque[_Flight]()
        self._halo: Tensor | None = None
        self._post()

    def _post(self) -> None:
        """Put rounds on the wire until the window is full."""
        plan, messages = self._messages.plan, self._messages
        while self._waiting and len(self._flights) < self._window:
            step = self._waiting.popleft()
            send, send_counts = messages.sent(step)
            recv, recv_counts = messages.received(step)
            distances = step.distances if plan.is_large(messages.row_bytes) else ()
            work = plan.group.exchange(recv, send, recv_counts, send_counts, distances)
            if plan.group.meter.told is not None:
                plan.group.meter.count_rows(step.num_send, step.num_recv)
            self._flights.append(_Flight(step, work, send, recv))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[Round, Tensor]:
        self.free()
        self._post()
        if not self._flights:
            raise StopIteration
        step, recv = self._flights.popleft().land(self._messages.plan.group.pool)
        halo = self._messages.landed(step, recv)
        if not self._messages.keep:
            self._halo = halo
        if self._ahead:
            self._post()
        return step, halo

    def free(self) -> None:
        """The rows that came last are used: others may take their memory before the next are."""
        if self._halo is not None:
            self._messages.plan.group.pool.give(self._halo)
            self._halo = None


class GradientReturn:
    """Sends gradients of halo rows to their owners, takes in what comes home; a bounded window.

    Args:
        width, dtype: of the rows on the wire.
        local: computes the owned rows' own gradient, [num_rows, width] in the dtype to accumulate
            in; called once, when rounds are in flight already.
        combine: adds rows that come home to the owned ones.
        window: rounds in flight; fewer where a fetch is in flight beside them.
        lossy: says what rows travel as.
        messages: what they travel in, if not as they are.
        local_last: ``local`` is called once the first round has come home and what was sent in it
            is free, in place of while it is on its way.
    """

    def __init__(
        self,
        plan: HaloPlan,
        width: int,
        dtype: torch.dtype,
        local: Callable[[], Tensor],
        combine: Combine,
        window: int = WINDOW,
        lossy: Lossy = EXACT,
        messages: GradientMessages | None = None,
        local_last: bool = False,
    ) -> None:
        codec = codec_for(plan, lossy.gradient_wire_dtype, dtype)
        self._messages = messages or GradientMessages(plan, width, dtype, combine, codec)
        self._local, self._window, self._local_last = local, window, local_last
        self._home: Tensor | None = None
        self._flights: deque[_Flight] = deque()

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
        back = [-distance for distance in step.distances]
        distances = back if plan.is_large(self._messages.row_bytes) else ()
        work = plan.group.exchange(recv, send, recv_counts, send_counts, distances)
        if plan.group.meter.told is not None:
            plan.group.meter.count_rows(step.num_recv, step.num_send)
        self._flights.append(_Flight(step, work, send, recv))

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
        step, recv = self._flights.popleft().land(pool)
        if self._home is None:
            pool.clear()
        self._messages.add(step, recv, self.own())
