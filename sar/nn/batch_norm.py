"""Batch normalization over the rows of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sar._private import children_of
from sar.comm import LocalGroup, current_group
from sar.kernels.jit import untraced
from sar.ops.batch_norm import normalize_rows
from sar.tracing.lazy import EdgeTensor, eager

_LAZY = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_LAZY)


class DistributedBN1D(nn.Module):
    """``nn.BatchNorm1d`` of the whole graph: statistics are those of all ranks' rows.

    Equal to ``nn.BatchNorm1d`` on the concatenated rows in training and evaluation. The forward
    pass sends 2 x n_feats + 1 numbers, the backward pass 2 x n_feats. State dicts are
    interchangeable with ``nn.BatchNorm1d``.

    Args:
        n_feats: width of the input, ``[N, n_feats]`` or ``[N, n_feats, L, ..]``; N may be 0 on a
            rank.
        eps: added to the variance.
        affine: learn a weight and a bias; their gradients are this rank's share until
            :func:`sar.nn.gather_grads`.
        distributed: ``False`` normalizes with this rank's rows alone; ``None`` and ``True`` with
            those of the current group, which is this rank alone before ``initialize_comms``.
        momentum: weight of the newest batch in the running statistics; ``None`` averages all.
        track_running_stats: keep running statistics and use them in evaluation.

    Raises:
        TypeError: the input is not floating point.
        ValueError: the input's shape does not fit, or all ranks together have one row in training.
    """

    def __init__(
        self,
        n_feats: int,
        eps: float = 1e-5,
        affine: bool = True,
        distributed: bool | None = None,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        self.n_feats, self.eps, self.affine, self.distributed = n_feats, eps, affine, distributed
        self.momentum, self.track_running_stats = momentum, track_running_stats
        self.weight = nn.Parameter(torch.ones(n_feats)) if affine else None
        self.bias = nn.Parameter(torch.zeros(n_feats)) if affine else None
        stats = (torch.zeros(n_feats), torch.ones(n_feats), torch.tensor(0))
        names = ("running_mean", "running_var", "num_batches_tracked")
        self.running_mean: Tensor | None
        self.running_var: Tensor | None
        self.num_batches_tracked: Tensor | None
        for name, value in zip(names, stats):
            self.register_buffer(name, value if track_running_stats else None)

    def reset_parameters(self) -> None:
        """Forget what was learned and counted."""
        self.reset_running_stats()
        if self.weight is not None and self.bias is not None:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def reset_running_stats(self) -> None:
        """Forget what was counted."""
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()  # type: ignore[union-attr]

    @untraced
    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        """Normalize ``x``; collective unless running statistics are used. Keeps shape and dtype.

        With ``relu``, ``F.relu`` of that, for which nothing more is kept until backward.
        """
        if x.dim() < 2 or x.shape[1] != self.n_feats:
            raise ValueError(
                f"x: got shape {tuple(x.shape)}, expected [N, {self.n_feats}] "
                f"or [N, {self.n_feats}, L, ..]"
            )
        if not x.is_floating_point():
            raise TypeError(f"x: got {x.dtype}, expected a floating point tensor")
        if not self.training and self.running_mean is not None:
            y = F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
            return F.relu(y) if relu else y
        if isinstance(x, EdgeTensor) and x.dim() == 2:
            return F.relu(self._of_edges(x)) if relu else self._of_edges(x)
        x = eager(x)
        rows = x if x.dim() == 2 else x.movedim(1, -1).reshape(-1, self.n_feats)
        affine = (self.weight, self.bias)
        group = LocalGroup() if self.distributed is False else current_group()
        y, mean, m2, count = normalize_rows(rows, *affine, self.eps, group, relu)
        if self.training and self.running_mean is not None:
            self._update(mean, m2 / (count - 1))
        return y if x.dim() == 2 else y.view(x.movedim(1, -1).shape).movedim(-1, 1)

    def extra_repr(self) -> str:
        return (
            f"{self.n_feats}, eps={self.eps}, affine={self.affine}, momentum={self.momentum}, "
            f"track_running_stats={self.track_running_stats}"
        )

    def _of_edges(self, x: EdgeTensor) -> Tensor:
        """Normalize edges by two reductions and an edge program: nothing edge-sized is stored."""
        count = x.scope.relation.num_edges_global
        if count < 2:
            raise ValueError(f"batch norm: got {count} edge(s) on all ranks, expected at least 2")
        mean = x.mean(0)
        variance = (x - mean).square().mean(0)
        if self.training and self.running_mean is not None:
            self._update(mean.detach(), variance.detach() * (count / (count - 1)))
        scale = (variance + self.eps).rsqrt()
        y = (x - mean) * (scale if self.weight is None else scale * self.weight)
        return y if self.bias is None else y + self.bias

    @torch.no_grad()
    def _update(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards float64 ``mean`` and unbiased ``variance``, [F]."""
        if self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked += 1  # type: ignore[operator, assignment]
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked)  # type: ignore[arg-type]
        for running, newest in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_(running.double() * (1 - share) + newest.to(running.device) * share)


def convert_batch_norm(model: nn.Module) -> nn.Module:
    """Replace every batch norm of torch in ``model`` by a :class:`DistributedBN1D`, in place.

    These are ``nn.BatchNorm1d``, ``2d``, ``3d`` and ``nn.SyncBatchNorm``; one with a ``forward`` of
    its own stays. Parameters (the same objects, so an optimizer keeps working), statistics and
    mode are kept; a norm that is used in several places stays shared. Returns the model, or its
    replacement when the model itself is a batch norm. Rows need not be nodes: a layer that
    normalizes its edges (DGL's ``EdgeConv``) then takes the edges of all ranks.

    Raises ``ValueError`` for a lazy norm that has not seen an input.
    """
    return replaced(
        model,
        lambda norm: (
            _from_torch(norm) if isinstance(norm, BATCH_NORMS) and is_torchs_own(norm) else norm
        ),
    )


def is_torchs_own(norm: nn.Module) -> bool:
    """Whether a batch norm has torch's ``forward``."""
    return type(norm).forward in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)


def replaced(
    module: nn.Module,
    make: Callable[[nn.Module], nn.Module],
    done: dict[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Put ``make(part)`` in place of ``module`` and of each of its parts, wherever they occur."""
    done = {} if done is None else done
    if module not in done:
        done[module] = make(module)
        for name, child in list(children_of(module).items()):  # named_children hides shared ones
            if child is not None:
                setattr(module, name, replaced(child, make, done))
    return done[module]


def _from_torch(norm: Any) -> DistributedBN1D:
    if isinstance(norm, _LAZY):
        raise ValueError(f"model: got {norm}, expected a forward pass before the conversion")
    new = DistributedBN1D(
        norm.num_features,
        norm.eps,
        norm.affine,
        momentum=norm.momentum,
        track_running_stats=norm.track_running_stats,
    )
    new.weight, new.bias = norm.weight, norm.bias
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(new, name, buffer)
    return new.train(norm.training)
