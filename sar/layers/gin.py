"""Sums of a graph isomorphism network (arXiv 1810.00826) as one autograd function:
z = (1 + eps) O x + S A x."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.aggregate import aggregate
from sar.ops.saving import first_order, owns_saved
from sar.ops.sums import Sums, mean_scale, sums_over
from sar.stream.plan import agree_on_gradients


def gin_sum(
    relation: Relation, x: Tensor, eps: Tensor, policy: Policy, *, op: str = "sum",
    donate: bool = False,
) -> Tensor:  # fmt: skip
    """(1 + eps) O x + S A x, the sum or mean over edges (j -> i); collective, as is its backward.

    Other ranks may use :func:`sar.ops.aggregate.aggregate` and torch instead: messages agree.

    Args:
        x: [num_src, width] contiguous owned source rows, float32 or float64; O x, the first num_dst
            of them, are the destinations.
        eps: [1] of the dtype of ``x``.
        donate: backward writes dx over ``x`` where it reads ``x``, unless it keeps the graph.

    Returns [num_dst, width], which nobody else has or saved.
    """
    if relation.group.meter.notes is not None:
        relation.group.meter.tell("fused")
    if not (x.requires_grad and torch.is_grad_enabled()):
        agree_on_gradients(relation.plan, [("rows of a sum", x)], 1)
        sums = aggregate(relation, x, op, policy)
        return (1 + eps) * x[: len(sums)] + sums

    def scale() -> Tensor | None:
        return mean_scale(relation, x.dtype) if op == "mean" else None

    return _SumAndSelf.apply(x, eps, sums_over(relation, x, policy, op, scale), donate)


class _SumAndSelf(Function):
    """z = (1 + eps) O x + S A x.

    ========  ===================  =======================================================
    tensor    shape                owner and lifetime
    ========  ===================  =======================================================
    x         [num_src, width]     this rank; saved (an input) if eps asks for a gradient.
                                   Becomes dx then, if it is donated
    eps       [1]                  replicated; saved (a parameter, or a buffer)
    S         [num_dst] or none    this rank; 1 / in-degree for the mean; kept by the relation
    halo      [<= round, width]    peers; fetched per round, reduced, dropped
    z         [num_dst, width]     this rank; not saved
    dx        [num_src, width]     this rank; the tensor that gradients come home to
    ========  ===================  =======================================================

    Backward with D = dz: dx = A^T S D, on its way home while the rest is computed: deps = <D, O x>,
    before the own part of dx takes the place of x; dx += (1 + eps) O^T D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: Tensor, sums: Sums, donate: bool) -> Tensor:
        z, finish = sums.begin(x)
        z.addcmul_(sums.here(x)[: len(z)], 1 + eps)
        finish()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, eps)
        ctx.sums, ctx.donate, ctx.owns = sums, donate, owns_saved()
        ctx.sends_gradients = True
        return z

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, eps = ctx.saved_tensors
        dz, deps = dz.contiguous(), None

        def place() -> Tensor | None:  # called when the first rounds travel
            nonlocal deps
            if x is None:
                return None
            deps = torch.dot(dz.view(-1), x[: len(dz)].reshape(-1)).view(1)
            return x.detach() if ctx.donate and ctx.owns and frees_graph() else None

        home = ctx.sums.home(dz, place)
        home.own()[: len(dz)].addcmul_(ctx.sums.here(dz), 1 + eps)
        return home.finish(), deps, None, None
