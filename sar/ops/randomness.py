"""Random numbers: torch's generator, borrowed and put back as it was, and dropout by keys: what it
keeps is a function of a seed and a row's key, not of the order of evaluation.

Ranks may be threads of one process, which has one CPU generator. Reading its state, torch waits
for the interpreter while it holds the generator; writing it, for the generator while it holds the
interpreter. Two threads would stop each other for ever, so they take turns here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar.kernels.device import has, is_host
from sar.kernels.keyed import drop, keyed_uniform

_turn = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of ``device`` come from ``seed`` inside and go on as before outside. Nothing
    inside may wait for another rank."""
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


def random_state(device: torch.device) -> Tensor:
    """The state of the generator of ``device``; inside of :func:`seeded`."""
    if is_host(device):
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(device)


@contextmanager
def unchanged() -> Iterator[None]:
    """Random numbers of the CPU drawn inside leave no trace outside, nor in what others seeded.

    Nothing inside may wait for another rank.
    """
    with _turn:
        state = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class SameRandom:
    """Inside, the CPU draws the numbers that would have followed when this was made; every time."""

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


def keyed_dropout(x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
    """``x`` [n, ...] with elements zeroed with ``probability``, the rest scaled by its inverse.

    Row i, column c (counted over all dimensions but the first) is kept where
    ``keyed_uniform(keys, width, seed)[i, c] >= probability``.
    """
    return _KeyedDropout.apply(x, keys, seed, probability)


def reference_dropout(x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
    """:func:`keyed_dropout` by torch's operators."""
    width = math.prod(x.shape[1:])
    keep = keyed_uniform(keys, width, seed).view(x.shape) >= probability
    return x * (keep.to(x.dtype) * _scale(probability))


def _scale(probability: float) -> float:
    return 0.0 if probability >= 1 else 1 / (1 - probability)


class _KeyedDropout(Function):
    """y_ic = x_ic m_ic / (1 - p), m_ic = [u(key_i, c) >= p]; backward the same of dy.

    ======  ===================  =========================================================
    tensor  shape                owner and lifetime
    ======  ===================  =========================================================
    x, y    [n, ...]             this rank; not saved
    keys    [n] integer          this rank; saved (an input): the mask is computed again
    m       [n, ...]             this rank; exists for one element at a time (compiled)
    ======  ===================  =========================================================
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, seed: int, probability: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.seed, ctx.probability = seed, probability
        if probability >= 1 or not has("drop", x.device, x.dtype):
            return reference_dropout(x, keys, seed, probability)
        rows = x.detach().contiguous().view(len(x), math.prod(x.shape[1:]))
        return drop(rows, keys, seed, probability, _scale(probability)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (keys,) = ctx.saved_tensors
        return keyed_dropout(grads[0], keys, ctx.seed, ctx.probability), None, None, None
