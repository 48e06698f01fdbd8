"""The stream of rounds: halo rows in, gradients home, two rounds in flight, no barrier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm.group import Work
from sar.comm.halo import Combine, HaloPlan, Round
from sar.comm.wire import Codec, block_rows, codec_of
from sar.config import EXACT, Lossy

WINDOW = 2  # rounds in flight


@dataclass
class _Flight:
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
    lossy: Lossy = EXACT,
    window: int = WINDOW,
) -> Iterator[tuple[Round, Tensor]]:
    """Stream the halo of ``rows``; the first rounds are on the wire when this returns.

    Args:
        rows: [num_rows, width] contiguous, owned; or several of one dtype, whose columns travel
            side by side as one row of the sum of their widths.
        rounds: the plan's rounds; every rank passes as many.
        keep: yield buffers that stay valid after the step.
        lossy: says what rows travel as.
        window: rounds in flight.

    Yields:
        (round, [round.num_recv, width]): the halo rows of the round, ordered by source rank and by
        the order they were asked for. Overwritten when the next round is taken, unless ``keep``.
    """
    columns = [rows] if isinstance(rows, Tensor) else rows
    codec = _codec(plan, lossy.wire_dtype, columns[0].dtype)
    stream = _Stream(plan, columns, rounds, keep, codec, window)
    for step in rounds[:window]:
        stream.post(step)
    return stream.land()


def _codec(plan: HaloPlan, name: str | None, dtype: torch.dtype) -> Codec | None:
    group = plan.group
    return None if name is None else codec_of(name, dtype, group.seeds.noise(group.rank))


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()


class _Stream:
    """The rounds of one fetch: what is on the wire, and what landed."""

    def __init__(
        self,
        plan: HaloPlan,
        rows: Sequence[Tensor],
        rounds: Sequence[Round],
        keep: bool,
        codec: Codec | None,
        window: int,
    ) -> None:
        self.window = window
        self.plan, self.rows, self.rounds, self.keep, self.codec = plan, rows, rounds, keep, codec
        self.width = sum(part.shape[1] for part in rows)
        self._flights: deque[_Flight] = deque()

    def post(self, step: Round) -> None:
        """Put one round on the wire."""
        group = self.plan.group
        send = self._take(step.num_send, self.codec, keep=False)
        start = 0
        for peer, num in zip(step.targets, step.send_rows, strict=True):
            stop = start + num
            self._fill(send[start:stop], peer)
            start = stop
        recv = self._take(step.num_recv, self.codec, keep=self.keep and self.codec is None)
        distances = step.distances if self.plan.is_large(_row_bytes(send)) else ()
        work = group.exchange(recv, send, step.recv_counts, step.send_counts, distances)
        self._flights.append(_Flight(step, work, send, recv))

    def land(self) -> Iterator[tuple[Round, Tensor]]:
        """Each round's rows as they land; the next but one is posted then."""
        pool = self.plan.group.pool
        for index in range(len(self.rounds)):
            flight = self._flights.popleft()
            flight.work.wait()
            pool.give(flight.send)
            halo = self._decoded(flight.recv)
            yield flight.round, halo
            if not self.keep:
                pool.give(halo)
            del flight, halo
            if index + self.window < len(self.rounds):
                self.post(self.rounds[index + self.window])

    def _fill(self, out: Tensor, peer: int) -> None:
        """What one peer gets, coded."""
        if self.codec is None:
            self.plan.gather(peer, self.rows, 0, out)
            return
        for low in range(0, len(out), block_rows(self.width)):
            part = out[low : low + block_rows(self.width)]
            rows = self.rows[0].new_empty((len(part), self.width))
            self.plan.gather(peer, self.rows, low, rows)
            self.codec.encode(rows, part)

    def _decoded(self, recv: Tensor) -> Tensor:
        if self.codec is None:
            return recv
        rows = self._take(len(recv), None, keep=self.keep)
        self.codec.decode_all(recv, rows)
        self.plan.group.pool.give(recv)
        return rows

    def _take(self, num_rows: int, codec: Codec | None, keep: bool) -> Tensor:
        like = self.rows[0]
        dtype = like.dtype if codec is None else codec.dtype
        width = self.width if codec is None else codec.width(self.width)
        if keep:
            return like.new_empty((num_rows, width), dtype=dtype)
        return self.plan.group.pool.take((num_rows, width), dtype, like.device)


class GradientReturn:
    """Sends gradients of halo rows to their owners, takes in what comes home; a bounded window.

    Args:
        width, dtype: of the rows on the wire.
        local: computes the owned rows' own gradient, [num_rows, width] in the dtype to accumulate
            in; called once, when rounds are in flight already.
        combine: adds rows that come home to the owned ones.
        window: rounds in flight; fewer where a fetch is in flight beside them.
        lossy: says what rows travel as.
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
    ) -> None:
        self.plan, self.width, self.dtype, self._local = plan, width, dtype, local
        self._codec = _codec(plan, lossy.gradient_wire_dtype, dtype)
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
        if self._codec is not None:
            rows, grads = grads, self._take(step.num_recv, self._codec)
            self._codec.encode_all(rows, grads)
            self.plan.group.pool.give(rows)
        recv = self._take(step.num_send, self._codec)
        back = [-distance for distance in step.distances]
        distances = back if self.plan.is_large(_row_bytes(grads)) else ()
        counts = step.send_counts, step.recv_counts
        work = self.plan.group.exchange(recv, grads, *counts, distances)
        self._flights.append(_Flight(step, work, grads, recv))

    def finish(self) -> Tensor:
        """Wait for what is in flight; the whole gradient of the owned rows."""
        home = self.own()
        while self._flights:
            self._add_home()
        return home

    def own(self) -> Tensor:
        """The gradient of the owned rows as far as it has come, without waiting for the rest."""
        if self._home is None:
            self._home = self._local()
            del self._local  # and what it holds
        return self._home

    def _take(self, num_rows: int, codec: Codec | None = None) -> Tensor:
        pool, device = self.plan.group.pool, self.plan.device
        width = self.width if codec is None else codec.width(self.width)
        return pool.take((num_rows, width), self.dtype if codec is None else codec.dtype, device)

    def _add_home(self) -> None:
        home, flight = self.own(), self._flights.popleft()
        flight.work.wait()
        pool = self.plan.group.pool
        pool.give(flight.send)
        landed = self._decoded(flight.recv)
        start = 0
        for peer, num in zip(flight.round.targets, flight.round.send_rows, strict=True):
            stop = start + num
            grads = landed[start:stop].to(home.dtype)
            self.plan.scatter(peer, home, grads, self._combine)
            start = stop
        pool.give(landed)

    def _decoded(self, recv: Tensor) -> Tensor:
        if self._codec is None:
            return recv
        rows = self._take(len(recv))
        self._codec.decode_all(recv, rows)
        self.plan.group.pool.give(recv)
        return rows
