"""Sums of rows that a relu made, without the zeros on the wire.

Note [Zeros]. About half of what a relu gives is zero, and the gradient of such a number goes
nowhere: the backward of the relu drops it. So neither has to travel. A rank that reads a row as it
is gets a bit for each of its numbers, and the numbers that are not zero; it keeps the bits, and
sends home the gradients of these numbers alone. The owner has the bits, so that backward needs
none. Partial sums travel whole.

Gradients travel like this only where the rows are the very result of a function that says so, as
:func:`sar.nn.relu` does and relu in a layer that is computed as a whole: what comes between
(dropout, a product with the norms of degrees) may be written to, or its gradient be read, unseen.
All other rows travel without their zeros and their gradients whole. Each rank says it of its own
rows, to those that read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sar._private import has_backward_hooks
from sar.comm import exchange_counts
from sar.kernels import add_rows
from sar.kernels.nonzero import (
    SLACK,
    nonzero_bits,
    pack_rows,
    unpack_rows,
)
from sar.stream.passes import Message, RowMessages
from sar.stream.plan import HaloPlan, Round
from sar.stream.returns import GradientMessages


def drops_zeros(x: Tensor) -> bool:
    """Whether the backward of what made ``x`` drops the gradients of its zeros, unseen by others.

    The node of autograd says so itself, by an attribute of that name.
    """
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return is_recorded and getattr(x.grad_fn, "drops_zeros", False) and not is_read(x)


def is_read(x: Tensor) -> bool:
    """Whether somebody reads the gradient of ``x`` itself."""
    return x.retains_grad or has_backward_hooks(x)


class NonZeros:
    """Which numbers of the rows of a sum travel; collective to make, at each forward.

    Args:
        x: [num_src, width] contiguous.
        drops: the gradients of its zeros go nowhere, so that none of them needs to come home.

    Attributes:
        words: the bits of ``x``.
        sent, received: numbers that go to each rank and come from it.
        dropped: whether each rank said that of its rows.
        halo: by the distances of a round the bits of each source's rows; for backward.
    """

    def __init__(self, plan: HaloPlan, x: Tensor, drops: bool) -> None:
        self.plan, self.width, self.dtype = plan, x.shape[1], x.dtype
        self.words, counts = nonzero_bits(x)
        rows = map(plan.rows_for, range(plan.group.size))
        self.sent = [int(counts.index_select(0, idx).sum()) for idx in rows]
        # One number for both: the sign bit is free.
        told = exchange_counts(plan.group, [~count if drops else count for count in self.sent])
        self.received = [~count if count < 0 else count for count in told]
        self.dropped = [count < 0 for count in told]
        self.dropped[plan.group.rank] = drops
        self.halo: dict[range, list[Tensor]] = {}

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
    return _Part(pulled, num_rows - pulled, bits, numbers + SLACK * (pulled > 0), zeros.width)


def _parts_to(zeros: NonZeros, step: Round, *, with_bits: bool) -> list[_Part]:
    """Of owned rows, or of their gradients, for each target."""
    pulled = [len(zeros.plan.rows_for(peer)) for peer in step.targets]
    numbers = [zeros.sent[peer] for peer in step.targets]
    if not (with_bits or zeros.dropped[zeros.plan.group.rank]):  # gradients that travel whole
        pulled = numbers = [0] * len(step.targets)
    each = zip(pulled, step.send_rows, numbers, strict=True)
    return [_part(zeros, *one, with_bits=with_bits) for one in each]


def _parts_from(zeros: NonZeros, step: Round, *, with_bits: bool) -> list[_Part]:
    """Of halo rows, or of their gradients, for each source."""
    pulled = [zeros.plan.recv_pulled[peer] for peer in step.sources]
    numbers = [zeros.received[peer] for peer in step.sources]
    if not with_bits:  # some gradients travel whole
        pulled = [n * zeros.dropped[peer] for n, peer in zip(pulled, step.sources, strict=True)]
        numbers = [n * zeros.dropped[peer] for n, peer in zip(numbers, step.sources, strict=True)]
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
        each = halo.split(list(step.recv_rows))
        pieces = zip(step.sources, parts, _cut(recv, parts), each, strict=True)
        for peer, part, (bits, numbers, sums), rows in pieces:
            found = bits.view(words.dtype).view(part.pulled, words.shape[1])
            unpack_rows(found, numbers, rows[: part.pulled])
            rows[part.pulled :] = sums
            known.append((found if zeros.dropped[peer] else found[:0]).clone())
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
            pack_rows(rows[: part.pulled], words[: part.pulled], None, numbers)
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
        each = grads.split(list(step.send_rows))
        pieces = zip(step.targets, parts, _cut(recv, parts), each, strict=True)
        for peer, part, (_, numbers, sums), rows in pieces:
            words = zeros.words.index_select(0, self.plan.rows_for(peer)[: part.pulled])
            unpack_rows(words, numbers, rows[: part.pulled])
            rows[part.pulled :] = sums
        self.plan.group.pool.give(recv)
        self.plan.scatter_round(step, home, grads, self.combine)
        self.plan.group.pool.give(grads)
