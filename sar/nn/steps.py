"""What a training loop was seen to do: which calls of the library it makes for which model."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from sar.comm import Group
from sar.errors import MistakeWarning

LOCAL_STEPS = 10  # in a row, until a loss is taken for one of each rank's own


@dataclass
class Steps:
    """What one rank saw in one group; the same on all of its ranks but for the losses.

    Attributes:
        synced, summed: modules whose parameters were made equal, whose gradients were summed.
        calls: how often each thing was done with a model or layer.
    """

    synced: WeakSet[nn.Module] = field(default_factory=WeakSet)
    summed: WeakSet[nn.Module] = field(default_factory=WeakSet)
    calls: dict[str, WeakKeyDictionary[nn.Module, int]] = field(default_factory=dict)
    _losses: WeakKeyDictionary[nn.Module, _Losses] = field(default_factory=WeakKeyDictionary)

    def count(self, what: str, module: nn.Module) -> int:
        """How often this was done with ``module``, now included."""
        calls = self.calls.setdefault(what, WeakKeyDictionary())
        number = calls[module] = calls.get(module, 0) + 1
        return number

    def missing(self, module: nn.Module) -> str:
        """The calls that would have kept ``module`` equal on all ranks, and that nobody made."""
        calls = {
            "sar.sync_params(model) before the first step": self.synced,
            "sar.gather_grads(model) after each loss.backward()": self.summed,
        }
        return " and ".join(call for call, seen in calls.items() if module not in seen)

    def warn_of_local_losses(self, model: nn.Module, group: Group) -> None:
        """Say once, on rank 0, that gradients are summed of losses that are each rank's own."""
        seen = self._losses.setdefault(model, _Losses(group.losses))
        seen.steps = 0 if group.losses != seen.last else seen.steps + 1
        seen.last = group.losses
        if seen.steps == LOCAL_STEPS and not seen.told and not group.rank:
            seen.told = True
            warnings.warn(
                f"gradients of {type(model).__name__} were summed over {group.size} ranks in "
                f"{LOCAL_STEPS} steps without a loss over all ranks; a mean over one rank's rows "
                "counts ranks alike, not rows: make the loss with sar.global_mean(values, mask), "
                "or with sar.global_sum(values, mask) / count for a count of your own",
                MistakeWarning,
                stacklevel=4,
            )


@dataclass
class _Losses:
    """Of one model.

    Attributes:
        last: what ``group.losses`` was in the last step.
        steps: since it changed.
    """

    last: int
    steps: int = 0
    told: bool = False


_steps: WeakKeyDictionary[Group, Steps] = WeakKeyDictionary()


def steps_of(group: Group) -> Steps:
    """Those of this rank; ranks may be threads."""
    found = _steps.get(group)
    return _steps.setdefault(group, Steps()) if found is None else found
