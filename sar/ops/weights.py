"""The gradient of a weight per edge: products of both ends' rows, one shard at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sar.config import Policy
from sar.edges.relation import Relation
from sar.kernels import wide_dtype
from sar.kernels.sddmm import edge_dots
from sar.stream import Pass


def weight_gradient(
    relation: Relation, x: Tensor, dout: Tensor, scale: Tensor | None, policy: Policy,
    kept: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """dw_e = s_i <x_j, dout_i> for the local edges e = (j -> i); streams x again; collective.

    Args:
        x: [num_src, width] owned rows, contiguous.
        dout: [num_dst, width].
        scale: [num_dst] s, wide dtype; ``None`` is 1.
        kept: the halo of each round, where the policy keeps it.

    Returns:
        [num_edges] in the wide dtype of ``x``; as large as the weight itself.
    """
    wide = wide_dtype(x.dtype)
    dweight = torch.empty(relation.num_edges, dtype=wide)
    dout = dout.to(wide).contiguous()
    for step in Pass(relation, policy, x, order=True, kept=kept):
        edge_dots(dweight, step.shard, step.rows.to(wide), dout, scale)
    return dweight
