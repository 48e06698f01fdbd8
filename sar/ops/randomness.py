"""Borrowing torch's random generator: its state is put back as it was.

Ranks may be threads of one process, which has one CPU generator. Reading its state, torch waits
for the interpreter while it holds the generator; writing it, for the generator while it holds the
interpreter. Two threads would stop each other for ever, so they take turns here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sar.kernels.device import is_host

_turn = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of ``device`` come from ``seed`` inside and go on as before outside.

    Nothing inside may wait for another rank.
    """
    if not is_host(device):
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.manual_seed(seed)
            yield
        return
    generator = torch.default_generator  # torch.manual_seed would visit every device type
    with _turn:
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)


@contextmanager
def unchanged() -> Iterator[None]:
    """Random numbers of the CPU drawn inside leave no trace outside."""
    state = _read()
    try:
        yield
    finally:
        _write(state)


class SameRandom:
    """Inside, the CPU's random numbers are those that followed when this was made; many times."""

    def __init__(self) -> None:
        self.state = _read()
        self.kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self.kept.append(_read())
        _write(self.state)

    def __exit__(self, *_: object) -> None:
        _write(self.kept.pop())


def _read() -> torch.Tensor:
    with _turn:
        return torch.default_generator.get_state()


def _write(state: torch.Tensor) -> None:
    with _turn:
        torch.default_generator.set_state(state)
