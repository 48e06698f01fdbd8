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

from collections.abc import Iterator, Sequence

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
from sar.stream.passes import GradientMessages, Message, RowMessages
from sar.stream.plan import HaloPlan, Round


def drops_zeros(x: Tensor) -> bool:
    """Whether the backward of what made ``x`` drops the gradients of its zeros, unseen by others:
    its autograd node says so, by an attribute of that name."""
    is_recorded = x.requires_grad and torch.is_grad_enabled()
    return is_recorded and getattr(x.grad_fn, "drops_zeros", False) and not is_read(x)


def is_read(x: Tensor) -> bool:
    """Whether a hook or ``retain_grad`` reads the gradient of ``x`` itself."""
    return x.retains_grad or has_backward_hooks(x)


class NonZeros:
    """Which numbers of the rows of a sum travel; collective to make, at each forward.

    Args:
        x: [num_src, width] contiguous.
        drops: the gradients of its zeros go nowhere, so that none of them needs to come home.

    Attributes:
        words: the bits of ``x``.
        sent, received: numbers that go to each rank and come from it.
        dropped: ``drops`` of each rank.
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
        return self.plan.group.pool.take((size,), self.dtype, self.plan.device)

    def take_rows(self, num_rows: int) -> Tensor:
        return self.plan.group.pool.take((num_rows, self.width), self.dtype, self.plan.device)


class _Parts:
    """How one message is cut: for each peer bits, numbers and whole rows of partial sums.

    Args:
        peers, rows: whom it goes to or comes from, and how many rows of each.
        pulled: how many of these, the first ones, travel without their zeros.
        numbers: numbers of each that are not zero.
        with_bits: bits travel too; without, they are known from before.
    """

    def __init__(
        self, zeros: NonZeros, peers: Sequence[int], rows: Sequence[int], pulled: Sequence[int],
        numbers: Sequence[int], with_bits: bool,
    ) -> None:  # fmt: skip
        self.zeros, self.peers, self.rows, self.pulled = zeros, peers, rows, pulled
        bits = zeros.words.shape[1] * with_bits
        self._sizes = [
            (n * bits, count + SLACK * (n > 0), (all_rows - n) * zeros.width)
            for n, count, all_rows in zip(pulled, numbers, rows, strict=True)
        ]

    @staticmethod
    def sent(zeros: NonZeros, step: Round, *, with_bits: bool) -> _Parts:
        """The parts of owned rows, or of their gradients, for each target."""
        pulled = [len(zeros.plan.rows_for(peer)) for peer in step.targets]
        numbers = [zeros.sent[peer] for peer in step.targets]
        if not (with_bits or zeros.dropped[zeros.plan.group.rank]):  # gradients that travel whole
            pulled = numbers = [0] * len(step.targets)
        return _Parts(zeros, step.targets, step.send_rows, pulled, numbers, with_bits)

    @staticmethod
    def received(zeros: NonZeros, step: Round, *, with_bits: bool) -> _Parts:
        """The parts of halo rows, or of their gradients, for each source."""
        pulled = [zeros.plan.recv_pulled[peer] for peer in step.sources]
        numbers = [zeros.received[peer] for peer in step.sources]
        if not with_bits:  # some gradients travel whole
            whole = [zeros.dropped[peer] for peer in step.sources]
            pulled = [n * one for n, one in zip(pulled, whole, strict=True)]
            numbers = [n * one for n, one in zip(numbers, whole, strict=True)]
        return _Parts(zeros, step.sources, step.recv_rows, pulled, numbers, with_bits)

    def take(self) -> Message:
        """A buffer for all parts, and how many numbers are each rank's."""
        counts = [0] * self.zeros.plan.group.size
        for peer, sizes in zip(self.peers, self._sizes, strict=True):
            counts[peer] = sum(sizes)
        return self.zeros.take(sum(counts)), counts

    def cut(self, message: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, Tensor, Tensor]]]:
        """For each peer its number of rows without zeros, and views of bits, numbers and sums."""
        pieces = iter(message.split([size for sizes in self._sizes for size in sizes]))
        for peer, rows, pulled in zip(self.peers, self.rows, self.pulled, strict=True):
            bits, numbers, sums = next(pieces), next(pieces), next(pieces)
            yield peer, pulled, (bits, numbers, sums.view(rows - pulled, self.zeros.width))


class PackedRows(RowMessages):
    """Rows without their zeros, behind their bits; the bits that come are noted in ``zeros``."""

    def __init__(self, zeros: NonZeros, x: Tensor, keep: bool) -> None:
        super().__init__(zeros.plan, [x], keep)
        self.x, self.zeros = x, zeros

    def sent(self, step: Round) -> Message:
        parts = _Parts.sent(self.zeros, step, with_bits=True)
        send, counts = parts.take()
        for peer, _, (bits, numbers, sums) in parts.cut(send):
            rows = self.plan.rows_for(peer)
            words = self.zeros.words.index_select(0, rows)
            bits.view(words.dtype).copy_(words.view(-1))
            pack_rows(self.x, self.zeros.words, rows, numbers)
            self.plan.gather(peer, self.rows, len(rows), sums)
        return send, counts

    def received(self, step: Round) -> Message:
        return _Parts.received(self.zeros, step, with_bits=True).take()

    def landed(self, step: Round, recv: Tensor) -> Tensor:
        zeros, words, known = self.zeros, self.zeros.words, []
        num_rows = step.num_recv
        halo = self.x.new_empty((num_rows, self.width)) if self.keep else zeros.take_rows(num_rows)
        parts = _Parts.received(zeros, step, with_bits=True)
        each = halo.split(list(step.recv_rows))
        for (peer, pulled, (bits, numbers, sums)), rows in zip(parts.cut(recv), each, strict=True):
            found = bits.view(words.dtype).view(pulled, words.shape[1])
            unpack_rows(found, numbers, rows[:pulled])
            rows[pulled:] = sums
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
        parts = _Parts.received(self.zeros, step, with_bits=False)
        send, counts = parts.take()
        known, each = self.zeros.halo[step.distances], grads.split(list(step.recv_rows))
        pieces = zip(parts.cut(send), known, each, strict=True)
        for (_, pulled, (_, numbers, sums)), words, rows in pieces:
            pack_rows(rows[:pulled], words[:pulled], None, numbers)
            sums.copy_(rows[pulled:])
        self.plan.group.pool.give(grads)
        return send, counts

    def received(self, step: Round) -> Message:
        return _Parts.sent(self.zeros, step, with_bits=False).take()

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        zeros, parts = self.zeros, _Parts.sent(self.zeros, step, with_bits=False)
        grads = zeros.take_rows(step.num_send)
        each = grads.split(list(step.send_rows))
        for (peer, pulled, (_, numbers, sums)), rows in zip(parts.cut(recv), each, strict=True):
            words = zeros.words.index_select(0, self.plan.rows_for(peer)[:pulled])
            unpack_rows(words, numbers, rows[:pulled])
            rows[pulled:] = sums
        self.plan.group.pool.give(recv)
        self.plan.scatter_round(step, home, grads, self.combine)
        self.plan.group.pool.give(grads)
