"""Which module is the first whose numbers differ, in forward and in backward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.models.validation.compare import ROUGH, TOLERANCE, Layout, apart, largest
from sar.models.validation.record import CALL, Event, Values
from sar.models.validation.run import Run

_SHARE = 1e-4  # of the largest gradient: smaller ones are compared with so much


@dataclass(frozen=True)
class Place:
    """Where two runs part.

    Attributes:
        module: whose own forward, or :data:`CALL`.
        what: differs: ``"output"``, ``"gradient"``, ``"gradient of NAME"``, ``"buffer NAME"``.
        by: how much. event: the first that differs, if it is one. again: it is of a later step.
        places: which of its tensors differ.
    """

    module: str
    what: str
    by: float
    event: Event | None = None
    again: bool = False
    places: frozenset[int] = frozenset()


class Comparison:
    """The whole graph's run beside the ranks'."""

    def __init__(self, whole: Run, ranks: Sequence[Run], layout: Layout) -> None:
        self.whole, self.ranks, self.layout = whole, ranks, layout
        self.events = _called_alike(whole, ranks)
        values = [v for event in whole.events for v in event.values if v is not None]
        narrow = any(v.is_floating_point() and v.dtype != torch.float64 for v in values)
        self.tolerance = ROUGH if narrow else TOLERANCE
        grads = [g for event in whole.events for g in event.grads if g is not None]
        self._gradients = _SHARE * max(map(largest, grads), default=0.0)

    def forward(self, event: Event, others: list[Event]) -> float | None:
        """How far an event's tensors are apart; ``None`` where some cannot be compared."""
        return self._most(self._values(event, others))

    def backward(self, event: Event, others: list[Event]) -> float | None:
        """The same of their gradients."""
        return self._most(self._grads(event, others))

    def _values(self, event: Event, others: list[Event]) -> list[float | None]:
        return self._apart(event.values, [one.values for one in others], 0.0)

    def _grads(self, event: Event, others: list[Event]) -> list[float | None]:
        blind = {place for one in others for place in one.blind}
        made = [_with_zeros(one, blind) for one in (event, *others)]
        return self._apart(made[0], made[1:], self._gradients)

    def _apart(self, whole: Values, ranks: list[Values], scale: float) -> list[float | None]:
        """By place; 0 where there is no tensor."""
        if any(len(one) != len(whole) for one in ranks):
            return [None]
        return [
            self.layout.difference(mine, others, scale)  # type: ignore[arg-type]
            if mine is not None and all(one is not None for one in others)
            else 0.0
            for mine, *others in zip(whole, *ranks)
        ]

    def _most(self, found: list[float | None]) -> float | None:
        known = [one for one in found if one is not None]
        worst = max(known, default=0.0)
        return None if len(known) < len(found) and worst <= self.tolerance else worst

    def _places(self, found: list[float | None]) -> frozenset[int]:
        return frozenset(i for i, by in enumerate(found) if by is None or by > self.tolerance)

    def results_differ(self) -> float:
        """How far results of the calls are apart; one number may be a sum of the ranks'."""
        worst = 0.0
        for event, others in self.events:
            if event.module != CALL:
                continue
            if any(len(one.values) != len(event.values) for one in others):
                return float("inf")
            for mine, *theirs in zip(event.values, *(one.values for one in others)):
                worst = max(worst, self._result(mine, theirs))
        return worst

    def _result(self, whole: Tensor | None, ranks: list[Tensor | None]) -> float:
        found = [one for one in ranks if one is not None]
        if whole is None or len(found) < len(ranks):
            return 0.0
        by = self.layout.difference(whole, found)
        if whole.numel() == 1 and all(one.shape == whole.shape for one in found):
            total = torch.stack(found).sum(0)
            by = min(float("inf") if by is None else by, apart(whole, total.to(whole.dtype)))
        return float("inf") if by is None else by

    def gradients_differ(self) -> tuple[str, float] | None:
        """The first parameter whose gradient differs, or column, and how far; ``None``: none."""
        known = self.whole.parameters
        scale = max(map(largest, known.values()), default=0.0)
        found: list[tuple[float, str]] = []
        for key in dict.fromkeys([*known, *(key for run in self.ranks for key in run.parameters)]):
            mine = [run.parameters.get(key) for run in self.ranks]
            some = [one for one in mine if one is not None]
            like = known.get(key)
            if key[1] in self.whole.rows and like is not None and len(some) == len(mine):
                by = self.layout.difference(like, some, scale)
            else:
                total = torch.stack(some).sum(0) if some else None
                by = apart(_or_zeros(like, total), _or_zeros(total, like), scale)
            found.append((float("inf") if by is None else by, key[1]))
        columns = self.whole.inputs
        scale = _SHARE * max(map(largest, columns.values()), default=0.0)
        for column, grad in columns.items():
            others = [run.inputs.get(column) for run in self.ranks]
            if all(one is not None for one in others):
                by = self.layout.difference(grad, others, scale)  # type: ignore[arg-type]
                found.append((float("inf") if by is None else by, CALL))
        return next(((name, by) for by, name in found if by > self.tolerance), None)

    def buffers_differ(self) -> tuple[str, float] | None:
        """The first buffer that differs after the steps, and how far."""
        for name, buffer in self.whole.buffers.items():
            others = [run.buffers.get(name) for run in self.ranks]
            by = None
            if all(one is not None for one in others):
                by = self.layout.difference(buffer, others)  # type: ignore[arg-type]
            if by is None or by > self.tolerance:
                return name, float("inf") if by is None else by
        return None

    def first_forward(self) -> Place | None:
        """The first event whose tensors differ, with those before it that cannot be compared."""
        agrees, step = -1, 0  # the last event that does
        for at, (event, others) in enumerate(self.events):
            by = self.forward(event, others)
            if by is not None and by > self.tolerance:
                cause, cause_others = self.events[agrees + 1]
                module = cause.inside if cause.kind == "in" else cause.module
                places = self._places(self._values(cause, cause_others))
                return Place(module, "output", by, cause, step > 0, places)
            agrees = agrees if by is None else at
            step += event.module == CALL
        return None

    def first_backward(self) -> Place | None:
        """The first event, backwards through each step, whose gradients differ."""
        steps: list[list] = [[]]
        for pair in self.events:
            steps[-1].append(pair)
            if pair[0].module == CALL:
                steps.append([])
        for number, step in enumerate(steps):
            for event, others in reversed(step):
                found = self._grads(event, others)
                by = self._most(found)
                if by is not None and by > self.tolerance:
                    module = event.module if event.kind == "in" else event.inside
                    return Place(module, "gradient", by, event, number > 0, self._places(found))
        return None


def _called_alike(whole: Run, ranks: Sequence[Run]) -> list[tuple[Event, list[Event]]]:
    """Events in order, with those of the ranks, of modules that all call equally often."""
    counts = [Counter((e.kind, e.module) for e in run.events) for run in (whole, *ranks)]
    by_key = [{event.key: event for event in run.events} for run in ranks]
    return [
        (event, [known[event.key] for known in by_key])
        for event in whole.events
        if all(one[event.kind, event.module] == counts[0][event.kind, event.module]
               for one in counts)
    ]  # fmt: skip


def _with_zeros(event: Event, blind: set[int]) -> Values:
    """Gradients by place: 0 where nothing flows, none where they are not seen."""
    return [
        None
        if place in blind or value is None or not value.is_floating_point()
        else torch.zeros_like(value)
        if grad is None
        else grad
        for place, (value, grad) in enumerate(zip(event.values, event.grads, strict=True))
    ]


def _or_zeros(one: Tensor | None, like: Tensor | None) -> Tensor:
    if one is not None:
        return one
    return torch.zeros(0) if like is None else torch.zeros_like(like)
