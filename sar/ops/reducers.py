"""What happens to a block's messages: summed, compared or kept; and what backward asks of each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.kernels import ExtremeReducer, wide_dtype, winners_only


class Reducer(ABC):
    """Takes blocks of messages in any order and split.

    Args:
        num_rows: rows of the result.
        like: [*, ...] a message, for its shape and dtype.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        self.num_rows, self.dtype, self.shape = num_rows, like.dtype, like.shape[1:]

    @abstractmethod
    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        """Take a block: rows and positions int32 [e], values [e, ...]."""

    @abstractmethod
    def result(self) -> Tensor:
        """[num_rows, ...], sums and extremes in the messages' dtype; called once."""

    @abstractmethod
    def edge_grad(self, row: Tensor, position: Tensor, grad: Tensor, values: Tensor) -> Tensor:
        """[e, ...] gradient of a block's messages, ``values``, from the result's."""


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


class LogSumExp(Reducer):
    """(m, l) per destination, with a running maximum m, l = log sum exp(values - m).

    Apart, as digits of l are lost in m + l. m is a constant to gradients. A destination without
    edges in a block keeps its state: its maximum stays -inf and its sum 0, and no difference of
    infinities is formed. The result is (0, -inf) without edges or finite values.
    """

    def __init__(self, num_rows: int, like: Tensor) -> None:
        super().__init__(num_rows, like)
        self._width = math.prod(self.shape)
        wide = wide_dtype(like.dtype)
        self._max = like.new_full((num_rows, self._width), -math.inf, dtype=wide)
        self._sum = torch.zeros_like(self._max)
        self._result: Tensor | None = None

    def add(self, row: Tensor, position: Tensor, values: Tensor) -> None:
        if len(row) == 0 or self._width == 0:
            return
        values = values.reshape(len(values), self._width).to(self._max.dtype)
        rows, segment = torch.unique(row.long(), return_inverse=True)
        old_max, old_sum = self._max.index_select(0, rows), self._sum.index_select(0, rows)
        new_max = old_max.scatter_reduce(0, segment.unsqueeze(1).expand_as(values), values, "amax")
        base = new_max.masked_fill(new_max == -math.inf, 0)
        total = old_sum * (old_max - base).exp_()
        total.index_add_(0, segment, (values - base.index_select(0, segment)).exp_())
        self._max.index_copy_(0, rows, new_max)
        self._sum.index_copy_(0, rows, total)

    def result(self) -> Tensor:
        largest = self._max.masked_fill_(self._max == -math.inf, 0)
        self._result = torch.stack([largest, self._sum.log_()], -1)
        self._result = self._result.view(self.num_rows, *self.shape, 2)
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


def make_reducer(name: str, num_rows: int, like: Tensor) -> Reducer:
    """The reducer of ``sum``, ``max``, ``min``, ``logsumexp`` or ``edges``.

    Raises ``NotSupportedError`` for another name and ``TypeError`` for messages that are not
    floating point where they are reduced.
    """
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
