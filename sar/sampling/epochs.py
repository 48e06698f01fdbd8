"""Iteration over batches that a thread makes ahead, and how it ends, whoever ends it."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sar import expect
from sar.comm import Group
from sar.errors import CommError, SarError
from sar.sampling.exchange import Exchange, Stopped
from sar.sampling.options import LoaderOptions

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

_END = object()
_LOOK_SECONDS = 0.5  # from one look at whether the other thread still runs to the next
_MOST_EPOCHS = 2**31


class Epochs(ABC):
    """Goes through batches that all ranks make together, epoch after epoch.

    Going through it may be left half-way, by all ranks after the same batch. What raises on one
    rank, such as a transform, is raised on all. One iteration goes through it at a time, of one
    thread: what a second one begins ends the first, whose next batch then is an error.
    """

    def __init__(self, exchange: Exchange, options: LoaderOptions) -> None:
        self._exchange, self._transform = exchange, options.transform
        self._prefetch = self._depth = 0 if exchange.group.in_turns else options.prefetch
        self._epoch, self._running, self._is_closed = 0, None, False
        self._turn, self._process = threading.Lock(), os.getpid()

    _running: Running | None

    @abstractmethod
    def _batches(self, epoch: int, first: int) -> Iterator[Any]:
        """Batches from step ``first`` on; collectives are made by the thread that iterates."""

    def _begun(self, epoch: int, first: int) -> None:
        """Called where an epoch begins, with its first step."""
        return None

    def _ended(self) -> None:
        """Called when the loader is closed."""
        return None

    def _meet(self) -> None:
        """Return when all ranks have transformed their batch; raises what another failed with."""
        self._exchange.meet()

    def _agree(self, group: Group, steps: int) -> None:
        """Agree on the most steps of any rank, and on whether any transforms or prefetches."""
        mine = torch.tensor([steps, self._transform is not None, self._prefetch > 0])
        self._steps, self._meets, is_ahead = group.all_reduce(mine, "max").tolist()
        self._are_in_turn = not is_ahead  # all: they come to a loop's end after the same batch

    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(self._epoch)

    def iterate(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """The batches of an epoch, by number, from a step on; the next one is that after it.

        The first batch raises ``ValueError`` or ``TypeError`` on every rank for an epoch or a step
        that is none, and ``SarError`` for ranks that got different ones.
        """
        with self._alone():
            stopped = self._left()
            if stopped is not None and stopped.is_misled and self._are_in_turn:
                raise stopped
            self._begun(epoch, first)
            self._epoch = epoch + 1 if isinstance(epoch, int) else self._epoch
            depth = self._depth if self._prefetch else 0
            self._running = Running(self._checked(epoch, first), self._exchange, depth)
            return Iteration(self, self._running)

    def _checked(self, epoch: int, first: int) -> Iterator[Any]:
        """Transformed batches. Arguments are checked here: one rank's mistake is raised on all."""
        expect.integer(epoch, "epoch", at_least=0, at_most=_MOST_EPOCHS)
        expect.integer(first, "first", at_least=0, at_most=len(self))
        for batch in self._batches(epoch, first):
            made = batch if self._transform is None else self._transform(batch)
            if made is None:
                wanted = "the batch, or what is given instead"
                raise TypeError(f"transform: returned None, expected {wanted}")
            if self._meets:  # a transform may have raised: the others do, at the same batch
                self._meet()
            yield made

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Raise ``SarError`` where this thread may not use the loader, or not now."""
        name = type(self).__name__
        if self._is_closed:
            raise SarError(f"{name}: the loader is closed; expected a new one")
        if os.getpid() != self._process:
            raise SarError(f"{name}: used by a child of its process; expected num_workers=0")
        if not self._turn.acquire(blocking=False):
            raise SarError(f"{name}: in use, also by what it calls; expected one thread at a time")
        try:
            yield
        finally:
            self._turn.release()

    def leave(self) -> None:
        """End an epoch that was left half-way; all ranks do it after the same batch."""
        if self._running is not None:
            with self._alone():
                self._left()

    def _left(self) -> Stopped | None:
        stopped = None if self._running is None else self._running.close()
        self._running = None
        return stopped

    def close(self) -> None:
        """End the loader's thread and connections; harmless the second time."""
        if self._is_closed:
            return
        with self._alone():
            self._is_closed = True
            try:
                self._left()
                self._ended()
            finally:
                self._exchange.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the others are told by this rank's end
            self.close()

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name}: cannot be pickled or copied, expected one made by all ranks")


class Iteration:
    """The iterator over one epoch, which ends when another begins."""

    def __init__(self, loader: Epochs, running: Running) -> None:
        self._loader, self._running, self._batches = loader, running, iter(running)
        self._error = ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._loader._alone():
            if self._loader._running is not self._running:
                raise SarError(
                    "this iteration has ended: another iteration of this loader has begun, or it "
                    "was left; expected one at a time, and a loader of its own for a second"
                )
            if self._error:
                raise SarError(
                    f"this epoch has ended at an error, {self._error}; expected no more of its "
                    "batches to be taken"
                )
            try:
                return next(self._batches)
            except StopIteration:
                raise
            except BaseException as error:  # an interrupt as well: no batch follows
                self._error = f"{type(error).__name__}: {error}"
                raise


class Running:
    """Runs a generator of batches in a thread, at most ``depth`` ahead; at 0 it has no thread."""

    def __init__(self, batches: Iterator[Any], exchange: Exchange, depth: int) -> None:
        self._batches, self._exchange, self._thread = batches, exchange, None
        self._queue, self._stops = queue.Queue[Any](depth), threading.Event()
        exchange.is_over = False
        if depth:
            self._thread = threading.Thread(target=self._run, name="sar-sampling", daemon=True)
            self._thread.start()

    _thread: threading.Thread | None

    def _told(self) -> Iterator[Any]:
        """The batches; one rank's error is raised on every rank, and at the end all ranks meet."""
        try:
            yield from self._batches
            self._exchange.meet()
            self._exchange.is_over = True
        except CommError:  # the others meet it, or have ended
            self._exchange.is_over = True
            raise
        except Exception as error:
            if not self._exchange.is_over:  # this rank's own
                self._exchange.fail(error)
            raise

    def _run(self) -> None:
        try:
            for batch in self._told():
                if not self._put(batch):
                    self._exchange.stop()
            self._put(_END)
        except BaseException as error:  # noqa: BLE001 - raised where batches are taken
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Queue an item; False where no more are wanted."""
        while not self._stops.is_set():
            try:
                self._queue.put(item, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Any]:
        """The batches. When this is dropped, the thread is told but not waited for: after an error
        in a loop on one rank the others wait for that rank."""
        if self._thread is None:
            yield from self._told()
            return
        try:
            while (item := self._queue.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._stops.set()

    def close(self) -> Stopped | None:
        """Stop where all ranks do, and return who did; ``None`` of a thread, which may be ahead."""
        if self._thread is not None:
            if threading.current_thread() is self._thread:
                raise SarError("a loader is used by what it calls; expected one thread at a time")
            self._stops.set()
            self._thread.join()
            return None
        try:
            if not self._exchange.is_over:
                self._exchange.stop()
        except Stopped as stopped:
            return stopped
        return None
