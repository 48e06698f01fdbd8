"""Graph convolution (arXiv 1609.02907) as one autograd function: z = N A (M x) W + b, where M and N
are powers of degrees, or 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.relation import Relation
from sar.layers.sage import ProductFirst, SumFirst, SumUnsaved, saves_no_sums, scaled
from sar.ops.aggregate import aggregate
from sar.ops.sums import sums_over
from sar.stream.plan import agree_on_gradients


class Degrees(NamedTuple):
    """A power of degrees, by which rows are multiplied.

    Attributes:
        of: ``"in"`` or ``"out"``: the edges that end in a row, or start in it on any rank.
        power: -1 divides by them.
        empty: the factor of rows without such edges.
    """

    of: str
    power: float
    empty: float = 1.0


def gcn(
    relation: Relation, x: Tensor, weight: Tensor | None, bias: Tensor | None, policy: Policy,
    *, src: Degrees | None = None, dst: Degrees | None = None, weight_first: bool = False,
    donate: bool = False,
) -> Tensor:  # fmt: skip
    """N A (M x) @ weight + bias, the sum over edges (j -> i); collective, as is its backward.

    Other ranks may use :func:`sar.ops.aggregate.aggregate` and torch instead: messages agree.

    Args:
        x: [num_src, width_in] contiguous owned source rows, float32 or float64.
        weight: [width_in, width] of the dtype of ``x``; ``None``: width is width_in.
        bias: [width] or none.
        src, dst: M and N, of source and of destination rows; ``None`` is 1. In-degrees of
            sources are for relations whose sources are their destinations.
        weight_first: rows are multiplied before they are summed.
        donate: backward writes dx over ``x`` where it reads ``x``, unless it keeps the graph.

    Returns [num_dst, width], which nobody else has or saved.
    """
    if relation.group.meter.notes is not None:
        relation.group.meter.tell("fused")
    first = weight if weight_first else None
    asks = x.requires_grad or (first is not None and first.requires_grad)
    if not (asks and torch.is_grad_enabled()):
        return _of_constant_rows(relation, x, weight, bias, policy, src, dst, weight_first)
    factor = degree_factor(relation, x.dtype, src)
    is_made = factor is not None or first is not None
    width = None if not is_made else x.shape[1] if first is None else first.shape[1]

    def scale() -> Tensor | None:
        return degree_factor(relation, x.dtype, dst)

    function: type[Function] = SumFirst if first is None else ProductFirst
    turned, name = None if weight is None else weight.t(), f"gcn {src} {dst}"
    if first is None and saves_no_sums(relation, x, turned):
        function, name = SumUnsaved, f"{name} before a product"
    sums = sums_over(relation, x, policy, name, scale, width=width)
    return function.apply(x, None, turned, bias, factor, sums, donate)


def degree_factor(relation: Relation, dtype: torch.dtype, degrees: Degrees | None) -> Tensor | None:
    """The factor of each row, [n]; kept, and not to be written into."""
    if degrees is None:
        return None
    key = "degrees", degrees, dtype
    if (known := relation.known.get(key)) is not None:
        return known  # type: ignore[no-any-return]

    def make() -> Tensor:
        found = relation.in_degrees if degrees.of == "in" else relation.out_degrees
        factor = found.to(dtype).pow_(degrees.power)
        return factor.masked_fill_(found == 0, degrees.empty)

    return relation.derived(key, make)


def _of_constant_rows(
    relation: Relation, x: Tensor, weight: Tensor | None, bias: Tensor | None, policy: Policy,
    src: Degrees | None, dst: Degrees | None, weight_first: bool,
) -> Tensor:  # fmt: skip
    """:func:`gcn` where no gradient travels: the sums may be those of an earlier call."""
    factor, scale = (degree_factor(relation, x.dtype, degrees) for degrees in (src, dst))
    if weight is not None and weight_first:
        rows = scaled(x, factor) @ weight
        agree_on_gradients(relation.plan, [("rows of a sum", rows)], 1)
        z = scaled(aggregate(relation, rows, "sum", policy), scale)
        return z if bias is None else z + bias
    rows, name = x.detach(), f"gcn {src} {dst}"
    if factor is None:  # the rows of the plain sum
        agree_on_gradients(relation.plan, [("rows of a sum", x)], 1)
        sums = scaled(aggregate(relation, x, "sum", policy), scale)
    else:
        kind = sums_over(relation, x, policy, name, lambda: None, trained=False)
        sums = kind.reduced(lambda: scaled(rows, factor), lambda out: scaled(out, scale))
    if weight is not None:
        return F.linear(sums, weight.t(), bias)
    return sums.clone() if bias is None else sums + bias
