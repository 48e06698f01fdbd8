"""Ranks that are processes: a group over ``torch.distributed``.

Note [One order]
oneCCL's binding waits without a limit, under a lock of the whole process: a rank that died leaves
the others there for ever, and so do two groups that ranks use in different orders. So a thread
begins each of its collectives, another waits for it, and this one looks who has ended meanwhile.
Only rows and small messages travel over it, in the one order that all ranks share. All other groups
are gloo's: of sampling, which is a thread's, of some ranks, of ``torch_group``. Gradients are
summed when they are waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sar.comm import direct
from sar.comm.failure import FailureBoard, guarded, stuck_threads
from sar.comm.group import Group
from sar.comm.host_memory import SMALL, HostMemory
from sar.comm.meter import Work
from sar.comm.one_host import connect
from sar.comm.paced import Message, Paced
from sar.errors import CommError

_T = TypeVar("_T")

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_SETTLE_SECONDS = 3.0  # for large messages to end
_TAGS = 1 << 30  # of messages, which torch has as ints of 32 bits
_LOOK = timedelta(seconds=1)  # from one look at whether a rank has left to the next


class ProcessGroup(Group):
    """A rank of a ``torch.distributed`` process group.

    Rows travel on a group of their own, so that a user's collectives (for example
    ``DistributedDataParallel``'s) never interleave with the stream; so do sums of gradients. Over
    oneCCL see Note [One order].

    Args:
        board: where a failing rank leaves its error for the others.
        keeps_store: the board's store ends with this process.
        first: the group that this one ends with; it closes the board and torch's groups.
        members: torch's ranks of the group; all by default.
    """

    def __init__(
        self,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        board: FailureBoard,
        keeps_store: bool = False,
        first: ProcessGroup | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        self._members = list(range(dist.get_world_size()) if members is None else members)
        rank = self._members.index(dist.get_rank())
        super().__init__(rank, len(self._members), backend, device)
        self.names = [board.names[member] for member in self._members] if board.names else ()
        self.board, self._keeps_store, self._first = board, keeps_store, first
        # torch's groups that are used no more, by their ranks; see torch_group
        self._spare: dict[tuple[int, ...], list[Any]] = {} if first is None else first._spare
        self._timeout, self._is_closed = timeout, False
        is_first = first is None
        self._small: Any = self._torch_group(is_first)
        self._rows: Any = None  # where they travel over torch's groups
        self._sums: Any = None
        self._is_gloo = self.size > 1 and dist.get_backend(self._small) == "gloo"
        self._may_block = self.size > 1 and dist.get_backend(self._small) == "ccl"
        self._host: HostMemory | None = None
        self._paced: Paced | None = None
        if self._is_gloo:
            is_able, seconds = device.type == "cpu", timeout.total_seconds()
            self._host = connect(self.rank, self.size, self._all_gather, seconds, is_able)
        if self._host is not None:
            self._host.on_failure, self._host.refuse = self._fail, self._check_open
            self._host.board, self.transport, self.has_wire = board, self._host, False
        elif self.size > 1:
            self._rows = self._torch_group(is_first)
            if self._is_gloo and device.type == "cpu":
                self._paced = Paced(self.rank, self._begin_message, self._check_others)
        self._beside: list[ProcessGroup] = []

    def torch_group(self) -> Any:
        """A group of torch's with these ranks, for ``DistributedDataParallel``; collective.

        One that a closed group has used, if there is one: torch names a group of some ranks by how
        many there are, and finds what an ended one of that name has left in the store.

        Raises ``CommError`` when another rank has ended.
        """
        return self._guarded(self._torch_group)

    def _torch_group(self, is_main: bool = False) -> Any:
        """``is_main``: of the backend that was asked for, also where that is oneCCL."""
        spare = self._spare.get(tuple(self._members))
        if spare:
            return spare.pop(0)
        backend = "gloo" if dist.get_backend() == "ccl" and not is_main else None
        options: dict[str, Any] = {"timeout": self._timeout, "backend": backend}
        if len(self._members) == dist.get_world_size():
            return dist.new_group(**options)
        return dist.new_group(self._members, **options, use_local_synchronization=True)

    def part(self, members: Sequence[int]) -> ProcessGroup:
        self._check_open()
        backend = "gloo" if self._may_block else self.backend
        options = backend, self.device, self._timeout, self.board
        ranks, first = [self._members[rank] for rank in members], self._first or self
        made = self._guarded(partial(ProcessGroup, *options, first=first, members=ranks))
        self._beside = [one for one in self._beside if not one._is_closed] + [made]
        return made

    def _guarded(self, make: Callable[[], _T]) -> _T:
        """Run what connects ranks: until it has, no connection breaks when one of them ends."""
        return self._call(self._bounded, make, self.board.meeting_ends_in)  # type: ignore[no-any-return]

    def _bounded(self, make: Callable[[], _T], ends_in: Callable[[], float | None]) -> _T:
        return guarded(make, ends_in, self.device, self._timeout.total_seconds())

    def _check_open(self) -> None:
        """Raise ``CommError`` after the end, or after a failure: who is gone for one of this
        process' groups is gone for all, and each would wait as long again."""
        if self._is_closed:
            raise CommError(
                f"rank {self.rank}: the group was shut down; make graphs anew after "
                "sar.initialize_comms"
            )
        if self.board.explained is not None:
            raise CommError(self.board.explained)

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        self._check_open()
        if self._is_gloo and direct.fits(tensor):
            self._labelled(direct.all_reduce, tensor, op, self.size)
        else:
            self._run(dist.all_reduce, tensor, op=_OPS[op], group=self._small)

    def _sum_if_all(self, tensor: Tensor, ready: bool) -> bool:
        self._check_open()
        if self._is_gloo and direct.fits(tensor):
            return self._labelled(direct.all_reduce, tensor, "sum", self.size, ready)  # type: ignore[no-any-return]
        return super()._sum_if_all(tensor, ready)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._check_open()
        if self._is_gloo and direct.fits(tensor, self.size):
            return self._labelled(direct.all_gather, tensor, self.size)  # type: ignore[no-any-return]
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(dist.all_gather, parts, tensor, group=self._small)
        return parts

    def _labelled(self, collective: Callable[..., Any], *args: Any) -> Any:
        try:
            return collective(self._swap, *args)
        except direct.CallsDiffer as error:
            raise self._calls_differ(str(error)) from error

    def _swap(self, recv: Tensor, send: Tensor) -> None:
        if self._host is not None:
            counts = [len(recv) // self.size] * self.size
            self._host.exchange(recv, send, counts, counts, channel=SMALL).wait()
            return
        self._run(dist.all_to_all_single, recv, send, group=self._small)

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        self._check_open()
        self._run(dist.broadcast, tensor, src=self._members[src], group=self._small)

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        self._check_open()
        counts = recv_counts, send_counts
        if self.transport is not None:
            return self.transport.exchange(recv, send, *counts, distances)
        if self._paced is not None and distances:
            return self._paced.exchange(recv, send, *counts, distances)
        return self._begin(recv, send, *counts, self._rows)

    def _begin_message(self, message: Message, number: int) -> Work:
        """Messages have tags, so they need no group of their own beside collectives, which gloo
        tells apart by counting."""
        group = self._small if message.is_back else self._rows
        call = group.send if message.is_sent else group.recv
        work = self._call(call, [message.rows], message.peer, number % _TAGS)
        return _TorchWork(work, self._call, None)

    def _begin(
        self, recv: Tensor, send: Tensor, recv_counts: list[int], send_counts: list[int], group: Any
    ) -> _TorchWork:
        return self._started(
            dist.all_to_all_single,
            recv,
            send,
            output_split_sizes=recv_counts,
            input_split_sizes=send_counts,
            group=group,
        )

    def prepare_sums(self) -> None:
        self._check_open()
        if self._sums is None and self.size > 1 and self._host is None and not self._may_block:
            self._sums = self.torch_group()

    def _begin_sum(self, tensor: Tensor) -> Work:
        self._check_open()
        if self._sums is None or tensor.device.type != self.device.type:
            return super()._begin_sum(tensor)
        return self._started(dist.all_reduce, tensor, op=_OPS["sum"], group=self._sums)

    def _started(self, collective: Callable[..., Any], *args: Any, **options: Any) -> _TorchWork:
        work = self._call(collective, *args, async_op=True, **options)
        return _TorchWork(work, self._call, self._check_others if self._is_gloo else None)

    def _run(self, collective: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._started(collective, *args, **options).wait()

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call torch; a transport's failure becomes a :class:`CommError` with its cause."""
        if self.board.explained is not None:
            raise CommError(self.board.explained)
        try:
            if self._may_block:
                make = partial(collective, *args, **kwargs)
                return self._bounded(make, self.board.exchange_ends_in)
            return collective(*args, **kwargs)
        except CommError:  # says already what happened
            raise
        except (RuntimeError, OSError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        if self.board.explained is None:
            if self._host is not None:
                self._host.hang_up()  # others that wait say where, too
            self.board.explain(str(error))
        raise CommError(self.board.explained) from error

    def compare_at_end(self) -> str | None:
        """What :class:`sar.comm.group.FinalCheck` finds, on rank 0; in seconds, no collective."""
        if self.final_check is None or self._is_closed:
            return None
        report = self.final_check.report()
        return self.final_check.compare(self.board.collect_reports(self.rank, self.size, report))

    def close(self) -> None:
        """End the process groups made here, not torch's default one; a no-op the second time.

        Graphs that still hold this object cannot keep them: their collectives raise ``CommError``.
        gloo's threads end with their group. One that outlives the interpreter and frees a tensor
        then aborts the process.
        """
        self._is_closed = True
        for other in self._beside:
            other.close()
        self._end_steps()
        if self._host is not None:
            self._host.close()
        groups = [self._small, self._rows, self._sums]
        self._small = self._rows = self._sums = None
        used = self._spare.setdefault(tuple(self._members), [])
        used += [group for group in groups if group is not None]
        if self._first is None:
            self._end()

    @property
    def is_stuck(self) -> bool:
        """Whether a thread may wait in oneCCL for ever, with what torch needs to end a group."""
        return self._may_block and self.board.explained is not None

    def _end(self) -> None:
        """End what the first group, and all that came of it, have used. oneCCL's first rank waits
        until the others have. Raises ``CommError`` if they have not within the timeout."""
        if self.is_stuck:
            self.board.leave_word(None)
            if self._keeps_store:
                self.board.wait_for_others()
        if self.board.liveness is not None:
            self.board.liveness.close()
        if self.is_stuck:
            return
        if not self._may_block:
            self._destroy()
            return
        try:
            self._bounded(self._destroy, lambda: None)
        except TimeoutError as error:
            raise CommError(
                f"rank {self.rank}: waits in sar.shutdown for ranks that have not called it within "
                "the timeout; over oneCCL the first rank cannot leave before the others"
            ) from error

    def _destroy(self) -> None:
        for groups in self._spare.values():
            while groups:
                with suppress(ValueError):  # the user has destroyed them all with the default one
                    dist.destroy_process_group(groups.pop())

    def leave(self, error: BaseException) -> None:
        """Leave ``error`` for the other ranks to name, and begin no more, as this process ends.
        Large messages get some seconds to end. Of one that is cut off gloo may not tell the other
        rank: a write that fails in gloo's own thread is lost."""
        self.board.leave(error)
        if self._host is not None:
            self._host.hang_up()
        self._end_steps()
        if self._keeps_store:
            self._hang_up()
            self.board.wait_for_others()

    def _end_steps(self) -> None:
        if self._paced is not None and (thread := self._paced.close(_SETTLE_SECONDS)) is not None:
            stuck_threads.append(thread)

    def _hang_up(self) -> None:
        """Close the connections on which others wait for this rank, while its store answers."""
        group, self._small = self._small, None

        def end() -> None:
            with suppress(ValueError, RuntimeError):  # the user has, or a collective is in flight
                dist.destroy_process_group(group)

        if self._is_gloo and group is not None:
            threading.Thread(target=end, daemon=True).start()

    def _check_others(self) -> None:
        """Raise ``CommError`` if another rank has left after an error, or, where the store that
        tells of it does not answer, if one that this group needs has ended."""
        if self.board.some_left() or (self.board.is_lost and self.board.ended(self._members)):
            raise CommError(self.board.explain("it left"))


class _TorchWork:
    """A collective of torch's in flight, whose failure is explained. ``check`` is called every
    second while it is waited for, where torch's wait can be interrupted: gloo does not always tell
    that a message was cut off, or not before its timeout."""

    def __init__(
        self, work: Any, call: Callable[..., Any], check: Callable[[], None] | None
    ) -> None:
        self._work, self._call, self._check = work, call, check

    def wait(self) -> None:
        self._call(self._wait)

    def _wait(self) -> None:
        while self._check is not None:
            try:
                self._work.wait(_LOOK)
                return
            except RuntimeError:
                if self._work.is_completed():
                    break
                self._check()
        self._work.wait()  # raises what it failed with

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back when the last byte has moved, where the transport tells."""
        try:
            future = self._work.get_future()
        except RuntimeError:  # of this backend's works
            return
        future.add_done_callback(lambda _: callback())
