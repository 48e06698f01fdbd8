"""GraphSAGE's layer of means, recomputed: a few columns of the means at a time.

Whole, it would take five tensors of the size of a layer's rows with its gradients: x, z, the mean
and both parts of dx. But z is a sum over blocks c of the columns of x,

    z = x W_own^T + b + sum over c of (S A x_c) W_c^T,

and what backward needs is a matter of these blocks, too: dW_c = dz^T (S A x_c) and
dx_c = dz W_own,c + A^T S (dz W_c). So neither the mean nor a part of dx is ever whole, and dx_c may
go where x_c was. The rows of a block are fetched again in backward, as a recomputed layer fetches
rows again; no more bytes travel than without blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from sar._private import frees_graph
from sar.config import Policy
from sar.edges.relation import Relation
from sar.ops.saving import compute_once, first_order, owns_saved, repeats, valued
from sar.ops.sums import Sums, mean_scale, sums_over

BLOCK = 32  # columns: at most two cache lines of a row


def sage_mean_by_columns(
    relation: Relation, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
    policy: Policy, *, sum_first: bool | None = None, donate: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`sar.layers.sage.sage_mean` in a layer that is recomputed, on all ranks or none. Rows
    travel a few columns at a time. ``x`` asks for a gradient; its rows are the destinations."""
    relation.group.meter.tell("fused, recomputed")
    is_narrow = weight.shape[1] > weight.shape[0] if sum_first is None else not sum_first
    blocks = compute_once(lambda: _Blocks(relation, policy, is_narrow))
    blocks.kept.clear()
    saved = _MeanLayerByColumns.apply(x, own, weight, bias, blocks, donate)
    tensors = [None if t is None else t.detach() for t in (x, own, weight, bias)]
    return valued(saved, lambda: blocks.forward(*tensors))  # type: ignore[arg-type]


@dataclass
class _Blocks:
    """The means of one recomputed layer, as its two passes need them."""

    relation: Relation
    policy: Policy
    is_narrow: bool
    kept: list[Tensor] = field(default_factory=list)  # means of a repeated forward pass

    def forward(self, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = F.linear(x, own, bias)
        if self.is_narrow:
            out.add_(self.mean(x @ weight.t()))
        else:
            for columns in _columns(x):
                mean = self.mean(x[:, columns].contiguous())
                out.addmm_(mean, weight[:, columns].t())
                if repeats():  # backward is next
                    self.kept.append(mean)
                del mean  # before the next block takes memory
        self.relation.group.pool.clear()
        return out

    def backward(self, x: Tensor, dz: Tensor, own: Tensor, weight: Tensor, dx: Tensor) -> Tensor:
        """The gradient of ``weight``; fills ``dx``, which may be ``x``."""
        if self.is_narrow:
            dy = self.home(dz)
            dweight = dy.t() @ x
            torch.mm(dz, own, out=dx).addmm_(dy, weight)
        else:
            dweight = torch.empty_like(weight)
            kept, self.kept = self.kept[::-1], []
            for columns in _columns(x):
                mean = kept.pop() if kept else self.mean(x[:, columns].contiguous())
                dweight[:, columns] = dz.t() @ mean
                dmean = torch.mm(dz, weight[:, columns], out=mean)
                home = self.home(dmean)
                torch.addmm(home, dz, own[:, columns], out=dx[:, columns])
                del mean, dmean, home  # before the next block takes memory
        self.relation.group.pool.clear()
        return dweight

    def mean(self, x: Tensor) -> Tensor:
        """S A x."""
        mean, finish = self._sums(x).begin(x)
        finish()
        return mean

    def home(self, dout: Tensor) -> Tensor:
        """A^T S dout."""
        return self._sums(dout).home(dout, settled=True).finish()

    def _sums(self, rows: Tensor) -> Sums:
        def scale() -> Tensor:
            return mean_scale(self.relation, rows.dtype)

        return sums_over(self.relation, rows, self.policy, "mean", scale, agreed=True)


def _columns(x: Tensor) -> Iterator[slice]:
    for start in range(0, x.shape[1], BLOCK):
        yield slice(start, min(start + BLOCK, x.shape[1]))


class _MeanLayerByColumns(Function):
    """z = x own^T + (S A x) weight^T + b, whose value is computed elsewhere: Note [Saved first].

    ========  =====================  =====================================================
    tensor    shape                  owner and lifetime
    ========  =====================  =====================================================
    x         [num_src, width_in]    this rank; saved. Becomes dx if it is donated
    own       [width, width_in]      replicated; saved (a parameter)
    weight    [width, width_in]      replicated; saved (a parameter)
    b         [width] or none        replicated
    S         [num_dst]              this rank; 1 / in-degree
    mean      [num_dst, <= BLOCK]    this rank; one block at a time, reduced again in backward.
                                     Becomes the gradient of the block
    halo      [<= round, <= BLOCK]   peers; fetched per round, reduced, dropped; fetched again
    out       [num_dst, width]       no memory: it stands for z in the graph of autograd
    ========  =====================  =====================================================

    Backward with D = dz, by blocks c of columns: dweight_c = D^T (S A x_c);
    dx_c = D own_c + A^T S (D weight_c); before, down = D^T x; db = the sum of the rows of D. Where
    rows are multiplied first, dy = A^T S D, dweight = dy^T x, dx = D own + dy weight.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None,
        blocks: _Blocks, donate: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, own, weight)
        ctx.blocks, ctx.donate, ctx.owns = blocks, donate, owns_saved()
        return x.new_zeros(()).expand(len(x), len(own))

    @staticmethod
    @first_order
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, own, weight = ctx.saved_tensors
        dx = x.detach() if ctx.donate and ctx.owns and frees_graph() else torch.empty_like(x)
        dz = dz.contiguous()
        asks_own, asks_bias = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        down = dz.t() @ x if asks_own else None
        dbias = dz.sum(0) if asks_bias else None
        dweight = ctx.blocks.backward(x, dz, own, weight, dx)
        return dx, down, dweight, dbias, None, None
