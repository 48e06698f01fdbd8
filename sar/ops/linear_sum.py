"""What is rewritten while code of DGL's layers runs: products over heads, biases, projections."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sar.ops.arriving import note_linear
from sar.ops.bias import add_bias
from sar.ops.callers import has_hooks, is_linear, module_of
from sar.ops.capture import tensors_in
from sar.ops.frugal import Frugal
from sar.ops.head_sums import PRODUCTS, Product, can_wait, is_sum_of_last
from sar.ops.remade import remade_linear
from sar.ops.reuse import ADDS, is_plain, is_temporary
from sar.ops.saving import takes_notes


class LinearSums(TorchFunctionMode):
    """Inside, products of rows and a parameter are computed late, see Note [Head sums]; a bias is
    added by Note [Bias in place]; what linear layers read is noted for Note [Projected on arrival].
    """

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, Product] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for late in self._late.values():
                if not late.is_added:  # else nobody asked for the product itself
                    late.compute()
        self._late.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ADDS and len(args) == 2 and not kwargs:
            term, late = self._late.get(id(args[0])), self._late.get(id(args[1]))
            if term is not None:
                term.compute()
            # As Frugal, which is outside of this mode and would count its reference as another's.
            if late is None and takes_notes() and is_temporary(args):
                return args[0].add_(args[1])
            biased = _by_code_of_dgl(sys._getframe()) and add_bias(*args)
            if isinstance(biased, Tensor):
                return biased
        if func in PRODUCTS and not kwargs and can_wait(*args):
            if _by_code_of_dgl(sys._getframe()):
                return self._hold(Product.of(*args))
        if func is Tensor.sum and is_sum_of_last(args, kwargs):
            product = self._late.get(id(args[0]))
            if product is not None and not product.is_done:
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

    def _hold(self, late: Product) -> Tensor:
        self._late[id(late.out)] = late
        return late.out


def may_wait(layer: Any) -> bool:
    """Whether nobody looks at what the parts of a layer of DGL compute.

    Args:
        layer: ``None`` where somebody else's code runs.
    """
    modes = torch.overrides._get_current_function_mode_stack()
    return layer is not None and not has_hooks(layer) and all(type(m) is Frugal for m in modes)


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
