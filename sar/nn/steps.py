"""What a training loop was seen to do: which calls of the library it makes for which model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torch import nn

from sar._private import version_of
from sar.comm import Group
from sar.errors import MistakeWarning
from sar.nn.sums import Watch

LOCAL_STEPS = 10  # in a row, until a loss is taken for one of each rank's own
CHECK_EVERY = 50  # steps, and 1, 2, 4, .. up to 32: short runs are compared, too


def is_due(step: int) -> bool:
    """Whether ranks are compared in this step."""
    return step % CHECK_EVERY == 0 or (step <= 32 and step & (step - 1) == 0)


@dataclass
class Steps:
    """What one rank saw in one group; the same on all of its ranks but for the losses.

    Attributes:
        synced, summed: modules whose parameters were made equal, whose gradients were summed.
        called: modules whose parameters are compared when a model that has them is called.
        roots: the models that are compared, of which others are parts.
        calls: how often each thing was done with a model or layer; ``numbers`` with none.
        layouts: numbers of parameters that a model was seen to have.
        watches: of models whose next sum of gradients is looked at.
        loose: parameters that losses depend on, whosever they are.
        versions: of parameters when they were first seen, by ``id``.
        changed: models whose gradients were changed before a sum, which is told.
        is_told: that ranks are not equal.
    """

    synced: WeakSet[nn.Module] = field(default_factory=WeakSet)
    summed: WeakSet[nn.Module] = field(default_factory=WeakSet)
    called: WeakSet[nn.Module] = field(default_factory=WeakSet)
    roots: list[ReferenceType[nn.Module]] = field(default_factory=list)
    calls: dict[str, WeakKeyDictionary[nn.Module, int]] = field(default_factory=dict)
    numbers: Counter[str] = field(default_factory=Counter)
    layouts: WeakKeyDictionary[nn.Module, set[int]] = field(default_factory=WeakKeyDictionary)
    watches: WeakKeyDictionary[nn.Module, Watch] = field(default_factory=WeakKeyDictionary)
    loose: list[ReferenceType[nn.Parameter]] = field(default_factory=list)
    versions: dict[int, tuple[ReferenceType[nn.Parameter], int]] = field(default_factory=dict)
    changed: WeakSet[nn.Module] = field(default_factory=WeakSet)
    is_told: bool = False
    _losses: WeakKeyDictionary[nn.Module, _Losses] = field(default_factory=WeakKeyDictionary)

    def count(self, what: str, module: nn.Module) -> int:
        """How often this was done with ``module``, now included."""
        calls = self.calls.setdefault(what, WeakKeyDictionary())
        number = calls[module] = calls.get(module, 0) + 1
        return number

    def loose_params(self) -> list[nn.Parameter]:
        """Those of ``loose`` that still live."""
        return [param for param in (known() for known in self.loose) if param is not None]

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
