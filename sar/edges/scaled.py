"""Rows that are others times a number each: a new tensor at each call, with the same values.

Note [Scaled rows]. DGL's layers that normalize by degrees (``GraphConv``, ``SGConv``, ``TAGConv``)
write ``feat * norm``. So what they sum is another tensor in every epoch, also where nobody trains
the features. Of such a product it is noted which rows and which numbers it is made of: products of
the same rows and equal numbers, one after the other, are equal bit for bit. Only products in DGL's
layers that ask for no gradient are treated so; one that was written into since, or whose rows were,
is a tensor like any other. What is handed out of a kept result (Note [Constant rows]) is that
result each time, so that sums of sums are found, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class Scaled:
    """What a tensor was made of: rows times each of the factors, in this order.

    Attributes:
        rows: [n, ...].
        factors: [n, 1, ..] each.
    """

    rows: Tensor
    factors: tuple[Tensor, ...] = ()

    def versions(self, out: Tensor) -> list[int]:
        """Writes into ``out`` and what it was made of."""
        return [tensor._version for tensor in (out, self.rows, *self.factors)]


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


def note_scaled(out: Tensor, rows: Tensor, *factors: Tensor) -> None:
    """Note that ``out`` is ``rows`` times the factors, if writes into these can be told."""
    if not any(tensor.is_inference() for tensor in (out, rows, *factors)):
        before = scaled_of(rows)
        made = Scaled(before.rows, (*before.factors, *factors))
        _made[out] = made, made.versions(out)


def scaled_of(out: Tensor) -> Scaled:
    """What was noted of a tensor, if that is still so; else that it is itself."""
    made, versions = _made.get(out, (None, []))
    return made if made is not None and made.versions(out) == versions else Scaled(out)


def is_plain(x: Tensor) -> bool:
    """Whether it lies in memory of its own as it seems to."""
    return x.layout == torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def is_scaling(rows: Any, factor: Any) -> bool:
    """Whether a product is of rows and a number for each, none of which asks for a gradient."""
    return (
        type(rows) is Tensor
        and type(factor) is Tensor
        and rows.dim() == factor.dim() > 1
        and tuple(factor.shape) == (len(rows), *[1] * (rows.dim() - 1))
        and rows.is_floating_point()
        and (rows.dtype, rows.device) == (factor.dtype, factor.device)
        and not (rows.requires_grad or factor.requires_grad)
        and is_plain(rows)
        and is_plain(factor)
    )
