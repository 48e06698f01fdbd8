"""PyG's norms over the rows of all ranks, which :func:`sar.prepare` puts in place of PyG's.

A converted norm is the same module, with a class that takes the rows of all ranks for one graph
where it is given no ``batch``. Parameters, buffers, hooks and state dicts stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric import nn as of_pyg

from sar.comm import current_group
from sar.frontends.pyg.groups import NodeGroups, reduce_rows


class _OverRanks(nn.Module):
    """A norm that sums by the groups it is given, and gets that of all rows where there are none"""

    def forward(self, x: Tensor, batch: Any = None, batch_size: int | None = None) -> Tensor:
        """[n, F] as ``x``, float; collective. A plain ``batch`` tells the ranks' graphs apart."""
        groups = NodeGroups.whole(x) if batch is None else batch
        return super().forward(x, groups, batch_size)  # type: ignore[misc]


class GraphNorm(_OverRanks, of_pyg.GraphNorm):
    """Source: Cai et al., arXiv 2009.03294."""


class PairNorm(_OverRanks, of_pyg.PairNorm):
    """Source: Zhao and Akoglu, arXiv 1909.12223."""


class MeanSubtractionNorm(_OverRanks, of_pyg.MeanSubtractionNorm):
    """Source: Yang et al., arXiv 2003.13663."""


class GraphSizeNorm(_OverRanks, of_pyg.GraphSizeNorm):
    """Source: Dwivedi et al., arXiv 2003.00982."""


class InstanceNorm(_OverRanks, of_pyg.InstanceNorm):
    """Source: Ulyanov et al., arXiv 1607.08022."""

    def forward(self, x: Tensor, batch: Any = None, batch_size: int | None = None) -> Tensor:
        """[n, F] as ``x``, float; collective."""
        out = super().forward(x, batch, batch_size)
        for name in ("running_mean", "running_var"):
            if (buffer := getattr(self, name)) is not None:
                setattr(self, name, buffer.detach())  # as one process leaves them without batch
        return out


class LayerNorm(of_pyg.LayerNorm):
    """Source: Ba et al., arXiv 1607.06450."""

    def forward(self, x: Tensor, batch: Any = None, batch_size: int | None = None) -> Tensor:
        """[n, F] as ``x``, float; collective with ``mode="graph"``.

        Without ``batch`` its formula is another one: eps is added to the deviation.
        """
        is_whole = batch is None or getattr(batch, "is_whole", False)
        if self.mode != "graph" or not is_whole:
            return super().forward(x, batch, batch_size)
        groups = NodeGroups.whole(x) if batch is None else batch
        x = x - reduce_rows(groups, x, 0, "mean").mean()
        variance = reduce_rows(groups, x * x, 0, "mean").mean()
        is_some = variance > 0  # torch's deviation of equal numbers has no gradient
        out = x / (torch.where(is_some, variance, 1).sqrt() * is_some + self.eps)
        return out if self.weight is None else out * self.weight + self.bias


class BatchNorm(of_pyg.BatchNorm):
    """Source: Ioffe and Szegedy, arXiv 1502.03167. Its part is a :class:`sar.DistributedBN1D`."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, F] as ``x``, float; collective in training."""
        if self.allow_single_element and int(NodeGroups.whole(x).counts) > 1:
            return self.module(x)  # however many this rank has
        return super().forward(x)


class HeteroBatchNorm(of_pyg.HeteroBatchNorm):
    """A batch norm for each type of rows."""

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """[n, F] as ``x``, float; ``type_vec`` int64 [n]. Collective."""
        if not self.training and self.track_running_stats:
            return super().forward(x, type_vec)
        types = NodeGroups(type_vec, current_group(), self.num_types)
        return super().forward(x, types)


CONVERTED: dict[type, type] = {
    getattr(of_pyg, kind.__name__): kind
    for kind in (
        GraphNorm, PairNorm, MeanSubtractionNorm, GraphSizeNorm, InstanceNorm, LayerNorm,
        BatchNorm, HeteroBatchNorm,
    )
}  # fmt: skip


def converted(norm: nn.Module) -> nn.Module:
    """The same module, made to normalize with the rows of all ranks if it is one of PyG's norms."""
    kind = CONVERTED.get(type(norm))
    if kind is not None:
        norm.__class__ = kind
    return norm
