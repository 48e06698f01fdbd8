"""What a training loop did: its calls of the library, and what became of gradients between them."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from sar._private import version_of
from sar.comm import Group
from sar.errors import MistakeWarning

LOCAL_STEPS = 10  # in a row without a loss over all ranks, until a warning
CHECK_EVERY = 50  # steps, and 1, 2, 4, .. up to 32: short runs are compared, too
_ALIKE = 0.01  # of a factor: gradients may have 16 bits


def is_due(step: int) -> bool:
    """Whether ranks are compared in this step: at 1, 2, 4, .. 32 and every 50th."""
    return step % CHECK_EVERY == 0 or (step <= 32 and step & (step - 1) == 0)


@dataclass
class History:
    """What one rank saw in one group; the same on all of its ranks but for the losses.

    Attributes:
        synced, summed: modules whose parameters were made equal, whose gradients were summed.
        called: modules whose parameters are compared when a model that has them is called.
        roots: the models that are compared at the end.
        calls: how often each thing was done with a model or layer; ``numbers`` with none.
        layouts: numbers of parameters that a model was seen to have.
        unregistered: parameters that losses depend on, whosever they are.
        versions: of parameters when they were first seen, by ``id``.
        losses: ``group.losses`` at a model's last sum of gradients, and sums since it changed.
        rescaled, blamed: models warned of: gradients were changed, losses are each rank's own.
    """

    synced: WeakSet[nn.Module] = field(default_factory=WeakSet)
    summed: WeakSet[nn.Module] = field(default_factory=WeakSet)
    called: WeakSet[nn.Module] = field(default_factory=WeakSet)
    roots: list[ReferenceType[nn.Module]] = field(default_factory=list)
    calls: dict[str, WeakKeyDictionary[nn.Module, int]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    layouts: WeakKeyDictionary[nn.Module, set[int]] = field(default_factory=WeakKeyDictionary)
    watches: WeakKeyDictionary[nn.Module, GradientWatch] = field(default_factory=WeakKeyDictionary)
    unregistered: list[ReferenceType[nn.Parameter]] = field(default_factory=list)
    versions: dict[int, tuple[ReferenceType[nn.Parameter], int]] = field(default_factory=dict)
    rescaled: WeakSet[nn.Module] = field(default_factory=WeakSet)
    has_drifted: bool = False
    losses: WeakKeyDictionary[nn.Module, tuple[int, int]] = field(default_factory=WeakKeyDictionary)
    blamed: WeakSet[nn.Module] = field(default_factory=WeakSet)

    def count(self, what: str, module: nn.Module) -> int:
        """How often this was done with ``module``, now included."""
        calls = self.calls.setdefault(what, WeakKeyDictionary())
        number = calls[module] = calls.get(module, 0) + 1
        return number

    def see_written(self, params: Iterable[nn.Parameter]) -> bool:
        """Whether somebody has written to any of ``params`` since it was first seen here."""
        is_written = False
        for param in params:
            now = ref(param), version_of(param)
            before = self.versions.get(id(param))
            if before is None or before[0]() is not param:
                self.versions[id(param)] = now
            else:
                is_written |= before[1] != now[1]
        return is_written

    def missing(self, module: nn.Module) -> str:
        """The calls that would have kept ``module`` equal on all ranks, and that nobody made."""
        calls = {
            "sar.sync_params(model) before the first step": self.synced,
            "sar.gather_grads(model) after each loss.backward()": self.summed,
        }
        return " and ".join(call for call, seen in calls.items() if module not in seen)

    def warn_of_local_losses(self, model: nn.Module, group: Group) -> None:
        """Warn once, on rank 0, that gradients are summed of losses that are each rank's own."""
        last, steps = self.losses.get(model, (group.losses, 0))
        steps = 0 if group.losses != last else steps + 1
        self.losses[model] = group.losses, steps
        if steps == LOCAL_STEPS and model not in self.blamed and not group.rank:
            self.blamed.add(model)
            warnings.warn(
                f"gradients of {type(model).__name__} were summed over {group.size} ranks in "
                f"{LOCAL_STEPS} steps without a loss over all ranks; a mean over one rank's rows "
                "counts ranks alike, not rows: make the loss with sar.global_mean(values, mask), "
                "or with sar.global_sum(values, mask) / count for a count of your own",
                MistakeWarning,
                stacklevel=4,
            )


_histories: WeakKeyDictionary[Group, History] = WeakKeyDictionary()


def history_of(group: Group) -> History:
    """This rank's history; kept by group, as ranks may be threads."""
    found = _histories.get(group)
    return _histories.setdefault(group, History()) if found is None else found


def due_call(model: nn.Module, group: Group, *, is_layer: bool = False) -> int:
    """Count a call of a module with a graph; its number if ranks are compared in it, else 0. Such a
    call is collective, and so is that comparison; none where no gradient is recorded, nor where
    sums of gradients look. Parts of a model that is looked at are not, as layers."""
    if group.size == 1 or not torch.is_grad_enabled() or not model.training:
        return 0
    history = history_of(group)
    if model in history.summed or (is_layer and model in history.called):
        return 0
    number = history.count("call", model)
    if number == 1 and not is_layer:
        history.called.update(model.modules())
    return number if is_due(number) else 0


class GradientWatch:
    """Watches one parameter's gradient from a sum, which left it ``summed``, to the next. A hook
    sees it before backward adds to it, and is gone after the next sum."""

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
    """Warn on rank 0, and return True, if gradients were changed by factors that differ between
    ranks. A factor that all ranks have alike, as of a scaler of losses, changes nothing but the
    scale."""
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
