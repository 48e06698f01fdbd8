"""Rows that a layer projects: they travel as they are, and are projected where they arrive.

Note [Projected on arrival]. A layer that sums values v = x W^T + b weighted by attention sends
rows of v twice and their gradients once, although nobody asks for the gradient of x where that is
the input of a model. There x travels instead, provided that it is no wider: who reads a row
computes its values and scores, and no gradient goes home. Of the gradients d of what it computed
of a halo row a rank needs d^T x alone, its share of the gradient of W; those are summed over the
ranks as all gradients of parameters are. What travels is part of the protocol: all ranks do it or
none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sar.config import EXACT, Policy
from sar.edges import Relation
from sar.kernels import wide_dtype
from sar.ops.saving import once
from sar.stream.wanted import agree_wanted


def input_travels(
    relation: Relation, x: Tensor, weight: Tensor, width: int, policy: Policy, fused: bool
) -> bool:
    """Whether x travels by Note [Projected on arrival]: if it may on all ranks, rows of one width.

    Collective where ``x`` asks for no gradient and ``weight`` does, at each call: whoever takes
    another way from some moment on, on a single rank, leaves nobody waiting.

    Args:
        weight: what projects x.
        width: of what is made of a row and would travel instead.
        fused: whether this rank computes the layer as a whole.

    Raises ``ValueError`` on every rank where ``x`` or ``weight`` asks for a gradient on some only.
    """
    group = relation.group
    agree_wanted(relation.plan, [("rows", x), ("their weight", weight)], 2)
    trained = weight.requires_grad and torch.is_grad_enabled()
    if x.requires_grad or not trained or group.size == 1 or policy.lossy != EXACT:
        return False
    fits = fused and x.dtype == wide_dtype(x.dtype) and x.shape[1] <= width
    mine = x.shape[1] if fits else 0

    def agreed() -> bool:
        least, most = group.all_reduce(torch.tensor([mine, -mine]), "min").tolist()
        return 0 < least == -most

    return once(agreed)


class Arriving:
    """Values v and keys k_h = <a_h, v> of rows, (v | k) = x M^T + c, and their gradients.

    With W' = (W | b) and M' = (M | c): M' = (W' ; A W'), where A sums the rows of a head weighted
    by a. Backward, of gradients d of rows (v | k): dM' = (d^T x | the sum of d), in two parts
    dM' = (V ; K), dW'_hd = V_hd + a_hd K_h, da_hd = <W'_hd, K_h>.

    Args:
        rows: x, [num_src, F] owned, as the layer got them.
        weight: W, [H * D, F].
        bias: b, [H * D] or none.
        heads: H.
        vector: a, H * D numbers; ``None``: there are no keys, or they are the values.
    """

    def __init__(
        self, rows: Tensor, weight: Tensor, bias: Tensor | None, heads: int, vector: Tensor | None
    ) -> None:
        self.given, self.rows = rows, rows.detach().contiguous()
        self.width = rows.shape[1]
        columns = [weight] if bias is None else [weight, bias.view(-1, 1)]
        self.matrix = torch.cat(columns, 1)
        self.by_head = self.matrix.view(heads, -1, self.matrix.shape[1])
        self.vector = None if vector is None else vector.view(heads, -1, 1)
        if self.vector is not None:
            self.matrix = torch.cat([self.matrix, (self.vector * self.by_head).sum(1)])
        self.dmatrix = torch.zeros_like(self.matrix)

    def project(self, halo: Tensor, out: Tensor) -> None:
        """``out`` [R, width of M] = (v | k) of halo rows [R, F]."""
        torch.mm(halo, self.matrix[:, : self.width].t(), out=out)
        if self.matrix.shape[1] > self.width:
            out += self.matrix[:, self.width]

    def add_grads(self, halo: Tensor, grads: Tensor) -> None:
        """Take in the gradients, alike, of what :meth:`project` computed."""
        self.dmatrix[:, : self.width].addmm_(grads.t(), halo)
        if self.matrix.shape[1] > self.width:
            self.dmatrix[:, self.width] += grads.sum(0)

    def finish(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dW, db and da of all that was taken in; ``None`` for what there is not."""
        num_values, dvector = self.by_head.shape[:2].numel(), None
        dweight, dkeys = self.dmatrix[:num_values], self.dmatrix[num_values:]
        if self.vector is not None:
            dweight = dweight + (self.vector * dkeys.unsqueeze(1)).flatten(0, 1)
            dvector = (self.by_head * dkeys.unsqueeze(1)).sum(2).flatten()
        dbias = dweight[:, self.width] if dweight.shape[1] > self.width else None
        return dweight[:, : self.width], dbias, dvector
