"""The group of ranks: the one interface through which anything leaves this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage

from sar.comm.collectives import agree, refuse_gradients
from sar.comm.diagnosis import user_line, where_ranks_stand
from sar.comm.meter import Counters, Meter, Span, Work
from sar.comm.seeds import SeedStream
from sar.errors import CommError

_LINE_BYTES = 1024


class Transport(Protocol):
    """What moves the rows of a group's exchanges."""

    def exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int],
    ) -> Work:
        """:meth:`Group.exchange` of contiguous tensors on the group's device."""


class Table(Protocol):
    """See :class:`sar.comm.turns.Table`."""

    def columns(self, num_rows: int, width: int, dtype: torch.dtype, together: int = 1) -> int: ...

    def wait(self) -> None: ...

    def publish(
        self, rows: list[Tensor], what: Hashable, first: int, num_rows: int
    ) -> list[Tensor]: ...

    def own(self, like: Tensor, first: int, num_rows: int) -> Tensor: ...

    def keep(self, values: Tensor, first: int, num_rows: int) -> Tensor: ...


class Done:
    """The :class:`Work` of an exchange that is over."""

    def wait(self) -> None:
        return None


class FinalCheck(Protocol):
    """What ranks compare when their group ends, without a collective: others may be gone."""

    def report(self) -> str:
        """What this rank leaves for rank 0."""

    def compare(self, reports: Mapping[int, str]) -> str | None:
        """What rank 0 warns of, from the reports of the ranks that came."""


