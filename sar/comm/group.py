"""The group of ranks: the one interface through which anything leaves this process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from sar.comm.agreement import agree
from sar.comm.gradients import refuse_gradients
from sar.comm.meter import Meter, Span
from sar.comm.places import place, told
from sar.comm.pool import BufferPool
from sar.comm.seeds import SeedStream
from sar.errors import CommError

_PLACE_BYTES = 1024


@dataclass
class Counters:
    """Bytes of rows sent to and received from other ranks, and collectives begun.

    Attributes:
        avoided_bytes: of rows that were not sent again because the result was kept.
    """

    sent_bytes: int = 0
    received_bytes: int = 0
    collectives: int = 0
    avoided_bytes: int = 0


class Work(Protocol):
    """An exchange in flight."""

    def wait(self) -> None:
        """Return when the receive buffer is filled and the send buffer may be reused."""


class Farewell(Protocol):
    """What a rank says when its group ends, without a collective: others may be gone."""

    def word(self) -> str:
        """Left for rank 0."""

    def judge(self, words: Mapping[int, str]) -> str | None:
        """What rank 0 warns of, from the words of the ranks that came."""


class Done:
    """The :class:`Work` of an exchange that ended before it was returned."""

    def wait(self) -> None:
        return None


class Group(ABC):
    """Ranks that train together. Subclasses say how bytes move; only the portable subset is used.

    No collective passes gradients: a tensor that asks for one is a ``ValueError``, unless under
    ``torch.no_grad()``.

    Attributes:
        rank, size: this process' index and the number of ranks.
        backend: name of the transport.
        device: where a tensor has to lie to be sent; other tensors are staged there and back.
        seeds: of dropout; see :func:`sar.manual_seed`.
        meter: what each layer computes, waits for and moves.
        losses: how often a mean or sum over all ranks' rows was differentiated.
        graphs: of this group that are in use.
        names: of the ranks, where they are called something else than "rank 0".
        farewell: what is compared when the group ends, if anything.
    """

    names: Sequence[str] = ()

    def __init__(self, rank: int, size: int, backend: str, device: torch.device) -> None:
        self.rank, self.size, self.backend, self.device = rank, size, backend, device
        self.counters = Counters()
        self.meter = Meter()
        self.pool = BufferPool()
        self.seeds = SeedStream()
        self.losses = 0
        self.graphs: WeakSet[Any] = WeakSet()
        self.farewell: Farewell | None = None

    @property
    def has_wire(self) -> bool:
        """Whether rows travel while ranks compute, not only while they wait for them."""
        return True

    @abstractmethod
    def beside(self) -> Group:
        """A group of the same ranks whose exchanges never meet this one's; collective.

        Another thread may use it. It ends with this one, or with its ``close``.
        """

    @abstractmethod
    def part(self, members: Sequence[int]) -> Group:
        """A group of some of the ranks, this one among them, in ascending order; collective for
        them alone.

        Its ranks count from 0. It ends with this one, or with its ``close``.
        """

    def title(self, rank: int) -> str:
        """What messages call a rank."""
        return self.names[rank] if self.names else f"rank {rank}"

    def close(self) -> None:
        """End what this group holds open; nothing for most."""
        return None

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: str) -> None: ...

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, tensor: Tensor, src: int) -> None: ...

    @abstractmethod
    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work: ...

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` (any shape) over all ranks in place; ``op`` is sum, max or min."""
        if op not in ("sum", "max", "min"):
            raise ValueError(f"op: got {op!r}, expected 'sum', 'max' or 'min'")
        refuse_gradients("all_reduce", tensor)
        self.counters.collectives += 1
        if self.size > 1:
            staged = self._staged(tensor)
            with self.meter.wait("all_reduce"):
                self._all_reduce(staged, op)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.copy_(staged)
        return tensor

    def sum_if_all(self, tensor: Tensor, ready: bool) -> bool:
        """Sum ``tensor`` over all ranks in place if all are ready; often without asking before.

        Args:
            tensor: of one size and dtype on all ranks, whatever it holds where a rank is not ready.

        Returns:
            Whether all were; else the tensor is left as it was.
        """
        refuse_gradients("sum_if_all", tensor)
        self.counters.collectives += 1
        if self.size == 1 or not tensor.numel():
            return ready and self.size == 1
        staged = self._staged(tensor)
        with self.meter.wait("all_reduce"):
            all_ready = self._sum_if_all(staged, ready)
        if all_ready and staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)
        return all_ready

    def _sum_if_all(self, tensor: Tensor, ready: bool) -> bool:
        flag = torch.tensor([ready], dtype=torch.int32, device=self.device)
        self._all_reduce(flag, "min")
        if flag.item():
            self._all_reduce(tensor, "sum")
        return bool(flag.item())

    def prepare_sums(self) -> None:
        """Make ready for :meth:`begin_sum`; collective, for the first time at least."""
        return None

    def begin_sum(self, tensor: Tensor) -> Work:
        """Begin to sum ``tensor`` over all ranks in place; it stays untouched until ``wait``.

        All ranks begin, and wait for, the same sums in the same order, but not necessarily between
        the same other collectives.
        """
        refuse_gradients("begin_sum", tensor)
        self.counters.collectives += 1
        if self.size == 1:
            return Done()
        work = self._begin_sum(tensor)
        return _Metered(self, work, self.meter.flight(work, "gradients"))

    def _begin_sum(self, tensor: Tensor) -> Work:
        """Transports that cannot do it beside the stream of rows sum when it is waited for."""
        return _LateSum(self, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in rank order; shapes and dtypes must be equal."""
        refuse_gradients("all_gather", tensor)
        self.counters.collectives += 1
        if self.size == 1:
            return [tensor.clone()]
        with self.meter.wait("all_gather"):
            parts = self._all_gather(self._staged(tensor))
        return [part.to(tensor.device) for part in parts]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with the one of rank ``src``, in place."""
        refuse_gradients("broadcast", tensor)
        self.counters.collectives += 1
        if self.size > 1:
            staged = self._staged(tensor)
            with self.meter.wait("broadcast"):
                self._broadcast(staged, src)
            if staged.data_ptr() != tensor.data_ptr():
                tensor.copy_(staged)
        return tensor

    def exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        distances: Sequence[int] = (),
    ) -> Work:
        """Begin an all-to-all of rows; both buffers stay untouched by the caller until ``wait``.

        Args:
            recv: [sum(recv_counts), ...] rows grouped by the rank they come from.
            send: [sum(send_counts), ...] rows grouped by the rank they go to.
            distances: for a large exchange, on all ranks alike: rows travel from rank r + d to
                rank r for these d alone. The transport may send one distance after another.
        """
        refuse_gradients("exchange", send, recv)
        counters, here = self.counters, self.meter.here
        sent, received = send.nbytes, recv.nbytes
        if send_counts[self.rank] or recv_counts[self.rank]:
            sent = _bytes_to_others(send, send_counts, self.rank)
            received = _bytes_to_others(recv, recv_counts, self.rank)
        counters.collectives += 1
        counters.sent_bytes += sent
        counters.received_bytes += received
        if self.size == 1:
            recv.copy_(send)
            return Done()
        counts = list(recv_counts), list(send_counts)
        if recv.device.type == self.device.type and send.device.type == self.device.type:
            work = self._exchange(recv, send, *counts, distances)
        else:
            landing = torch.empty_like(recv, device=self.device)
            work = self._exchange(landing, self._staged(send), *counts, distances)
            work = _StagedWork(work, landing, recv)
        here.exchanges += 1
        here.sent_bytes += sent
        here.received_bytes += received
        span = None
        if self.meter.spans is not None:
            span = self.meter.flight(work, "rows", sent, received)
        return _Metered(self, work, span)

    def all_to_all(self, rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        """Rows grouped by destination rank in, rows grouped by source rank out."""
        refuse_gradients("all_to_all", rows)
        recv = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        self.exchange(recv, rows.contiguous(), recv_counts, send_counts).wait()
        return recv

    def agree(self, error: Exception | None, what: str = "", alike: object = None) -> None:
        """Raise on every rank if any rank passes an error; see :mod:`sar.comm.agreement`."""
        agree(self, error, what, alike)

    @contextmanager
    def agreed(self, what: str = "", alike: object = None) -> Iterator[None]:
        """Raise what is raised inside the block on every rank, at its end; collective.

        Arguments are those of :meth:`agree`; ``alike`` may be filled in inside.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - any, of memory as well: the others would wait
            error = caught
        self.agree(error, what, alike)

    def _apart(self, calls: str) -> CommError:
        """What to raise on every rank where ranks turn out to call different things; collective."""
        words = list(place().encode()[:_PLACE_BYTES].ljust(_PLACE_BYTES, b"\0"))
        mine = torch.tensor(words, dtype=torch.uint8, device=self.device)
        found = [bytes(one.tolist()).rstrip(b"\0") for one in self._all_gather(mine)]
        places = {rank: words.decode(errors="ignore") for rank, words in enumerate(found)}
        differ = f"ranks call different things, or for different numbers; {calls}{told(places)}"
        return CommError(f"rank {self.rank}: {differ}")

    def _await(self, work: Work) -> None:
        """Wait for an exchange; subclasses may say more of what fails."""
        work.wait()

    def _staged(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()


class _Metered:
    """Something in flight whose waiting is accounted for."""

    __slots__ = ("group", "span", "work")

    def __init__(self, group: Group, work: Work, span: Span | None) -> None:
        self.group, self.work, self.span = group, work, span

    def wait(self) -> None:
        meter, begin = self.group.meter, time.perf_counter()
        self.group._await(self.work)
        if meter.spans is None:
            meter.here.wait_seconds += time.perf_counter() - begin
        else:
            meter.waited("wait", begin)
        if self.span is not None and not self.span.end:
            self.span.end = time.perf_counter()


class _LateSum:
    """A sum that happens when it is waited for."""

    def __init__(self, group: Group, tensor: Tensor) -> None:
        self.group, self.tensor = group, tensor

    def wait(self) -> None:
        staged = self.group._staged(self.tensor)
        self.group._all_reduce(staged, "sum")
        if staged.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(staged)


class _StagedWork:
    """An exchange whose rows land on the wire's device and are copied to their own on ``wait``."""

    def __init__(self, work: Work, landing: Tensor, recv: Tensor) -> None:
        self.work, self.landing, self.recv = work, landing, recv

    def wait(self) -> None:
        self.work.wait()
        self.recv.copy_(self.landing)


def _bytes_to_others(buffer: Tensor, counts: Sequence[int], rank: int) -> int:
    if not counts[rank]:
        return buffer.nbytes
    return (sum(counts) - counts[rank]) * (buffer.nbytes // max(1, buffer.shape[0]))
