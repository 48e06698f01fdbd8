"""What happens to gradients between two sums over ranks: some of it makes the second one wrong."""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from sar.comm import Group
from sar.errors import MistakeWarning

_ALIKE = 0.01  # of a factor: gradients may have 16 bits


class Watch:
    """Looks at one parameter's gradient, the smallest, from a sum to the next.

    A hook sees it before backward adds to it, and is gone after the next sum.

    Attributes:
        summed: the gradient that the sum left.
    """

    def __init__(self, param: nn.Parameter) -> None:
        self._param, self.summed = ref(param), param.grad
        self._is_first, self._is_doubled = True, False
        self._norm: Tensor | None = None
        self._handle: Any = param.register_hook(self._before_adding)  # type: ignore[no-untyped-call]

    def _before_adding(self, grad: Tensor) -> None:
        held = self._held()
        if self._is_first and held is not None and held is self.summed:
            self._is_doubled = bool(held.any())
        self._is_first = False
        if grad.layout == torch.strided:
            self._norm = _norm(grad if held is None else held + grad)

    def _held(self) -> Tensor | None:
        param = self._param()
        return None if param is None else param.grad

    def end(self) -> tuple[ValueError | None, float]:
        """What is wrong with summing now, and the factor by which the gradient was changed since
        the last backward: NaN where that is not known."""
        self._handle.remove()
        held = self._held()
        if held is None or held.layout != torch.strided:
            return None, math.nan
        factor = math.nan if self._norm is None else float(_norm(held) / self._norm)
        if held is not self.summed:
            return None, factor
        if self._is_first and bool(held.any()):
            return ValueError(_TWICE), factor
        return (ValueError(_DOUBLED) if self._is_doubled else None), factor


def _norm(grad: Tensor) -> Tensor:
    return grad.detach().abs().double().norm()


_ONCE = (
    "call it once a step, between the last backward and optimizer.step(), and "
    "optimizer.zero_grad() before the next backward"
)
_TWICE = (
    "gather_grads: called again without a backward since, so that gradients of all ranks would be "
    f"summed over ranks a second time; {_ONCE}"
)
_DOUBLED = (
    "gather_grads: backward added to gradients that were summed over ranks before, which would be "
    f"summed a second time; {_ONCE} (to accumulate, call it after the last backward alone)"
)


def warn_of_factors(model: nn.Module, factors: Tensor, group: Group) -> bool:
    """Say on rank 0 that gradients were changed by another factor on each rank; whether it is so.

    A factor that all ranks have alike, as of a scaler of losses, changes nothing but the scale.
    """
    known = factors[factors.isfinite()]
    if not len(known) or float(known.max() - known.min()) <= _ALIKE * float(known.abs().max()):
        return False
    if not group.rank:
        shown = ", ".join(f"{factor:.3g}" for factor in factors.tolist()[:8])
        warnings.warn(
            f"gradients of {type(model).__name__} were changed between backward and "
            f"sar.gather_grads(model), by factors that differ between ranks ({shown}): their sum "
            "is not the gradient of the loss; clip, as with torch.nn.utils.clip_grad_norm_, after "
            "sar.gather_grads(model)",
            MistakeWarning,
            stacklevel=5,
        )
    return True
