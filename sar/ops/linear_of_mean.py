"""GraphSAGE's layer of means as one function of autograd.

Note [Linear of mean]. z = x W_own^T + b + mean(x) W^T is six functions to torch. As a single one

* x W_own^T is computed while rows for the mean travel, and the other product is added where it is;
* in backward the gradients of rows go home before anything is computed that can be computed
  beside them, where torch would begin with what was called last;
* both parts of dx are summed in one tensor, which is the one that gradients come home to.

The layer's own rows, O x, are all of x, or in a block of the graph the first num_dst of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar.config import Policy
from sar.edges.push_pull import linear_relation
from sar.edges.relation import Relation
from sar.ops.aggregate import (
    Arrival,
    Home,
    Place,
    aggregate,
    aggregate_backward,
    agree_sums,
    begin_aggregate,
    mean_scale,
)
from sar.ops.first_order import first_order
from sar.ops.linear_sum import AddLinear
from sar.ops.overwrite import may_overwrite
from sar.stream import GradientReturn
from sar.stream.wanted import agree_wanted
from sar.stream.zeros import NonZeros, Skipped


def linear_of_mean(
    relation: Relation, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy
) -> Tensor:
    """O x @ own^T + bias + mean @ weight^T: mean_i is that of the rows x_j over edges (j -> i).

    Collective, as is its backward pass; ranks that compute the same by :func:`aggregate` and
    torch exchange the same messages. See Note [Linear of mean].

    Args:
        x: [num_src, width_in] contiguous owned source rows; O x, the first num_dst of them, are the
            destinations. It or ``weight`` asks for a gradient.
        own, weight: [width, width_in] of the dtype of ``x``, float32 or float64.
        bias: [width] or none.
        policy: not lossy.

    Returns:
        [num_dst, width].
    """
    with torch._C.DisableTorchFunction():  # modes would slow it
        return _linear_of_mean(relation, x, own, weight, bias, policy)


def projects_first(weight: Tensor) -> bool:
    """Whether rows are made narrower before they are summed, not after it."""
    return weight.shape[1] > weight.shape[0]


def _linear_of_mean(
    relation: Relation, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, policy: Policy
) -> Tensor:
    is_narrow = projects_first(weight)
    summed = x.new_empty((0, len(weight))).requires_grad_() if is_narrow else x
    agree_wanted(relation.plan, [("rows of a mean", summed)], 1)
    if not summed.requires_grad:
        mean = aggregate(relation, x, "mean", policy)
        return AddLinear.apply(F.linear(x[: len(mean)], own, bias), mean, weight, None, 1)
    means = _Means(relation, policy, x.dtype, agree_sums(relation, summed, policy))
    if is_narrow:
        return _LinearOfNarrowMean.apply(x, own, weight, bias, means)
    arrival: Arrival = []
    homed = Home.apply(x, arrival)  # a view, so it is not saved: it would be another reference to x
    return _LinearOfMean.apply(homed, own, weight, bias, x.detach(), means, arrival, ref(x))


class _Means:
    """The means of one layer, as its two passes stream them."""

    def __init__(
        self, relation: Relation, policy: Policy, dtype: torch.dtype, skips: Skipped
    ) -> None:
        self.relation, self.policy, self.skips = relation, policy, skips
        self.scale = mean_scale(relation, dtype)

    def begin(
        self, rows: Tensor, summed: ReferenceType[Tensor] | None = None
    ) -> tuple[Tensor, Callable[[], None]]:
        """S A rows, which are whole when what comes with them has been called.

        Args:
            summed: what the caller gave of ``rows``, where these may travel without their zeros.
        """
        self.streamed = linear_relation(self.relation, rows, None, self.policy)
        zeros = None
        if self.skips and summed is not None:
            zeros = NonZeros(self.streamed.plan, rows, summed)
        self.zeros = zeros if self.skips is Skipped.ROWS_AND_GRADIENTS else None
        return begin_aggregate(self.streamed, rows, None, self.scale, self.policy, None, zeros)

    def home(self, dout: Tensor, place: Place | None = None) -> GradientReturn:
        """A^T S dout, the last rounds of it still on their way."""
        if self.zeros is not None:
            self.zeros.check()
        return aggregate_backward(
            self.streamed, dout, None, self.scale, self.policy, self.zeros, place=place
        )


class _LinearOfMean(Function):
    """z = O x own^T + b + (S A x) weight^T.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if nobody else has it
    own       [width, width_in]      replicated; saved (a parameter)
    weight    [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    S         [num_dst]              this rank; 1 / in-degree; held
    mean      [num_dst, width_in]    this rank; saved. Becomes dmean
    halo      [<= round, width_in]   peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    dx        [num_src, width_in]    this rank; what comes home is added by :class:`Home`
    ========  =====================  =====================================================

    Forward: own rows are multiplied while the rounds travel. Backward with D = dz, in this order:
    dweight = D^T mean; dmean = D weight, where the mean was; dx = A^T S dmean, on its way home
    while the others are computed; down = D^T O x, before the own part of dx takes its place; db =
    the sum of the rows of D; dx += O^T D own.
    """

    @staticmethod
    def forward(
        ctx: Any, homed: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
        x: Tensor, means: _Means, arrival: Arrival, summed: ReferenceType[Tensor],
    ) -> Tensor:  # fmt: skip
        mean, finish = means.begin(x, summed)
        z = F.linear(x[: len(mean)], own, bias)
        finish()
        ctx.save_for_backward(x, own, weight, mean)
        ctx.means, ctx.arrival = means, arrival
        return z.addmm_(mean, weight.t())

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight, mean = ctx.saved_tensors
        _, asks_own, asks_weight, asks_bias, *_ = ctx.needs_input_grad
        dz = dz.contiguous()
        dweight = dz.t() @ mean if asks_weight else None
        dmean = torch.mm(dz, weight, out=mean if may_overwrite(mean, dz) else None)
        down = None
        in_place = may_overwrite(x, dz)

        def place() -> Tensor | None:  # called when the first rounds travel
            nonlocal down
            down = dz.t() @ x[: len(dz)] if asks_own else None
            return x if in_place else None

        home = ctx.means.home(dmean, place)
        ctx.arrival.append(home)
        dbias = dz.sum(0) if asks_bias else None
        dx = home.own()
        dx[: len(dz)].addmm_(dz, own)
        return dx, down, dweight, dbias, None, None, None, None


class _LinearOfNarrowMean(Function):
    """z = O x own^T + b + S A y with y = x weight^T, which is narrower than x.

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved (an input). Becomes dx if nobody else has it
    own       [width, width_in]      replicated; saved (a parameter)
    weight    [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    S         [num_dst]              this rank; 1 / in-degree; held
    y, dy     [num_src, width]       this rank; in one pass each
    halo      [<= round, width]      peers; fetched per round, reduced, dropped
    z         [num_dst, width]       this rank; not saved
    ========  =====================  =====================================================

    Forward: own rows are multiplied while the rounds travel. Backward with D = dz, in this order:
    dy = A^T S D, on its way home while the next two are computed; down = D^T O x; db = the sum of
    the rows of D; dweight = dy^T x; dx = dy weight, where x was; dx += O^T D own.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, means: _Means
    ) -> Tensor:
        ctx.save_for_backward(x, own, weight)
        ctx.means = means
        mean, finish = means.begin(x @ weight.t())
        z = F.linear(x[: len(mean)], own, bias)
        finish()
        return z.add_(mean)

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight = ctx.saved_tensors
        asks_x, asks_own, asks_weight, asks_bias, _ = ctx.needs_input_grad
        dz = dz.contiguous()
        home = ctx.means.home(dz)
        down = dz.t() @ x[: len(dz)] if asks_own else None
        dbias = dz.sum(0) if asks_bias else None
        dy = home.finish()
        dweight = dy.t() @ x if asks_weight else None
        dx = None
        if asks_x:
            dx = torch.mm(dy, weight, out=x if may_overwrite(x, dz) else None)
            dx[: len(dz)].addmm_(dz, own)
        return dx, down, dweight, dbias, None
