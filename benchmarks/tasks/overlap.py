"""The same training step with a transport that costs nothing, and its exchanges alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import sar
from benchmarks import measure
from benchmarks.tasks import training
from sar.comm.group import Done
from sar.comm.meter import Work
from sar.stream import WINDOW


@dataclass(frozen=True)
class Moved:
    """One exchange of an epoch, or one sum of gradients (no counts)."""

    recv: torch.Size
    send: torch.Size
    dtype: torch.dtype
    recv_counts: Sequence[int] = ()
    send_counts: Sequence[int] = ()
    distances: Sequence[int] = ()


class Overlap(training.Sar):
    """Trains; trains with free exchanges; repeats the exchanges of an epoch without computing."""

    def start(self) -> None:
        super().start()
        self.overlapped = sar.overlap_gradients(self.model)

    def backward(self, loss: Tensor) -> None:
        self.overlapped.backward(loss)

    def compute_alone(self) -> float:
        """Wall seconds of an epoch whose exchanges return at once, with zeros in their rows."""
        with free_transport(self.group):
            return self.timed(self.step)

    def wire_alone(self) -> float:
        """Wall seconds of an epoch's exchanges, two in flight as in the stream, nothing computed.

        The exchanges are those of the last epoch that :meth:`watch` saw.
        """
        return self.timed(self.replay)

    def watch(self) -> dict[str, float]:
        """Train an epoch and remember what it exchanged; bytes that this rank has to send.

        A sum over P ranks cannot send less than 2 (P - 1) / P times its bytes from each of them.
        """
        self.moved: list[Moved] = []
        exchange, begin_sum = self.group.exchange, self.group.begin_sum

        def watched(recv: Tensor, send: Tensor, *plan: Sequence[int]) -> Work:
            self.moved.append(Moved(recv.shape, send.shape, send.dtype, *plan))
            return exchange(recv, send, *plan)

        def watched_sum(tensor: Tensor) -> Work:
            self.moved.append(Moved(tensor.shape, tensor.shape, tensor.dtype))
            return begin_sum(tensor)

        before = self.sent_bytes()
        with (
            mock.patch.object(self.group, "exchange", watched),
            mock.patch.object(self.group, "begin_sum", watched_sum),
        ):
            self.step()
        sums = sum(m.send.numel() * m.dtype.itemsize for m in self.moved if not m.recv_counts)
        share = 2 * (self.group.size - 1) / self.group.size
        return {"rows": self.sent_bytes() - before, "sums": share * sums}

    def replay(self) -> None:
        flights: deque[Work] = deque()
        sums = []
        for moved in self.moved:
            send = torch.zeros(moved.send, dtype=moved.dtype)
            if not moved.recv_counts:
                sums.append(self.group.begin_sum(send))
                continue
            if len(flights) == WINDOW:
                flights.popleft().wait()
            recv = torch.empty(moved.recv, dtype=moved.dtype)
            plan = moved.recv_counts, moved.send_counts, moved.distances
            flights.append(self.group.exchange(recv, send, *plan))
        for work in [*flights, *sums]:
            work.wait()

    def timed(self, work: Callable[[], Any]) -> float:
        """Wall seconds between two moments at which all ranks are here."""
        self.group.all_reduce(torch.zeros(1))
        watch = measure.Stopwatch()
        work()
        self.group.all_reduce(torch.zeros(1))
        return watch.read().wall

    def overlapped_epoch(self) -> float:
        """Wall seconds of an epoch."""
        return self.timed(self.step)


def free_transport(group: Any) -> mock._patch_multiple:
    """Inside, exchanges fill their rows with zeros at once and reductions leave tensors alone."""

    def exchange(recv: Tensor, send: Tensor, *plan: Sequence[int]) -> Work:
        recv.zero_()
        return Done()

    free = {"_exchange": exchange, "_all_reduce": lambda tensor, op: None}
    return mock.patch.multiple(group, **free, _begin_sum=lambda tensor: Done())
