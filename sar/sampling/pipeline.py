"""Batches that are made ahead, by a thread, and the end of it whoever ends it."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Self

from sar.errors import CommError
from sar.sampling.swap import Stopped, Swap

Produce = Callable[[], Iterator[Any]]
_END = object()
_LOOK_SECONDS = 0.5  # from one look at whether the other thread still runs to the next


def told(produce: Produce, swap: Swap) -> Iterator[Any]:
    """What ``produce`` yields; its errors are raised on every rank.

    At the end all ranks have come to it.
    """
    swap.is_over = False
    try:
        yield from produce()
        swap.finish()
        swap.is_over = True
    except CommError:  # the others meet it, or have ended
        swap.is_over = True
        raise
    except Exception as error:
        if not swap.is_over:  # this rank's own
            swap.fail(error)
        raise


class Epochs(ABC):
    """Goes through batches that all ranks make together, epoch after epoch.

    Args:
        prefetch: batches that a thread makes ahead; 0: none, and no thread.
        depth: batches that wait at most.

    Going through it may be left half-way, by all ranks after the same batch. What raises on one
    rank, such as a transform, is raised on all.
    """

    def __init__(self, swap: Swap, prefetch: int, depth: int) -> None:
        self._swap, self._prefetch, self._depth = swap, prefetch, depth
        self._epoch, self._running = 0, None

    _running: Ahead | InTurn | None

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, the same on all ranks."""

    @abstractmethod
    def _epoch_of(self, epoch: int, first: int) -> Iterator[Any]:
        """Batches from a step on; its collectives are those of the thread that goes through."""

    def __iter__(self) -> Iterator[Any]:
        return self.iterate(self._epoch)

    def iterate(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """The batches of an epoch, by number, from a step on; the next one is that after it."""
        self.leave()
        self._epoch = epoch + 1
        produce = partial(self._epoch_of, epoch, first)
        if self._prefetch:
            self._running = Ahead(produce, self._swap, self._depth)
        else:
            self._running = InTurn(produce, self._swap)
        return iter(self._running)

    def leave(self) -> None:
        """End an epoch that was left half-way; all ranks do it after the same batch."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def close(self) -> None:
        """End the loader's thread and connections; harmless the second time."""
        self.leave()
        self._swap.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else the others are told by this rank's end
            self.close()


class InTurn:
    """Runs an iterator where its batches are taken.

    Args:
        produce: makes the iterator.
    """

    def __init__(self, produce: Produce, swap: Swap) -> None:
        self._produce, self._swap = produce, swap
        swap.is_over = False

    def __iter__(self) -> Iterator[Any]:
        return told(self._produce, self._swap)

    def close(self) -> None:
        """Stop where all ranks do; harmless the second time."""
        if not self._swap.is_over:
            with suppress(Stopped):
                self._swap.stop()


class Ahead:
    """Runs an iterator in a thread, a bounded number of batches ahead.

    Args:
        produce: makes the iterator; its collectives are the thread's alone.
        depth: batches that wait at most.
    """

    def __init__(self, produce: Produce, swap: Swap, depth: int) -> None:
        self._produce, self._swap = produce, swap
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sar-sampling", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for batch in told(self._produce, self._swap):
                if not self._put(batch):
                    self._swap.stop()
            self._put(_END)
        except BaseException as error:  # noqa: BLE001 - raised where batches are taken
            self._put(error)

    def _put(self, item: Any) -> bool:
        """Whether it is wanted."""
        while not self._stops.is_set():
            try:
                self._queue.put(item, timeout=_LOOK_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Any]:
        """The batches. The thread is told when this is dropped, and not waited for: after an error
        in a loop on one rank the others wait for that rank."""
        try:
            while (item := self._queue.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._stops.set()

    def close(self) -> None:
        """Stop, when all ranks have come to the thread's next step; harmless the second time."""
        self._stops.set()
        self._thread.join()
