"""Ranks as threads whose rows travel at the last moment, to catch buffers used too early.

Nothing moves when an exchange is posted: the receive buffer is filled with garbage, and rows are
copied from the peers' send buffers as they are when everybody waits. Reading rows before ``wait``,
or touching a send buffer before it, gives wrong results here; a fast network would hide it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sar.comm import Group, ThreadGroup
from sar.comm.meter import Work


class _Post:
    """One exchange of all ranks."""

    def __init__(self, size: int, timeout: float) -> None:
        self.offers: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout)


class LateGroup(ThreadGroup):
    """A :class:`ThreadGroup` whose exchanges complete in ``wait`` and not before."""

    timeout = 10.0
    lock = threading.Lock()

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        self._check(recv_counts, send_counts, distances)
        posts = self._room.__dict__.setdefault("posts", {})
        number = self.__dict__["number"] = self.__dict__.get("number", -1) + 1
        with self.lock:
            post = posts.setdefault(number, _Post(self.size, self.timeout))
        post.offers[self.rank] = (send, send_counts)
        if recv.is_floating_point():
            recv.fill_(torch.nan)
        else:
            recv.fill_(torch.iinfo(recv.dtype).max)
        return _Late(self, post, recv, recv_counts)

    def _check(self, recv_counts: list[int], send_counts: list[int], distances: Any) -> None:
        """Rows travel over the distances that were named, and over no others."""
        for peer in range(self.size) if distances else []:
            near = {(self.rank + distance) % self.size for distance in distances}
            far = {(self.rank - distance) % self.size for distance in distances}
            if (recv_counts[peer] and peer not in near) or (send_counts[peer] and peer not in far):
                raise ValueError(f"rank {self.rank}: rows of rank {peer}, not of {distances}")


class _Late:
    """Waits for all ranks, copies, and lets nobody go before all have copied."""

    def __init__(self, group: LateGroup, post: _Post, recv: Tensor, counts: list[int]) -> None:
        self.group, self.post, self.recv, self.counts = group, post, recv, counts

    def wait(self) -> None:
        self.post.barrier.wait()
        rank = self.group.rank
        parts = [rows.split(counts)[rank] for rows, counts in self.post.offers]
        if [len(part) for part in parts] != self.counts:
            raise ValueError(f"rank {rank}: {[len(p) for p in parts]} rows, not {self.counts}")
        self.recv.copy_(torch.cat(parts))
        self.post.barrier.wait()


def run_late(size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``case(group, *args)`` in rank order."""

    def body(group: Group) -> Any:
        return case(group, *args)

    return LateGroup.run(size, body, timeout=LateGroup.timeout)
