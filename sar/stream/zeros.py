"""Sums of rows that a relu made, without the zeros on the wire.

Note [Zeros]. About half of what a relu gives is zero, and the gradient of such a number goes
nowhere: the backward of the relu drops it. So neither has to travel. A rank that reads a row as it
is gets a bit for each of its numbers, and the numbers that are not zero; it keeps the bits, and
sends home the gradients of these numbers alone. The owner has the bits, so that backward needs
none. Partial sums travel whole.

Gradients travel like this only where the rows are the very result of a relu: what comes between
(dropout, a product with the norms of degrees) may be written to, or its gradient be read, unseen.
All other rows travel without their zeros and their gradients whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor

from sar._private import has_backward_hooks
from sar.comm import exchange_counts
from sar.config import Policy
from sar.errors import NotSupportedError
from sar.kernels import add_rows
from sar.kernels.nonzero import (
    SLACK,
    can_pack,
    nonzero_bits,
    pack_rows,
    unpack_rows,
)
from sar.stream.passes import Message, RowMessages
from sar.stream.plan import HaloPlan, Round
from sar.stream.returns import GradientMessages


class Skipped(IntEnum):
    """What travels without the numbers that are zero."""

    NOTHING = 0
    ROWS = 1
    ROWS_AND_GRADIENTS = 2


def skipped(x: Tensor, policy: Policy) -> Skipped:
    """How rows ``x`` of a sum, and their gradients, travel; no communication."""
    if policy.zeros != "skip" or not can_pack(x.dtype):
        return Skipped.NOTHING
    if not (x.requires_grad and torch.is_grad_enabled()):
        return Skipped.ROWS
    relu = _is_relu(x.grad_fn) and not _is_read(x)
    return Skipped.ROWS_AND_GRADIENTS if relu else Skipped.ROWS


def _is_relu(node: Any) -> bool:
    """Whether what an autograd node made is the very result of a relu, torch's or ours."""
    return isinstance(node, _relu()) or getattr(node, "of_relu", False)


@cache
def _relu() -> type:
    """Of the nodes that torch's relu leaves; nothing is saved for whoever has hooks on that."""

    def as_it_is(saved: Tensor) -> Tensor:
        return saved

    hooks = torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        return type(torch.zeros(1, requires_grad=True).relu().grad_fn)


def _is_read(x: Tensor) -> bool:
    """Whether somebody reads the gradient of ``x`` itself."""
    return x.retains_grad or has_backward_hooks(x)


class NonZeros:
    """Which numbers of the rows of a sum travel; collective to make, at each forward.

    Args:
        x: [num_src, width] contiguous. summed: what the caller gave, of any shape.

    Attributes:
        words: the bits of ``x``.
        sent, received: numbers that go to each rank and come from it.
        halo: by the distances of a round the bits of each source's rows; for backward.
    """

    def __init__(self, plan: HaloPlan, x: Tensor, summed: ReferenceType[Tensor]) -> None:
        self.plan, self.width, self.dtype = plan, x.shape[1], x.dtype
        self.words, counts = nonzero_bits(x)
        rows = map(plan.rows_for, range(plan.group.size))
        self.sent = [int(counts.index_select(0, idx).sum()) for idx in rows]
        self.received = exchange_counts(plan.group, self.sent)
        self.halo: dict[range, list[Tensor]] = {}
        self._summed = summed

    def rows(self, x: Tensor, keep: bool) -> RowMessages:
        """What rows ``x`` travel in."""
        return PackedRows(self, x, keep)

    def gradients(self, width: int, dtype: torch.dtype) -> GradientMessages:
        """What gradients of such rows go home in."""
        return PackedGradients(self)

    def check(self) -> None:
        """Raise ``NotSupportedError`` where somebody began to read the gradients after the sum."""
        rows = self._summed()
        if rows is not None and _is_read(rows):
            raise NotSupportedError(
                f"zeros: got 'skip' and a hook, or retain_grad, on rows {tuple(rows.shape)} after "
                "they were summed; expected it before, or zeros='send'"
            )

    def take(self, size: int) -> Tensor:
        """A buffer for ``size`` numbers."""
        return self.plan.group.pool.take((size,), self.dtype, self.plan.device)

    def take_rows(self, num_rows: int) -> Tensor:
        """A buffer for whole rows."""
        return self.plan.group.pool.take((num_rows, self.width), self.dtype, self.plan.device)


