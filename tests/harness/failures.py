"""What the harness raises, and its clocks."""

from __future__ import annotations

import os
import signal

import torch

import sar

COLLECTIVE_TIMEOUT = 10.0  # seconds until a collective that a rank did not join fails
DEADLINE = 60.0  # seconds until the harness ends a case; pytest's own limit is twice that


class HarnessTimeout(AssertionError):
    """A case was still running at the deadline; the message holds every rank's stack."""


class RankFailed(AssertionError):
    """A rank raised or died. The message is the first cause, not what followed from it.

    Attributes:
        rank: the rank that failed first.
        kind: name of the exception class, or ``"exit"`` when the process ended without a word.
        died: ranks whose process ended.
    """

    def __init__(self, message: str, rank: int, kind: str, died: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rank, self.kind, self.died = rank, kind, died


def misbehave(how: str) -> None:
    """What ranks may do to the others."""
    group = sar.initialize_comms()
    if how == "raise" and group.rank == 1:
        raise KeyError("no such feature")
    if how == "die" and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.ones(1))


def assert_no_mistakes(printed: str) -> None:
    """That a script of ours, which is right, was not told of a mistake on its error stream."""
    assert "MistakeWarning" not in printed, printed[-3000:]
