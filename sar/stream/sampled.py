"""A random share of the remote rows, as sums and means read it: boundary-node sampling, lossy.

Rows that were not drawn are zeros, and those that were are scaled by the inverse of the rate, so
that the mean of a sum is the exact sum (Wan et al. 2022, arXiv 2203.10983). Gradients of the same
rows go home, scaled alike.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sar.config import Policy
from sar.errors import NotSupportedError
from sar.kernels import add_rows
from sar.kernels.uniform import keyed_uniform
from sar.stream.passes import Message, RowMessages, codec_for
from sar.stream.plan import HaloPlan, Round
from sar.stream.returns import GradientMessages

_PAIR = 0x9E3779B97F4A7C15  # spreads pairs of ranks over the seeds


class Sample:
    """Which rows of a halo plan travel this time; both ends of a pair know it without a word.

    Args:
        policy: its ``boundary_rate`` is the probability of a row.
        seed: the same on every rank.

    Attributes:
        plan: the plan with the chosen rows only.
    """

    def __init__(self, plan: HaloPlan, policy: Policy, seed: int) -> None:
        rank, size, self.rate = plan.group.rank, plan.group.size, policy.lossy.boundary_rate
        self.lossy, rate = policy.lossy, self.rate
        chosen = [_chosen(plan.send_counts[p], rate, seed, rank, p, size) for p in range(size)]
        self._heard = [_chosen(plan.recv_counts[p], rate, seed, p, rank, size) for p in range(size)]
        sent = [plan.rows_for(peer)[rows.to(plan.device)] for peer, rows in enumerate(chosen)]
        self.plan = plan.thinned(sent, [len(rows) for rows in self._heard])

    def rows(self, x: Tensor, keep: bool) -> RowMessages:
        """What rows ``x`` travel in."""
        return _SampledRows(self, x, keep)

    def gradients(self, width: int, dtype: torch.dtype) -> GradientMessages:
        """What gradients of such rows go home in."""
        return _SampledGradients(self, width, dtype)

    def check(self) -> None:
        """Gradients of whatever was sampled may go home."""

    def thin(self, step: Round) -> Round:
        """The round of the chosen rows."""
        recv = tuple(self.plan.recv_counts[peer] for peer in step.sources)
        send = tuple(self.plan.send_counts[peer] for peer in step.targets)
        return replace(step, recv_rows=recv, send_rows=send)

    def places(self, step: Round) -> Tensor:
        """int64 [chosen] where the rows that come lie among those of a round of the whole plan."""
        found, start = [], 0
        for peer, num in zip(step.sources, step.recv_rows, strict=True):
            found.append(self._heard[peer] + start)
            start += num
        return torch.cat(found).to(self.plan.device)


def _chosen(count: int, rate: float, seed: int, src: int, dst: int, size: int) -> Tensor:
    """int64 places of the chosen ones of ``count`` rows that ``src`` has for ``dst``."""
    pair = (seed + (src * size + dst + 1) * _PAIR) % 2**63
    return (keyed_uniform(torch.arange(count), 1, pair)[:, 0] < rate).nonzero().view(-1)


class _SampledRows(RowMessages):
    def __init__(self, sample: Sample, x: Tensor, keep: bool) -> None:
        codec = codec_for(sample.plan, sample.lossy.wire_dtype, x.dtype)
        super().__init__(sample.plan, [x], keep, codec)
        self.sample, self.x = sample, x

    def sent(self, step: Round) -> Message:
        return super().sent(self.sample.thin(step))

    def received(self, step: Round) -> Message:
        return super().received(self.sample.thin(step))

    def landed(self, step: Round, recv: Tensor) -> Tensor:
        rows = super().landed(self.sample.thin(step), recv)
        halo = self._take(step.num_recv, None, self.keep, step.most).zero_()
        halo.index_copy_(0, self.sample.places(step), rows.div_(self.sample.rate))
        self.plan.group.pool.give(rows)
        return halo


class _SampledGradients(GradientMessages):
    def __init__(self, sample: Sample, width: int, dtype: torch.dtype) -> None:
        codec = codec_for(sample.plan, sample.lossy.gradient_wire_dtype, dtype)
        super().__init__(sample.plan, width, dtype, add_rows, codec)
        self.sample = sample

    def sent(self, step: Round, grads: Tensor) -> Message:
        thin = self.sample.thin(step)
        rows = super().rows(thin)
        torch.index_select(grads, 0, self.sample.places(step), out=rows)
        self.plan.group.pool.give(grads)
        return super().sent(thin, rows.div_(self.sample.rate))

    def received(self, step: Round) -> Message:
        return super().received(self.sample.thin(step))

    def add(self, step: Round, recv: Tensor, home: Tensor) -> None:
        super().add(self.sample.thin(step), recv, home)


def refuse_sampling(policy: Policy, what: str) -> None:
    """Raise ``NotSupportedError`` where a computation has no unbiased sample of its rows."""
    if policy.lossy.boundary_rate < 1 and torch.is_grad_enabled():
        raise NotSupportedError(
            f"boundary_rate: got {policy.lossy.boundary_rate} and {what}, expected 1: only sums "
            "and means of source rows can be sampled"
        )