@dataclass(frozen=True)
class _Part:
    """What one rank gets of a message: bits, numbers and partial sums, in this order.

    Attributes:
        pulled, sums: rows that travel without their zeros, and whole ones behind them.
        bits, numbers: of the former, 0 where the bits are known; numbers with their slack.
    """

    pulled: int
    sums: int
    bits: int
    numbers: int
    width: int

    @property
    def size(self) -> int:
        return self.bits + self.numbers + self.sums * self.width

    def split(self, message: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bits, numbers and [sums, width]; views."""
        bits, numbers, sums = message.split([self.bits, self.numbers, self.sums * self.width])
        return bits, numbers, sums.view(self.sums, self.width)


def _part(zeros: NonZeros, pulled: int, num_rows: int, numbers: int, *, with_bits: bool) -> _Part:
    bits = pulled * zeros.words.shape[1] if with_bits else 0
    return _Part(pulled, num_rows - pulled, bits, numbers + SLACK, zeros.width)


def _parts_to(zeros: NonZeros, step: Round, *, with_bits: bool) -> list[_Part]:
    """Of owned rows, or of their gradients, for each target."""
    pulled = [len(zeros.plan.rows_for(peer)) for peer in step.targets]
    numbers = [zeros.sent[peer] for peer in step.targets]
    each = zip(pulled, step.send_rows, numbers, strict=True)
    return [_part(zeros, *one, with_bits=with_bits) for one in each]


def _parts_from(zeros: NonZeros, step: Round, *, with_bits: bool) -> list[_Part]:
    """Of halo rows, or of their gradients, for each source."""
    pulled = [zeros.plan.recv_pulled[peer] for peer in step.sources]
    numbers = [zeros.received[peer] for peer in step.sources]
    each = zip(pulled, step.recv_rows, numbers, strict=True)
    return [_part(zeros, *one, with_bits=with_bits) for one in each]


def _counts(peers: tuple[int, ...], parts: list[_Part], size: int) -> list[int]:
    counts = [0] * size
    for peer, part in zip(peers, parts, strict=True):
        counts[peer] = part.size
    return counts


def _cut(message: Tensor, parts: list[_Part]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for part, piece in zip(parts, message.split([p.size for p in parts]), strict=True):
        yield part.split(piece)


class PackedRows(RowMessages):
    """Rows without their zeros, behind their bits; the bits that come are noted in ``zeros``."""

    def __init__(self, zeros: NonZeros, x: Tensor, keep: bool) -> None:
        super().__init__(zeros.plan, [x], keep)
        self.x, self.zeros = x, zeros

    def sent(self, step: Round) -> Message:
        zeros, plan = self.zeros, self.plan
        parts = _parts_to(zeros, step, with_bits=True)
        send = zeros.take(sum(part.size for part in parts))
        for peer, (bits, numbers, sums) in zip(step.targets, _cut(send, parts), strict=True):
            rows = plan.rows_for(peer)
            words = zeros.words.index_select(0, rows)
            bits.view(words.dtype).copy_(words.view(-1))
            pack_rows(self.x, zeros.words, rows, numbers)
            plan.gather(peer, self.rows, len(rows), sums)
        return send, _counts(step.targets, parts, plan.group.size)

    def received(self, step: Round) -> Message:
        parts = _parts_from(self.zeros, step, with_bits=True)
        recv = self.zeros.take(sum(part.size for part in parts))
        return recv, _counts(step.sources, parts, self.plan.group.size)

    def landed(self, step: Round, recv: Tensor) -> Tensor:
        zeros, words = self.zeros, self.zeros.words
        num_rows = step.num_recv
        halo = self.x.new_empty((num_rows, self.width)) if self.keep else zeros.take_rows(num_rows)
        parts, known = _parts_from(zeros, step, with_bits=True), []
        pieces = zip(parts, _cut(recv, parts), halo.split(list(step.recv_rows)), strict=True)
        for part, (bits, numbers, sums), rows in pieces:
            known.append(bits.view(words.dtype).view(part.pulled, words.shape[1]).clone())
            unpack_rows(known[-1], numbers, rows[: part.pulled])
            rows[part.pulled :] = sums
        zeros.halo[step.distances] = known
        self.plan.group.pool.give(recv)
        return halo


class PackedGradients(GradientMessages):
    """Gradients of the numbers that were not zero."""

    def __init__(self, zeros: NonZeros) -> None:
        super().__init__(zeros.plan, zeros.width, zeros.dtype, add_rows)
        self.zeros = zeros

    def sent(self, step: Round, grads: Tensor) -> Message:
        zeros, parts = self.zeros, _parts_from(self.zeros, step, with_bits=False)
        send = zeros.take(sum(part.size for part in parts))
        known, each = zeros.halo[step.distances], grads.split(list(step.recv_rows))
        pieces = zip(parts, _cut(send, parts), known, each, strict=True)
        for part, (_, numbers, sums), words, rows in pieces:
            pack_rows(rows[: part.pulled], words, None, numbers)
            sums.copy_(rows[part.pulled :])
        self.plan.group.pool.give(grads)
        return send, _counts(step.sources, parts, self.plan.group.size)

    def received(self, step: Round) -> Message:
        parts = _parts_to(self.zeros, step, with_bits=False)
        recv = self.zeros.take(sum(part.size for part in parts))
        return recv, _counts(step.targets, parts, self.plan.group.size)

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        zeros, parts = self.zeros, _parts_to(self.zeros, step, with_bits=False)
        grads = zeros.take_rows(step.num_send)
        pieces = zip(
            step.targets, _cut(recv, parts), grads.split(list(step.send_rows)), strict=True
        )
        for peer, (_, numbers, sums), rows in pieces:
            words = zeros.words.index_select(0, self.plan.rows_for(peer))
            unpack_rows(words, numbers, rows[: len(words)])
            rows[len(words) :] = sums
        self.plan.group.pool.give(recv)
        self.plan.scatter_round(step, home, grads, self.combine)
        self.plan.group.pool.give(grads)
