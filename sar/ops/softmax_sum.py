"""Sums weighted by a softmax that is computed on the way: one stream of rows a pass.

The messages of :class:`sar.ops.message_blocks.Messages` with a ``weighting`` ask for the weights of
their scores in the middle of a block. Forward answers with exp(z_e - m_i), m_i the largest score of
destination i so far (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, arXiv 2205.14135),
and scales what was summed when a larger one comes. Backward answers with the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sar._private import version_of
from sar.kernels import wide_dtype
from sar.ops.message_blocks import Weigh, Weighting
from sar.ops.reducers import Reducer, SumReducer


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

    A destination without edges in a block keeps its state. Without any edge its row is 0; when all
    its scores are -inf it is NaN, as in DGL.

    Args:
        in_degrees: [num_dst].
        like: [*, ...] a message.
    """

    def __init__(self, weighting: Weighting, in_degrees: Tensor, like: Tensor) -> None:
        super().__init__(len(in_degrees), like)
        self.label, self._in_degrees = weighting.label, in_degrees
        shape = (self.num_rows, weighting.num_scores)
        wide = wide_dtype(like.dtype)
        self._largest = like.new_full(shape, -math.inf, dtype=wide)
        self._total = like.new_zeros(shape, dtype=wide)
        self._out, self._version = like, 0

    def weigher(self, row: Tensor) -> Weigh:
        """Forward: takes the scores [e, ...] of a block with destinations ``row``."""
        return partial(self._weigh, row)

    def _weigh(self, row: Tensor, scores: Tensor) -> Tensor:
        z = scores.reshape(len(row), self._largest.shape[1]).to(self._largest.dtype)
        before = self._largest.index_select(0, row)
        self._largest.scatter_reduce_(0, row.long().unsqueeze(1).expand_as(z), z, "amax")
        base = _finite(self._largest.index_select(0, row))
        grown = ((before > -math.inf) & (before < base)).any(1).nonzero().view(-1)
        self._shrink(row[grown], (before[grown] - base[grown]).exp_())
        weights = (z - base).exp_()
        self._total.index_add_(0, row.long(), weights)
        return weights.view(scores.shape)

    def _shrink(self, row: Tensor, factor: Tensor) -> None:
        """Scale what was summed by ``factor`` [n, H]; a row may come again with the same."""
        if len(row) and self._sum is not None:
            self._total.index_copy_(0, row.long(), self._total.index_select(0, row) * factor)
            sums = self._sum.view(self.num_rows, len(self.label))
            scaled = sums.index_select(0, row) * factor.index_select(1, self.label)
            sums.index_copy_(0, row.long(), scaled)

    def result(self) -> Tensor:
        empty = (self._in_degrees == 0).unsqueeze(1)
        self._total = self._total.masked_fill_(empty, 1).reciprocal_()
        self._largest = _finite(self._largest)
        if self._sum is not None:
            flat = self._sum.view(self.num_rows, len(self.label))
            flat.mul_(self._total.index_select(1, self.label))
        return super().result()

    def keep(self, out: Tensor) -> None:
        """Hold the result, which the caller may write into, for backward."""
        self._out = out.detach()  # shares the memory and the count of writes
        self._version = version_of(out)

    @property
    def is_written(self) -> bool:
        """Whether the result is not what it was."""
        return version_of(self._out) != self._version

    def weights(self, dout: Tensor) -> Weights:
        """What backward knows of each destination, with the gradient of the result."""
        products = dout.to(self._total.dtype) * self._out
        products = products.view(self.num_rows, len(self.label))
        delta = torch.zeros_like(self._total)
        delta.scatter_add_(1, self.label.expand_as(products), products)
        return Weights(self._largest, self._total, delta)


def softmax_sum(reducers: Sequence[Reducer]) -> SoftmaxSum | None:
    """The reducer of messages with a ``weighting``, which is the only one then."""
    return reducers[0] if reducers and isinstance(reducers[0], SoftmaxSum) else None


@dataclass(frozen=True)
class Weights:
    """[num_dst, H] m, 1 / t and delta, of all destinations or of each edge of a block."""

    largest: Tensor
    scale: Tensor
    delta: Tensor

    def of(self, row: Tensor) -> BlockWeights:
        """Makes the weights of the block with destinations ``row``."""
        parts = (self.largest, self.scale, self.delta)
        return BlockWeights(Weights(*(part.index_select(0, row) for part in parts)))


class BlockWeights:
    """Makes the weights of a block in backward, and remembers for which scores."""

    def __init__(self, known: Weights) -> None:
        self._known = known
        self._made: list[tuple[Tensor, Tensor]] = []

    def __call__(self, scores: Tensor) -> Tensor:
        largest, scale = self._known.largest, self._known.scale
        wide = scores.reshape(largest.shape).to(largest.dtype)
        weights = (wide - largest).exp() * scale
        self._made.append((wide, weights.detach()))
        return weights.view(scores.shape)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The scores, wide, and their gradient besides a_e da_e, which autograd adds."""
        delta = self._known.delta
        return [(z, -a * delta) for z, a in self._made if z.requires_grad]


def _finite(largest: Tensor) -> Tensor:
    """With 0 for -inf, of which no difference is formed."""
    return largest.masked_fill(largest == -math.inf, 0)
