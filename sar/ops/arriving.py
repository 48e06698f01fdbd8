"""Rows that a layer projects: they travel as they are, and are projected where they arrive.

Note [Projected on arrival]. A layer of DGL that sums values v = x W^T + b weighted by attention
sends rows of v twice and their gradients once, although nobody asks for the gradient of x where
that is the input of a model. There x travels instead, provided that it is no wider: who reads a row
computes its values and scores, and no gradient goes home. Values of owned rows are not kept
either: backward computes them again. Of the gradients d of what it computed
of a halo row a rank needs d^T x alone, its share of the gradient of W; those are summed over the
ranks as all gradients of parameters are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sar.comm import Group
from sar.ops.saving import once


@dataclass(frozen=True)
class LinearRows:
    """Rows and what a linear layer made of them: rows @ weight^T + bias.

    Attributes:
        rows: [n, width_in], which ask for no gradient.
        weight: [width, width_in].
        bias: [width] or none.
    """

    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Copies of weight and bias as they are now, without gradient."""
        weight = self.weight.detach().clone()
        return weight, None if self.bias is None else self.bias.detach().clone()


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_linear(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Note that ``out`` is the linear layer of ``rows``, if these ask for no gradient."""
    if not rows.requires_grad and out.requires_grad:
        _made[out] = LinearRows(rows, weight, bias)


def linear_of(values: Tensor) -> LinearRows | None:
    """What was noted of ``values``, or of what they are a view of, as long as they are that."""
    out = values if values._base is None else values._base
    found: LinearRows | None = _made.get(out)
    if found is None or values._version or not values.is_contiguous():
        return None
    return found if values.numel() == out.numel() else None


def all_found(group: Group, linear: LinearRows | None) -> LinearRows | None:
    """``linear`` if all ranks have one, of rows of one width; ``None`` otherwise. Collective, at
    each call: whoever looks into a layer from some moment on, on a single rank, leaves nobody
    waiting."""
    if group.size == 1:
        return None
    width = 0 if linear is None else linear.rows.shape[1]

    def agreed() -> bool:
        least, most = group.all_reduce(torch.tensor([width, -width]), "min").tolist()
        return 0 < least == -most

    return linear if once(agreed) else None


class Arriving:
    """Values v and keys k_h = <a_h, v> of rows, (v | k) = x M^T + c, and their gradients.

    With W' = (W | b) and M' = (M | c): M' = (W' ; A W'), where A sums the rows of a head weighted
    by a. Backward, of gradients d of rows (v | k): dM' = (d^T x | the sum of d), in two parts
    dM' = (V ; K), dW'_hd = V_hd + a_hd K_h, da_hd = <W'_hd, K_h>.

    Args:
        rows: x, [num_src, F] owned, as the layer got them.
        weight: W' as it was in the forward pass, [H, D, F or F + 1].
        matrix: M', the same.
    """

    def __init__(self, rows: Tensor, weight: Tensor, matrix: Tensor) -> None:
        self.given, self.rows = rows, rows.detach().contiguous()
        self.weight, self.matrix = weight, matrix
        self.width = rows.shape[1]
        self.dmatrix = torch.zeros_like(matrix)

    @classmethod
    def of(cls, linear: LinearRows, vector: Tensor | None, heads: int) -> Arriving:
        """In a forward pass.

        Args:
            vector: a, H * D numbers; ``None``: there are no keys, or they are the values.
        """
        weight, bias = linear.weight.detach(), linear.bias
        columns = [weight] if bias is None else [weight, bias.detach().view(-1, 1)]
        matrix = joined = torch.cat(columns, 1)
        by_head = joined.view(heads, -1, joined.shape[1])
        if vector is not None:
            keys = (vector.detach().view(heads, -1, 1) * by_head).sum(1)
            matrix = torch.cat([joined, keys])
        return cls(linear.rows, by_head, matrix)

    def project(self, halo: Tensor, out: Tensor) -> None:
        """``out`` [R, width of M] = (v | k) of halo rows [R, F]."""
        torch.mm(halo, self.matrix[:, : self.width].t(), out=out)
        if self.matrix.shape[1] > self.width:
            out += self.matrix[:, self.width]

    def values(self) -> Tensor:
        """[num_src, H * D] v of the owned rows, as the layer computed them."""
        weight = self.weight.flatten(0, 1)
        columns = weight[:, : self.width].t()
        if weight.shape[1] == self.width:
            return self.rows @ columns
        return torch.addmm(weight[:, self.width], self.rows, columns)

    def add_grads(self, halo: Tensor, grads: Tensor) -> None:
        """Take in the gradients, alike, of what :meth:`project` computed."""
        self.dmatrix[:, : self.width].addmm_(grads.t(), halo)
        if self.matrix.shape[1] > self.width:
            self.dmatrix[:, self.width] += grads.sum(0)

    def finish(self, vector: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """dW, db and da of all that was taken in; ``None`` for what there is not."""
        num_values, dvector = self.weight.shape[:2].numel(), None
        dweight, dkeys = self.dmatrix[:num_values], self.dmatrix[num_values:]
        if vector is not None:
            by_head = vector.detach().view(*self.weight.shape[:2], 1)
            dweight = dweight + (by_head * dkeys.unsqueeze(1)).flatten(0, 1)
            dvector = (self.weight * dkeys.unsqueeze(1)).sum(2)
        dbias = dweight[:, self.width] if dweight.shape[1] > self.width else None
        return dweight[:, : self.width], dbias, dvector