class Group:
    """Ranks that train together. Subclasses say how bytes move; only the portable subset is used.

    No collective passes gradients: a tensor that asks for one is a ``ValueError``, unless under
    ``torch.no_grad()``.

    Attributes:
        rank, size: this process' index and the number of ranks.
        backend: name of the transport.
        device: where a tensor has to lie to be sent; other tensors are staged there and back.
        has_wire: whether rows travel while ranks compute, not only while they wait for them.
        seeds: of dropout; see :func:`sar.manual_seed`.
        meter: what each layer computes, waits for and moves.
        pool: buffers of rows to send and receive.
        losses: how often a mean or sum over all ranks' rows was differentiated.
        graphs: of this group that are in use.
        names: of the ranks, where they are called something else than "rank 0".
        final_check: what is compared when the group ends, if anything.
        table: where ranks publish rows that all read, if they share memory and take turns.
        in_turns: whether one rank computes at a time, so that no thread may beside it.
        transport: what moves rows, where the group has chosen something for it when it was made.
    """

    names: Sequence[str] = ()
    has_wire = True
    in_turns = False
    transport: Transport | None = None
    table: Table | None = None

    def __init__(self, rank: int, size: int, backend: str, device: torch.device) -> None:
        self.rank, self.size, self.backend, self.device = rank, size, backend, device
        self.counters = Counters()
        self.meter = Meter()
        self.pool = BufferPool()
        self.seeds = SeedStream()
        self.losses = 0
        self.graphs: WeakSet[Any] = WeakSet()
        self.final_check: FinalCheck | None = None

    def beside(self) -> Group:
        """A group of the same ranks whose exchanges never meet this one's, for another thread;
        collective. It ends with this one, or with its ``close``."""
        return self.part(range(self.size))

    def part(self, members: Sequence[int]) -> Group:
        """A group of some of the ranks (ascending, this one among them), which count from 0.
        Collective for them alone. It ends with this one, or with its ``close``."""
        raise NotImplementedError

    def title(self, rank: int) -> str:
        """The name of a rank in messages."""
        return self.names[rank] if self.names else f"rank {rank}"

    def close(self) -> None:
        """End what this group holds open; nothing by default."""
        return None

    # How bytes move where there are several ranks; tensors are contiguous and on `device`.

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        raise NotImplementedError

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        raise NotImplementedError

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` (any shape) over all ranks in place; ``op`` is sum, max or min."""
        if op not in ("sum", "max", "min"):
            raise ValueError(f"op: got {op!r}, expected 'sum', 'max' or 'min'")
        self._count("all_reduce", tensor)
        if self.size > 1:
            self._in_place("all_reduce", tensor, partial(self._all_reduce, op=op))
        return tensor

    def sum_if_all(self, tensor: Tensor, ready: bool) -> bool:
        """Sum ``tensor`` over all ranks in place if all are ready, often in one collective. Its
        size and dtype are the same on all ranks, ready or not. Returns whether all were ready; else
        the tensor is left as it was."""
        self._count("sum_if_all", tensor)
        if self.size == 1 or not tensor.numel():
            return ready and self.size == 1
        return self._in_place("all_reduce", tensor, partial(self._sum_if_all, ready=ready))

    def _sum_if_all(self, tensor: Tensor, ready: bool) -> bool:
        flag = torch.tensor([ready], dtype=torch.int32, device=self.device)
        self._all_reduce(flag, "min")
        if flag.item():
            self._all_reduce(tensor, "sum")
        return bool(flag.item())

    def prepare_sums(self) -> None:
        """Make ready for :meth:`begin_sum`; collective, at least the first time."""
        return None

    def begin_sum(self, tensor: Tensor) -> Work:
        """Begin to sum ``tensor`` over all ranks in place; it stays untouched until ``wait``.

        All ranks begin, and wait for, the same sums in the same order, but not necessarily between
        the same other collectives.
        """
        self._count("begin_sum", tensor)
        if self.size == 1:
            return Done()
        work = self._begin_sum(tensor)
        return _Metered(self.meter, work, self.meter.flight(work, "gradients"))

    def _begin_sum(self, tensor: Tensor) -> Work:
        """Sum at ``wait``, for transports that cannot sum beside the stream of rows."""
        return _Later(partial(self._staged, tensor, partial(self._all_reduce, op="sum")))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in rank order; shapes and dtypes must be equal."""
        self._count("all_gather", tensor)
        if self.size == 1:
            return [tensor.clone()]
        with self.meter.wait("all_gather"):
            parts = self._all_gather(tensor.detach().to(self.device).contiguous())
        return [part.to(tensor.device) for part in parts]

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with the one of rank ``src``, in place."""
        self._count("broadcast", tensor)
        if self.size > 1:
            self._in_place("broadcast", tensor, partial(self._broadcast, src=src))
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
            distances: on all ranks alike: rows travel from rank r + d to rank r for these d alone.
                The transport may send one distance after another, and no message without rows.
        """
        if send.requires_grad or recv.requires_grad:
            refuse_gradients("exchange", send, recv)
        counters, here = self.counters, self.meter.here
        sent, received = send.nbytes, recv.nbytes
        if own := send_counts[self.rank]:
            sent -= own * (sent // send.shape[0])
        if own := recv_counts[self.rank]:
            received -= own * (received // recv.shape[0])
        counters.collectives += 1
        counters.sent_bytes += sent
        counters.received_bytes += received
        if self.size == 1:
            recv.copy_(send)
            return Done()
        counts = list(recv_counts), list(send_counts)
        if recv.device.type == self.device.type and send.device.type == self.device.type:
            transport = self.transport
            exchange = self._exchange if transport is None else transport.exchange
            work = exchange(recv, send, *counts, distances)
        else:
            landing = torch.empty_like(recv, device=self.device)
            sending = send.detach().to(self.device).contiguous()
            work = self._exchange(landing, sending, *counts, distances)
            work = _Later(work.wait, partial(recv.copy_, landing))
        here.exchanges += 1
        here.sent_bytes += sent
        here.received_bytes += received
        span = None
        if self.meter.spans is not None:
            span = self.meter.flight(work, "rows", sent, received)
        return _Metered(self.meter, work, span)

    def all_to_all(self, rows: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        """Rows grouped by destination rank in, rows grouped by source rank out."""
        refuse_gradients("all_to_all", rows)
        recv = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
        self.exchange(recv, rows.contiguous(), recv_counts, send_counts).wait()
        return recv

    def agree(self, error: Exception | None, what: str = "", alike: object = None) -> None:
        """Raise on every rank if any passes an error; see :func:`sar.comm.collectives.agree`."""
        agree(self, error, what, alike)

    @contextmanager
    def agreed(self, what: str = "", alike: object = None) -> Iterator[None]:
        """Raise what is raised inside the block on every rank, at its end; collective. Arguments
        are those of :meth:`agree`; ``alike`` may be filled in inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # noqa: BLE001 - any, of memory as well: the others would wait
            error = caught
        self.agree(error, what, alike)

    def _calls_differ(self, calls: str) -> CommError:
        """The error of ranks that call different things, with each rank's line; collective."""
        line = user_line().encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
        mine = torch.tensor(list(line), dtype=torch.uint8, device=self.device)
        found = [bytes(one.tolist()).rstrip(b"\0") for one in self._all_gather(mine)]
        lines = {rank: one.decode(errors="ignore") for rank, one in enumerate(found)}
        return CommError(
            f"rank {self.rank}: ranks call different things, or for different numbers; "
            f"{calls}{where_ranks_stand(lines)}"
        )

    def _count(self, call: str, tensor: Tensor) -> None:
        refuse_gradients(call, tensor)
        self.counters.collectives += 1

    def _in_place(self, call: str, tensor: Tensor, run: Callable[[Tensor], Any]) -> Any:
        with self.meter.wait(call):
            return self._staged(tensor, run)

    def _staged(self, tensor: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Run on ``tensor``, or on a copy on the group's device that is written back."""
        staged = tensor.detach().to(self.device).contiguous()
        result = run(staged)
        if staged.data_ptr() != tensor.data_ptr():
            tensor.copy_(staged)
        return result


class _Metered:
    """Work in flight whose waits the meter counts."""

    __slots__ = ("meter", "span", "work")

    def __init__(self, meter: Meter, work: Work, span: Span | None) -> None:
        self.meter, self.work, self.span = meter, work, span

    def wait(self) -> None:
        meter, begin = self.meter, time.perf_counter()
        self.work.wait()
        if meter.spans is None:
            meter.here.wait_seconds += time.perf_counter() - begin
        else:
            meter.waited("wait", begin)
        if self.span is not None and not self.span.end:
            self.span.end = time.perf_counter()


class _Later:
    """Work that is done when it is waited for: a sum, or a copy of rows that have landed."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._steps = steps

    def wait(self) -> None:
        for step in self._steps:
            step()


class _Idle(NamedTuple):
    """An idle buffer; its size is kept because asking torch for it takes microseconds each time."""

    nbytes: int
    device: torch.device
    storage: UntypedStorage


class BufferPool:
    """Keeps the few largest buffers that were given back and hands them out again. Fresh ones for
    each round cost page faults and fragment the heap."""

    limit = 4  # two rounds in flight, each a send and a receive buffer
    WASTE = 8  # times what is asked for, a buffer is too good for it

    def __init__(self) -> None:
        self._free: list[_Idle] = []

    def take(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, most: int = 0
    ) -> Tensor:
        """An uninitialised contiguous tensor; return it with :meth:`give` when done. ``most``: rows
        that will be asked for later. A new buffer has room for them on the CPU, where memory takes
        none before it is written."""
        nbytes = math.prod(shape) * dtype.itemsize
        best, least, is_small = -1, self.WASTE * nbytes + 1, False
        for index, idle in enumerate(self._free):
            is_small |= idle.nbytes < nbytes
            if nbytes <= idle.nbytes < least and idle.device == device:
                best, least = index, idle.nbytes
        if best < 0:
            if is_small:
                self.shrink(len(self._free) - 1)  # too small for this width: room before growing
            rows = max(most, shape[0]) if device.type == "cpu" else shape[0]
            return torch.empty((rows, *shape[1:]), dtype=dtype, device=device)[: shape[0]]
        storage = self._free.pop(best).storage
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)  # type: ignore[call-overload]

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; the caller must hold no view of it any more."""
        storage = buffer.untyped_storage()
        self._free.append(_Idle(storage.nbytes(), buffer.device, storage))
        if len(self._free) > self.limit:
            self.shrink(self.limit)

    def shrink(self, number: int) -> None:
        """Free all idle buffers but the largest ``number``."""
        while len(self._free) > number:
            del self._free[min(range(len(self._free)), key=lambda i: self._free[i].nbytes)]

    def clear(self) -> None:
        self._free.clear()

    @property
    def idle_bytes(self) -> int:
        return sum(idle.nbytes for idle in self._free)
