"""One pass over the edges of a relation: the own shard, then one a round with the rows it reads.

Below it the stream of rounds: halo rows in, two rounds in flight, no barrier; and gradients of halo
rows on their way home, as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor

from sar.comm.meter import Work
from sar.config import Policy
from sar.kernels import Csc
from sar.stream.plan import Combine, HaloPlan, Round

WINDOW = 2  # rounds in flight
Message = tuple[Tensor, list[int]]  # a buffer and how much of it belongs to each rank


class Shards(Protocol):
    """Edges by destination, a shard for the own rows and one for each round."""

    @property
    def plan(self) -> HaloPlan:
        """Which rows travel."""

    def local(self, *, order: bool) -> Csc:
        """The edges out of owned rows."""

    def shards(self, num_rounds: int, *, order: bool) -> list[Csc]:
        """The edges of each round; sources index the rows that come in it."""


@dataclass
class Step:
    """A shard and the rows that its sources index.

    Attributes:
        round: ``None`` for the own shard.
        rows: tensor of the owned rows, or [round.num_recv, width] of the round; overwritten when
            the next step is taken. ``None`` where no rows travel.
    """

    number: int
    round: Round | None
    shard: Csc
    rows: Any


class Pass:
    """The steps of one pass, in the order in which they are to be computed.

    Rounds are on the wire as soon as it is made, so that the own shard, which comes first, is
    computed meanwhile. On one rank it is the same loop with that step alone.

    Args:
        rows: [num_src, width] owned rows, contiguous; ``None``: nothing travels.
        row_bytes: of a row on the wire, by which rounds are chosen; those of ``rows`` by default.
        order: with the position of each edge among the local ones.
        keep: a list that gets the rows of each round, which stay valid then.
        kept: rows of each round that were kept, in place of fetched ones.
    """

    def __init__(
        self,
        edges: Shards,
        policy: Policy,
        rows: Tensor | None,
        *,
        row_bytes: int | None = None,
        order: bool = False,
        keep: list[Tensor] | None = None,
        kept: Sequence[Tensor] = (),
    ) -> None:
        if row_bytes is None:
            row_bytes = 0 if rows is None else rows.shape[1] * rows.element_size()
        self._edges, self._rows, self._order = edges, rows, order
        self._keep, self._kept = keep, kept
        self.num_rounds = edges.plan.num_rounds(policy, row_bytes)
        self.rounds = edges.plan.rounds(self.num_rounds)
        self._stream: Stream | None = None
        if rows is not None and not kept:
            messages = RowMessages(edges.plan, [rows], keep is not None)
            self._stream = Stream(messages, self.rounds, WINDOW)

    def __iter__(self) -> Iterator[Step]:
        yield Step(0, None, self._edges.local(order=self._order), self._rows)
        shards = self._edges.shards(self.num_rounds, order=self._order)
        halos: Iterator[Any] = iter(self._kept) if self._kept else repeat(None)
        rounds = zip(self.rounds, shards, strict=True)
        for number, (step, shard) in enumerate(rounds, start=1):
            halo = next(halos) if self._stream is None else next(self._stream)[1]
            yield Step(number, step, shard, halo)
            if self._keep is not None and halo is not None:
                self._keep.append(halo)
        if self._stream is not None:
            self._stream.free()


def by_rank(peers: Sequence[int], rows: Sequence[int], num_ranks: int) -> list[int]:
    """Counts of rows for every rank of the group, zero for those that are no peers."""
    counts = [0] * num_ranks
    for peer, count in zip(peers, rows, strict=True):
        counts[peer] = count
    return counts


class RowMessages:
    """Source rows on their way to the ranks that read them.

    ``rows`` are [num_rows, *] of one dtype, whose columns travel side by side. With ``keep`` rows
    that land stay valid, in memory of their own.
    """

    def __init__(self, plan: HaloPlan, rows: Sequence[Tensor], keep: bool = False) -> None:
        self.plan, self.rows, self.keep = plan, rows, keep
        self.width = rows[0].shape[1] if len(rows) == 1 else sum([part.shape[1] for part in rows])
        self.dtype, self.device = rows[0].dtype, rows[0].device
        self.row_bytes = self.width * self.dtype.itemsize

    def sent(self, step: Round) -> Message:
        """The buffer this rank sends in a round, filled."""
        shape = step.num_send, self.width
        send = self.plan.group.pool.take(shape, self.dtype, self.device, step.most)
        self.plan.gather_round(step, self.rows, send)
        return send, by_rank(step.targets, step.send_rows, step.num_ranks)

    def received(self, step: Round) -> Message:
        """An empty buffer for the rows it receives."""
        shape = step.num_recv, self.width
        if self.keep:
            recv = torch.empty(shape, dtype=self.dtype, device=self.device)
        else:
            recv = self.plan.group.pool.take(shape, self.dtype, self.device, step.most)
        return recv, by_rank(step.sources, step.recv_rows, step.num_ranks)

    def landed(self, step: Round, recv: Tensor) -> Tensor:
        """Rows [step.num_recv, width] from the received buffer."""
        return recv


@dataclass
class Flight:
    """A posted exchange and the two buffers it owns until it has landed."""

    round: Round
    work: Work
    send: Tensor
    recv: Tensor


def fetch(
    plan: HaloPlan,
    rows: Tensor | Sequence[Tensor],
    rounds: Sequence[Round],
    keep: bool = False,
    window: int = WINDOW,
    ahead: bool = False,
) -> Stream:
    """Stream the halo of ``rows``; the first rounds are on the wire when this returns.

    Args:
        rows: [num_rows, width] contiguous, owned; or several of one dtype, whose columns travel
            side by side as one row of the sum of their widths.
        rounds: the plan's rounds; every rank passes as many.
        keep: yield buffers that stay valid after the step.
        ahead: post the next round before the rows of one are used, not after: compared to a second
            one in the window it takes a buffer less, and waits for the slower rank.

    Yields (round, [round.num_recv, width]): the halo rows of the round, ordered by source rank and
    by the order they were asked for. Overwritten when the next round is taken, unless ``keep``.
    """
    columns = [rows] if isinstance(rows, Tensor) else rows
    return Stream(RowMessages(plan, columns, keep), rounds, window, ahead)


class Stream:
    """The rounds of one fetch, an iterator over (round, its halo rows)."""

    def __init__(
        self, messages: RowMessages, rounds: Sequence[Round], window: int, ahead: bool = False
    ) -> None:
        self._messages, self._window, self._ahead = messages, window, ahead
        self._waiting, self._flights = deque(rounds), deque[Flight]()
        self._halo: Tensor | None = None
        if rounds:
            self._post()

    def _post(self) -> None:
        plan, messages = self._messages.plan, self._messages
        while self._waiting and len(self._flights) < self._window:
            step = self._waiting.popleft()
            send, send_counts = messages.sent(step)
            recv, recv_counts = messages.received(step)
            distances = plan.paced(step, messages.row_bytes)
            work = plan.group.exchange(recv, send, recv_counts, send_counts, distances)
            if plan.group.meter.notes is not None:
                plan.group.meter.count_rows(step.num_send, step.num_recv)
            self._flights.append(Flight(step, work, send, recv))

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[Round, Tensor]:
        if self._halo is not None:
            self.free()
        if self._waiting:
            self._post()
        if not self._flights:
            raise StopIteration
        flight = self._flights.popleft()
        flight.work.wait()
        self._messages.plan.group.pool.give(flight.send)
        halo = self._messages.landed(flight.round, flight.recv)
        if not self._messages.keep:
            self._halo = halo
        if self._ahead:
            self._post()
        return flight.round, halo

    def free(self) -> None:
        """Give the memory of the rows that came last back, before the next are taken."""
        if self._halo is not None:
            self._messages.plan.group.pool.give(self._halo)
            self._halo = None


class GradientMessages:
    """Gradients of halo rows on their way to their owners, where ``combine`` adds them."""

    def __init__(self, plan: HaloPlan, width: int, dtype: torch.dtype, combine: Combine) -> None:
        self.plan, self.width, self.dtype, self.combine = plan, width, dtype, combine
        self.row_bytes = width * dtype.itemsize

    def rows(self, step: Round) -> Tensor:
        """Uninitialised [step.num_recv, width] from the pool."""
        return self._take(step.num_recv, step.most)

    def sent(self, step: Round, grads: Tensor) -> Message:
        """The message this rank sends of ``grads`` [step.num_recv, width], which are given up."""
        return grads, by_rank(step.sources, step.recv_rows, step.num_ranks)

    def received(self, step: Round) -> Message:
        """An empty buffer for the gradients it receives."""
        return self._take(step.num_send, step.most), by_rank(
            step.targets, step.send_rows, step.num_ranks
        )

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        """Add received gradients to ``home`` [num_rows, width] and give their buffer back."""
        self.plan.scatter_round(step, home, recv, self.combine)
        self.plan.group.pool.give(recv)

    def _take(self, num_rows: int, most: int) -> Tensor:
        plan = self.plan
        return plan.group.pool.take((num_rows, self.width), self.dtype, plan.device, most)


class GradientReturn:
    """Sends gradients of halo rows to their owners, takes in what comes home; a bounded window.

    Args:
        local: computes the owned rows' own gradient, [num_rows, width] in the dtype to accumulate
            in; called once, when rounds are in flight already.
        window: rounds in flight; fewer where a fetch is in flight beside them.
        local_last: call ``local`` once the first round has come home and what was sent in it is
            free, not while it is on its way.
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
        """Uninitialised [step.num_recv, width]; fill every row, then :meth:`send` it. When the
        window is full, first adds the oldest round home."""
        while len(self._flights) >= self._window:
            self._add_home()
        return self._messages.rows(step)

    def send(self, step: Round, grads: Tensor) -> None:
        plan = self._messages.plan
        send, send_counts = self._messages.sent(step, grads)
        recv, recv_counts = self._messages.received(step)
        distances = [-distance for distance in plan.paced(step, self._messages.row_bytes)]
        work = plan.group.exchange(recv, send, recv_counts, send_counts, distances)
        if plan.group.meter.notes is not None:
            plan.group.meter.count_rows(step.num_recv, step.num_send)
        self._flights.append(Flight(step, work, send, recv))

    def each(self, rounds: Sequence[Round]) -> Iterator[tuple[Round, Tensor]]:
        """Yield a buffer for every round, sent when the next one is asked for."""
        for step in rounds:
            grads = self.buffer(step)
            yield step, grads
            self.send(step, grads)
            del grads

    def finish(self) -> Tensor:
        """Wait for the rounds in flight; the whole gradient of the owned rows."""
        home = self.own()
        self.settle()
        return home

    def settle(self) -> None:
        """Wait for the rounds in flight, whose buffers are free then."""
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


class Whole:
    """A gradient of owned rows that is complete, as :class:`GradientReturn` hands it out."""

    def __init__(self, grads: Tensor) -> None:
        self._grads = grads

    def own(self) -> Tensor:
        return self._grads

    def finish(self) -> Tensor:
        return self._grads

    def settle(self) -> None:
        return None
