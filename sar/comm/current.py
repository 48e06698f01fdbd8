"""The group in use: that of the process, of a thread, or a single rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from sar.comm.group import Done, Group, Work


class LocalGroup(Group):
    """One rank and no process group: what runs before ``initialize_comms``."""

    def __init__(self) -> None:
        super().__init__(0, 1, "local", torch.device("cpu"))

    def beside(self) -> LocalGroup:
        return LocalGroup()

    def part(self, members: Sequence[int]) -> LocalGroup:
        return LocalGroup()

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        return None

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone()]

    def _broadcast(self, tensor: Tensor, src: int) -> None:
        return None

    def _exchange(
        self,
        recv: Tensor,
        send: Tensor,
        recv_counts: list[int],
        send_counts: list[int],
        distances: Sequence[int] = (),
    ) -> Work:
        recv.copy_(send)
        return Done()


class _State(threading.local):
    """The group in use: one for the process, unless a thread has entered :func:`use_group`."""

    thread_group: Group | None = None


_thread = _State()
_process: dict[str, Group] = {}


def current_group() -> Group:
    """The group made by ``initialize_comms``; before it, a :class:`LocalGroup` of one rank."""
    if _thread.thread_group is not None:
        return _thread.thread_group
    if "group" not in _process:
        return _process.setdefault("local", LocalGroup())
    return _process.get("part") or _process["group"]


def has_group() -> bool:
    """Whether somebody has said which group is current; else this process counts as alone."""
    return _thread.thread_group is not None or "group" in _process


def process_group() -> Group | None:
    """The group made by ``initialize_comms``, whatever a thread has entered; ``None`` before."""
    return _process.get("group")


def set_process_group(group: Group | None, part: Group | None = None) -> None:
    """Make ``group``, or a part of it, what :func:`current_group` returns in this process.

    ``None`` forgets both.
    """
    _process.clear()
    if group is not None:
        _process["group"] = group
    if part is not None:
        _process["part"] = part


@contextmanager
def use_group(group: Group) -> Iterator[Group]:
    """Make ``group`` current for this thread inside the ``with`` block."""
    before, _thread.thread_group = _thread.thread_group, group
    try:
        yield group
    finally:
        _thread.thread_group = before
