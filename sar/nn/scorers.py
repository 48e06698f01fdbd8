"""Scorers: how likely an edge is, from the rows of its end points."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sar.ops.typed import triple_product

_PAIR_ELEMENTS = 1 << 20  # of both ends' rows, expanded at once


class LinkScorer(nn.Module):
    """Scores edges one by one: no score may depend on the other edges of the call.

    Subclasses define :meth:`forward`; :meth:`against` only where there is a faster way.

    Attributes:
        num_types: edge types it knows, ``None`` when it takes none.
    """

    num_types: int | None = None

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None = None) -> Tensor:
        """[e] scores of edges: rows of sources [e, D], of destinations [e, D'], types int64 [e]."""
        raise NotImplementedError

    def against(
        self, rows: Tensor, edge_type: Tensor | None, candidates: Tensor, *, to_src: bool
    ) -> Tensor:
        """[b, n] scores of b rows with each of n candidates for the other end.

        Args:
            rows: [b, D] the known ends, with types [b].
            candidates: [n, D'] sources when ``to_src``, else destinations.
        """
        width = max(1, len(candidates) * (rows.shape[1] + candidates.shape[1]))
        parts = []
        for chunk in torch.arange(len(rows)).split(max(1, _PAIR_ELEMENTS // width)):
            known = rows[chunk].repeat_interleave(len(candidates), 0)
            other = candidates.repeat(len(chunk), 1)
            types = None
            if edge_type is not None:
                types = edge_type[chunk].repeat_interleave(len(candidates))
            src, dst = (other, known) if to_src else (known, other)
            parts.append(self(src, dst, types).view(len(chunk), len(candidates)))
        return torch.cat(parts) if parts else rows.new_empty((0, len(candidates)))


class DotScorer(LinkScorer):
    """s = h_u . h_v"""

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None = None) -> Tensor:
        """See :class:`LinkScorer`; types are not read."""
        return (src * dst).sum(1)

    def against(
        self, rows: Tensor, edge_type: Tensor | None, candidates: Tensor, *, to_src: bool
    ) -> Tensor:
        """See :class:`LinkScorer`."""
        return rows @ candidates.T


class DistMultScorer(LinkScorer):
    """s = sum_i h_u[i] w_r[i] h_v[i] with one learned vector w_r for each edge type r.

    Source: Yang et al., arXiv 1412.6575.

    Args:
        num_types: edge types.
        dim: width of the rows.
    """

    def __init__(self, num_types: int, dim: int) -> None:
        super().__init__()
        self.num_types = num_types
        self.weight = nn.Parameter(torch.empty(num_types, dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None = None) -> Tensor:
        """See :class:`LinkScorer`."""
        return triple_product(src, self.weight, dst, self._types(edge_type))

    def against(
        self, rows: Tensor, edge_type: Tensor | None, candidates: Tensor, *, to_src: bool
    ) -> Tensor:
        """See :class:`LinkScorer`."""
        return (rows * self.weight.index_select(0, self._types(edge_type))) @ candidates.T

    def _types(self, edge_type: Tensor | None) -> Tensor:
        if edge_type is None:
            raise ValueError("edge_type: got None, expected int64 types")
        return edge_type


class MLPScorer(LinkScorer):
    """s = w . relu(W [h_u, h_v] + b) + c

    Args:
        in_feats: width of a source row and a destination row together.
        hidden: width in between.
    """

    def __init__(self, in_feats: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(in_feats, hidden), nn.Linear(hidden, 1)

    def forward(self, src: Tensor, dst: Tensor, edge_type: Tensor | None = None) -> Tensor:
        """See :class:`LinkScorer`; types are not read."""
        both = torch.cat([src, dst], dim=1)
        return self.out(torch.relu(self.hidden(both))).squeeze(1)
