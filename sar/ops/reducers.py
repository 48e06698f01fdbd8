"""Reducers of a block's messages: summed, compared or kept, and the gradient of each message.

Messages with a ``weighting`` ask for the weights of their scores in the middle of a block, so that
one stream of rows a pass is enough. Forward answers with exp(z_e - m_i), m_i the largest score of
destination i so far (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135),
and scales what was summed when a larger one comes. Backward answers with the weights themselves.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.kernels import ExtremeReducer, wide_dtype, winners_only
from sar.ops.message_blocks import Weigh, Weighting
from sar.ops.saving import Writes


class Reducer(ABC):
    """Takes blocks of messages in any order and split; ``like`` [*, ...] is a message."""

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self.num_rows, self.dtype, self.shape = num_rows, like.dtype, like.shape[1:]

    @abstractmethod
    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        """Take a block: rows and positions int32 [e], values [e, ...]."""

    @abstractmethod
    def result(self) -> Tensor:
        """The result [num_rows, ...], sums and extremes in the messages' dtype; called once."""

    @abstractmethod
    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        """Gradient [e, ...] of a block's messages, ``values``, from the result's."""


class SumReducer(Reducer):
    """Sum per destination, accumulated in the wide dtype."""

    def __init__(self, num_rows: int, like: Tensor) -> None:
        super().__init__(num_rows, like)
        shape = (num_rows, *self.shape)
        self._sum: Tensor | None = like.new_zeros(shape, dtype=wide_dtype(like.dtype))

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        if self._sum is not None:
            rows = row.long()  # several times as fast as int32
            self._sum.index_add_(0, rows, values.to(self._sum.dtype))

    def result(self) -> Tensor:
        out, self._sum = self._sum, None
        if out is None:
            raise RuntimeError("the result of a reduction was taken twice")
        return out.to(self.dtype)

    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        return grad.index_select(0, row)


class ExtremeOfEdges(Reducer):
    """Max or min per destination and feature; the gradient goes to the winning edge alone."""

    def __init__(self, num_rows: int, like: Tensor, *, largest: bool) -> None:
        super().__init__(num_rows, like)
        self._width = math.prod(self.shape)
        flat = like.reshape(len(like), self._width)
        self._running: ExtremeReducer | None = ExtremeReducer(largest, num_rows, flat)
        self._edge: Tensor | None = None

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        if self._running is not None:
            self._running.add(row, position, values.reshape(len(values), self._width))

    def result(self) -> Tensor:
        running, self._running = self._running, None
        if running is None:
            raise RuntimeError("the result of a reduction was taken twice")
        self._edge = running.edge
        return running.result().view(self.num_rows, *self.shape)

    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        if self._edge is None:
            raise RuntimeError("backward of a reduction that has no result yet")
        grad = grad.reshape(len(grad), self._width)
        won = winners_only(self._edge, grad, row, position)
        return won.view(len(row), *self.shape)


