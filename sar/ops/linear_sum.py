"""Linear layers of sums over neighbours, computed where what they are added to is.

Note [Linear sums]. ``self.fc_self(h) + self.fc_neigh(neigh)`` makes three tensors of the size of
a layer's rows, and backward two more; fresh memory is dear. Where the code of DGL's layers applies
an ``nn.Linear`` to rows that were summed over edges, the product waits until it is used. If that is
the addition, it is added to the other term in its place, provided that nobody else has that term
(Note [Temporaries]), and in backward the gradient of the summed rows is written where they were
(Note [Overwritten]). Between the two runs DGL's code alone: what could look at a product that is
not computed (hooks, modules of others, modes of others) keeps it from waiting.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from sar.ops.aggregate import is_aggregated
from sar.ops.arriving import note_linear
from sar.ops.bias import add_bias
from sar.ops.callers import has_hooks, is_linear, module_of
from sar.ops.capture import tensors_in
from sar.ops.frugal import Frugal
from sar.ops.head_sums import PRODUCTS, Product, can_wait, is_sum_of_last
from sar.ops.overwrite import may_overwrite
from sar.ops.remade import remade_linear
from sar.ops.reuse import ADDS, is_plain, is_temporary
from sar.ops.saving import takes_notes


class LinearSums(TorchFunctionMode):
    """Inside, linear layers of summed rows are computed late, see Note [Linear sums], and products
    of rows and a parameter, see Note [Head sums]; a bias is added by Note [Bias in place]; what
    other linear layers read is noted for Note [Projected on arrival]."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, _Late | Product] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for late in self._late.values():
                if not late.is_added:  # else nobody asked for the product itself
                    late.compute()
        self._late.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and _can_wait(*args) and _by_linear_of_dgl():
            return self._wait(*args)
        if func in ADDS and len(args) == 2 and not kwargs:
            term, late = self._late.get(id(args[0])), self._late.get(id(args[1]))
            if term is not None:
                term.compute()
            # As Frugal, which is outside of this mode and would count its reference as another's.
            if late is None and takes_notes() and is_temporary(args):
                return args[0].add_(args[1])
            if isinstance(late, _Late) and late.is_alike(args[0]):
                in_place = is_temporary(args)  # before there is another reference
                return late.add_to(args[0], in_place)
            biased = _by_code_of_dgl(sys._getframe()) and add_bias(*args)
            if isinstance(biased, Tensor):
                return biased
        if func in PRODUCTS and not kwargs and can_wait(*args):
            if _by_code_of_dgl(sys._getframe()):
                return self._hold(Product.of(*args))
        if func is Tensor.sum and is_sum_of_last(args, kwargs):
            product = self._late.get(id(args[0]))
            if isinstance(product, Product) and not product.is_done:
                return product.sums()
        if self._late:
            for tensor in tensors_in((args, kwargs)):
                if (waiting := self._late.get(id(tensor))) is not None:
                    waiting.compute()
        if func is F.linear and not kwargs and _are_alike(*args) and _by_linear_of_dgl():
            remade = remade_linear(*args)
            if remade is not None:
                return remade
            out = func(*args)
            note_linear(out, *args)
            return out
        return func(*args, **kwargs)

    def _wait(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._hold(_Late(rows.new_empty(len(rows), len(weight)), rows, weight, bias))

    def _hold(self, late: _Late | Product) -> Tensor:
        self._late[id(late.out)] = late
        return late.out


def may_wait(layer: Any) -> bool:
    """Whether nobody looks at what the parts of a layer of DGL compute.

    Args:
        layer: ``None`` where somebody else's code runs.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    return layer is not None and not has_hooks(layer) and all(type(m) is Frugal for m in modes)


@dataclass
class _Late:
    """rows @ weight^T + bias, which ``out`` [n, width] is to hold."""

    out: Tensor
    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    is_done: bool = False
    is_added: bool = False  # to something, without being computed

    def compute(self) -> None:
        """Fill ``out``, unless it is."""
        if not self.is_done:
            AddLinear.apply(self.out, self.rows, self.weight, self.bias, 0)
            self.is_done = True

    def is_alike(self, other: Any) -> bool:
        """Whether it can be added to ``other`` instead of being computed."""
        return (
            not self.is_done
            and type(other) is Tensor
            and (other.shape, other.dtype, other.device)
            == (self.out.shape, self.out.dtype, self.out.device)
        )

    def add_to(self, other: Tensor, in_place: bool) -> Tensor:
        """``other`` and the product."""
        self.is_added = True
        base = other if in_place else other.clone()
        return AddLinear.apply(base, self.rows, self.weight, self.bias, 1)


def _can_wait(rows: Any, weight: Any, bias: Any = None) -> bool:
    return is_aggregated(rows) and _are_alike(rows, weight, bias)


def _are_alike(rows: Any, weight: Any, bias: Any = None) -> bool:
    """Whether a linear layer gets matrices of one kind, with nothing special about them."""
    tensors = [rows, weight] if bias is None else [rows, weight, bias]
    return (
        type(rows) is Tensor
        and all(isinstance(t, Tensor) and is_plain(t) for t in tensors)
        and (rows.dim(), weight.dim()) == (2, 2)
        and rows.shape[1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and all((t.dtype, t.device) == (rows.dtype, rows.device) for t in tensors)
        and torch.autograd.forward_ad._current_level < 0
        and not torch.is_autocast_enabled(rows.device.type)
    )


def _by_linear_of_dgl() -> bool:
    """Whether it is an ``nn.Linear`` that DGL's code called that calls a torch function."""
    frame: FrameType | None = sys._getframe(2)
    if frame is None or frame.f_code is not nn.Linear.forward.__code__:
        return False
    return is_linear(frame.f_locals["self"]) and _by_code_of_dgl(frame)


def _by_code_of_dgl(frame: FrameType) -> bool:
    """Whether DGL's code called what runs there, as a module or by itself."""
    caller = frame.f_back
    while caller is not None and module_of(caller) == "torch.nn.modules.module":
        caller = caller.f_back
    return caller is not None and module_of(caller).startswith("dgl.nn.")


class AddLinear(Function):
    """out = beta * base + rows @ weight^T + bias, where ``base`` was.

    ======  ==============  =============================================================
    tensor  shape           owner and lifetime
    ======  ==============  =============================================================
    base    [n, width]      this rank; written into: it is out
    rows    [n, width_in]   this rank; saved. Becomes drows if nobody else has it
    weight  [width, width_in]  replicated; saved (a parameter)
    bias    [width] or none replicated
    ======  ==============  =============================================================

    With D = dout: dbase = D, unless beta is 0; drows = D @ weight; dweight = D^T @ rows, before
    rows are written over; dbias = the sum of the rows of D.
    """

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, beta: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.mark_dirty(base)
        base.addmm_(rows, weight.t(), beta=beta)
        return base if bias is None else base.add_(bias)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        asks_base, asks_rows, asks_weight, asks_bias, _ = ctx.needs_input_grad
        rows, weight = ctx.saved_tensors
        in_place = asks_rows and may_overwrite(rows, dout)
        dweight = dout.t() @ rows if asks_weight else None
        drows = None
        if asks_rows:
            drows = torch.mm(dout, weight, out=rows).detach() if in_place else dout @ weight
        dbias = dout.sum(0) if asks_bias else None
        return (dout if asks_base else None), drows, dweight, dbias, None
