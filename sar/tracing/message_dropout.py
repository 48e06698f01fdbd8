"""Dropout inside users' message functions: found by the probe, keyed by edges in every block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sar.ops.randomness import keyed_dropout

DROPOUTS: set[Callable] = {F.dropout, torch.dropout}  # and what is put in place of them


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def inside_function() -> Iterator[None]:
    """Notes that this thread runs a message or reduce function, on the rows of a block."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def in_function() -> bool:
    return _state.depth > 0


def arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
) -> tuple[Tensor, float, bool]:
    """(input, probability in effect, inplace) of a dropout call; ``ValueError`` for a wrong p."""
    if not 0 <= p <= 1:
        raise ValueError(f"p: got {p}, expected a probability from 0 to 1")
    return input, p if kwargs.get("train", training) else 0.0, inplace


@dataclass(frozen=True)
class Drawn:
    """A call of dropout in a message function: its probability and, on rows of edges, its seed."""

    probability: float
    seed: int | None


class FindDropout(TorchFunctionMode):
    """Skips dropout; ``found``: per call its probability, and whether the input has edge rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.found: list[tuple[float, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        x, probability, inplace = arguments(*args, **(kwargs or {}))
        self.found.append((probability, x.dim() > 0 and len(x) == self.rows))
        if inplace and probability > 0:
            x.mul_(1)  # the probe sees that it is written
        return F.dropout(x, training=False)  # other modes see the input


class KeyedDropout(TorchFunctionMode):
    """Makes the calls of dropout that the probe found on edge rows functions of the edges' keys.

    ``keys`` are int [e], of the block's edges, ``calls`` in the order in which they are made.
    """

    def __init__(self, keys: Tensor, calls: Sequence[Drawn]) -> None:
        super().__init__()
        self.keys, self.calls = keys, iter(calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = next(self.calls, None) if func in DROPOUTS else None
        if call is None or (call.seed is None and call.probability > 0):
            return func(*args, **(kwargs or {}))
        x, _, inplace = arguments(*args, **(kwargs or {}))
        x = F.dropout(x, training=False)  # other modes put aliases in place of captured tensors
        if call.seed is None:
            return x
        out = keyed_dropout(x, self.keys, call.seed, call.probability)
        return x.copy_(out) if inplace else out