class RunningSoftmax:
    """exp(z_e - m_i) block by block, with m_i the largest score of row i so far, and their sums.

    A row without edges keeps m = -inf and sum 0; no difference of infinities is formed. ``largest``
    and ``total``, m and the sums, are [num_rows, width] in the wide dtype of ``like``.
    """

    def __init__(self, num_rows: int, width: int, like: Tensor) -> None:
        wide = wide_dtype(like.dtype)
        self.largest = like.new_full((num_rows, width), -math.inf, dtype=wide)
        self.total = torch.zeros_like(self.largest)

    def weigh(self, row: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [e, width] of a block with destinations ``row``; the rows whose m has grown, and
        the factors [n, width] by which their sums shrink. A row may come again with the same."""
        z = scores.reshape(len(row), self.largest.shape[1]).to(self.largest.dtype)
        before, at = self.largest.index_select(0, row), row.long()
        self.largest.scatter_reduce_(0, at.unsqueeze(1).expand_as(z), z, "amax")
        base = finite(self.largest.index_select(0, row))
        grown = ((before > -math.inf) & (before < base)).any(1).nonzero().view(-1)
        rows, factor = at[grown], (before[grown] - base[grown]).exp_()
        if len(rows):
            self.total.index_copy_(0, rows, self.total.index_select(0, rows) * factor)
        weights = (z - base).exp_()
        self.total.index_add_(0, at, weights)
        return weights, rows, factor


def finite(largest: Tensor) -> Tensor:
    """Replace -inf by 0, so that no difference of infinities is formed."""
    return largest.masked_fill(largest == -math.inf, 0)


class LogSumExp(Reducer):
    """(m, l) per destination, with a running maximum m, l = log sum exp(values - m).

    Apart, as digits of l are lost in m + l. m is a constant to gradients. The result is (0, -inf)
    without edges or finite values.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        super().__init__(num_rows, like)
        self._running = RunningSoftmax(num_rows, math.prod(self.shape), like)
        self._result: Tensor | None = None

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        if values.numel():
            self._running.weigh(row, values)

    def result(self) -> Tensor:
        parts = [finite(self._running.largest), self._running.total.log_()]
        self._result = torch.stack(parts, -1).view(self.num_rows, *self.shape, 2)
        return self._result

    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        if self._result is None:
            raise RuntimeError("backward of a reduction that has no result yet")
        largest, log_sum = self._result.index_select(0, row).unbind(-1)
        return grad[..., 1].index_select(0, row) * (values - largest - log_sum).exp()


class KeepEdges(Reducer):
    """No reduction: one row per local edge, in the order of ``edata``."""

    def __init__(self, num_rows: int, like: Tensor) -> None:
        super().__init__(num_rows, like)
        self._values = like.new_zeros((num_rows, *self.shape))

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        self._values.index_copy_(0, position.long(), values)

    def result(self) -> Tensor:
        values, self._values = self._values, self._values[:0]
        return values

    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        return grad.index_select(0, position)


class SoftmaxSum(SumReducer):
    """out_i = sum over edges e into i of M_e a_e, a_e = exp(z_e - m_i) / t_i; M_e is linear.

    ==========  =====================  ====================================================
    tensor      shape                  owner and lifetime
    ==========  =====================  ====================================================
    m           [num_dst, H]           this rank; kept: the largest score, a constant
    1 / t       [num_dst, H]           this rank; kept; t_i = sum_e exp(z_e - m_i)
    out         [num_dst, ...]         this rank; kept, not a copy; computed again in backward
                                       where the caller wrote into it (on every rank)
    delta       [num_dst, H]           this rank; made for one backward pass
    z, a        [<= block, H]          this rank; recomputed where they are used
    ==========  =====================  ====================================================

    Every element o of a message is a multiple of the weight of one score h(o), so that sums can
    be scaled by score. The gradient of a score is a_e (da_e - delta_i), with da_e = M_e^T dout_i
    and delta_i = sum_e a_e da_e, which for score h is sum over o with h(o) = h of dout_io out_io:
    no pass over the edges is needed for it. Keeping m and t apart, instead of m + log t,
    keeps the digits of large scores.

    Without any edge a destination's row is 0; when all its scores are -inf it is NaN, as in DGL.
    """

    def __init__(self, weighting: Weighting, in_degrees: Tensor, like: Tensor) -> None:
        super().__init__(len(in_degrees), like)
        self.label, self._in_degrees = weighting.label, in_degrees
        self._running = RunningSoftmax(self.num_rows, weighting.num_scores, like)
        self._out = like
        self._writes: Writes | None = None

    def weigher(self, row: Tensor) -> Weigh:
        """Forward's function of the scores [e, ...] of a block with destinations ``row``."""
        return partial(self._weigh, row)

    def _weigh(self, row: Tensor, scores: Tensor) -> Tensor:
        weights, rows, factor = self._running.weigh(row, scores)
        if len(rows) and self._sum is not None:
            sums = self._sum.view(self.num_rows, len(self.label))
            scaled = sums.index_select(0, rows) * factor.index_select(1, self.label)
            sums.index_copy_(0, rows, scaled)
        return weights.view(scores.shape)

    def result(self) -> Tensor:
        empty, running = (self._in_degrees == 0).unsqueeze(1), self._running
        running.total = running.total.masked_fill_(empty, 1).reciprocal_()
        running.largest = finite(running.largest)
        if self._sum is not None:
            flat = self._sum.view(self.num_rows, len(self.label))
            flat.mul_(running.total.index_select(1, self.label))
        return super().result()

    def keep(self, out: Tensor) -> None:
        """Hold the result, which the caller may write into, for backward."""
        self._out, self._writes = out.detach(), Writes(out)

    @property
    def is_written(self) -> bool:
        """Whether the caller wrote into the result."""
        return self._writes is not None and self._writes.happened

    def weights(self, dout: Tensor) -> Weights:
        """m, 1 / t and delta of each destination, for backward."""
        products = dout.to(self._running.total.dtype) * self._out
        products = products.view(self.num_rows, len(self.label))
        delta = torch.zeros_like(self._running.total)
        delta.scatter_add_(1, self.label.expand_as(products), products)
        return Weights(self._running.largest, self._running.total, delta)


def softmax_sum(reducers: Sequence[Reducer]) -> SoftmaxSum | None:
    """The reducer of messages with a ``weighting``, which then is the only one."""
    return reducers[0] if reducers and isinstance(reducers[0], SoftmaxSum) else None


class Weights:
    """m, 1 / t and delta, [num_dst, H] each, or [e, H] of the edges of a block: these make the
    block's weights in backward, and remember for which scores."""

    def __init__(self, largest: Tensor, scale: Tensor, delta: Tensor) -> None:
        self.largest, self.scale, self.delta = largest, scale, delta
        self._made: list[tuple[Tensor, Tensor]] = []

    def of(self, row: Tensor) -> Weights:
        parts = (self.largest, self.scale, self.delta)
        return Weights(*(part.index_select(0, row) for part in parts))

    def __call__(self, scores: Tensor) -> Tensor:
        wide = scores.reshape(self.largest.shape).to(self.largest.dtype)
        weights = (wide - self.largest).exp() * self.scale
        self._made.append((wide, weights.detach()))
        return weights.view(scores.shape)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The scores, wide, and their gradient besides a_e da_e, which autograd adds."""
        return [(z, -a * self.delta) for z, a in self._made if z.requires_grad]


def make_reducer(name: str, num_rows: int, like: Tensor) -> Reducer:
    """The reducer of ``sum``, ``max``, ``min``, ``logsumexp`` or ``edges``; ``NotSupportedError``
    for another name, ``TypeError`` for messages to reduce that are not floating point."""
    if name == "edges":
        return KeepEdges(num_rows, like)
    if name not in ("sum", "max", "min", "logsumexp"):
        raise NotSupportedError(f"reduction: got {name!r}, expected sum, mean, max or min")
    if not like.is_floating_point():
        raise TypeError(f"messages: got {like.dtype}, expected a floating point dtype to reduce")
    if name == "logsumexp":
        return LogSumExp(num_rows, like)
    if name == "sum":
        return SumReducer(num_rows, like)
    return ExtremeOfEdges(num_rows, like, largest=name == "max")
