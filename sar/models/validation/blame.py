"""Which module is the first whose numbers differ, in forward and in backward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.models.validation.compare import ROUGH, TOLERANCE, Layout, apart, largest
from sar.models.validation.record import CALL, Event, Run, Values

_SHARE = 1e-4  # of the largest gradient: smaller ones are compared with so much
_Tensors = Sequence[Tensor | None]
_Pair = tuple[Event, list[Event]]  # of the whole graph, and of the ranks


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
        self._gradients = _SHARE * _largest(g for event in whole.events for g in event.grads)

    def forward(self, event: Event, others: list[Event]) -> float | None:
        """How far an event's tensors are apart; ``None`` where some cannot be compared."""
        return self._most(self._values(event, others))

    def backward(self, event: Event, others: list[Event]) -> float | None:
        """The same of their gradients."""
        return self._most(self._grads(event, others))

    def _values(self, event: Event, others: list[Event]) -> list[float | None]:
        return self._apart([one.values for one in (event, *others)], 0.0)

    def _grads(self, event: Event, others: list[Event]) -> list[float | None]:
        blind = {place for one in others for place in one.blind}
        return self._apart([_with_zeros(one, blind) for one in (event, *others)], self._gradients)

    def _apart(self, runs: list[Values], scale: float) -> list[float | None]:
        """By place; 0 where there is no tensor."""
        if len(set(map(len, runs))) > 1:
            return [None]
        return [
            self.layout.difference(mine, others, scale)  # type: ignore[arg-type]
            if mine is not None and all(one is not None for one in others)
            else 0.0
            for mine, *others in zip(*runs)
        ]

    def _most(self, found: list[float | None]) -> float | None:
        known = [one for one in found if one is not None]
        worst = max(known, default=0.0)
        return None if len(known) < len(found) and worst <= self.tolerance else worst

    def _inf(self, whole: Tensor, ranks: _Tensors, scale: float = 0.0) -> float:
        """How far they are apart; infinitely where some are missing, or cannot be compared."""
        found = [one for one in ranks if one is not None]
        by = self.layout.difference(whole, found, scale) if len(found) == len(ranks) else None
        return float("inf") if by is None else by

    def results_differ(self) -> float:
        """How far results of the calls are apart; one number may be a sum of the ranks'."""
        worst = 0.0
        for event, others in self.events:
            if event.module == CALL:
                if any(len(one.values) != len(event.values) for one in others):
                    return float("inf")
                for mine, *theirs in zip(event.values, *(one.values for one in others)):
                    worst = max(worst, self._result(mine, theirs))
        return worst

    def _result(self, whole: Tensor | None, ranks: list[Tensor | None]) -> float:
        found = [one for one in ranks if one is not None]
        if whole is None or len(found) < len(ranks):
            return 0.0
        by = self._inf(whole, found)
        if whole.numel() == 1 and all(one.shape == whole.shape for one in found):
            by = min(by, apart(whole, torch.stack(found).sum(0).to(whole.dtype)))
        return by

    def gradients_differ(self) -> tuple[str, float] | None:
        """The first parameter whose gradient differs, or column, and how far; ``None``: none."""
        found = (*self._parameters(), *self._inputs())
        return next(((name, by) for name, by in found if by > self.tolerance), None)

    def _parameters(self) -> Iterator[tuple[str, float]]:
        known = self.whole.parameters
        scale = _largest(known.values())
        for key in dict.fromkeys(
            key for run in (self.whole, *self.ranks) for key in run.parameters
        ):
            mine, like = [run.parameters.get(key) for run in self.ranks], known.get(key)
            some = [one for one in mine if one is not None]
            if key[1] in self.whole.rows and like is not None and len(some) == len(mine):
                yield key[1], self._inf(like, mine, scale)
            else:
                total = torch.stack(some).sum(0) if some else torch.zeros_like(like)  # type: ignore[arg-type]
                yield key[1], apart(torch.zeros_like(total) if like is None else like, total, scale)

    def _inputs(self) -> Iterator[tuple[str, float]]:
        scale = _SHARE * _largest(self.whole.inputs.values())
        for column, grad in self.whole.inputs.items():
            others = [run.inputs.get(column) for run in self.ranks]
            if all(one is not None for one in others):
                yield CALL, self._inf(grad, others, scale)

    def buffers_differ(self) -> tuple[str, float] | None:
        """The first buffer that differs after the steps, and how far."""
        found = (
            (name, self._inf(buffer, [run.buffers.get(name) for run in self.ranks]))
            for name, buffer in self.whole.buffers.items()
        )
        return next(((name, by) for name, by in found if by > self.tolerance), None)

    def first_forward(self) -> Place | None:
        """The first event whose tensors differ, with those before it that cannot be compared."""
        agrees, step = -1, 0  # the last event that does
        for at, pair in enumerate(self.events):
            by = self.forward(*pair)
            if by is not None and by > self.tolerance:
                cause, others = self.events[agrees + 1]
                module = cause.inside if cause.kind == "in" else cause.module
                places = self._places(self._values(cause, others))
                return Place(module, "output", by, cause, step > 0, places)
            agrees = agrees if by is None else at
            step += pair[0].module == CALL
        return None

    def first_backward(self) -> Place | None:
        """The first event, backwards through each step, whose gradients differ."""
        steps: list[list[_Pair]] = [[]]
        for pair in self.events:
            steps[-1].append(pair)
            if pair[0].module == CALL:
                steps.append([])
        for number, step in enumerate(steps):
            for event, others in reversed(step):
                by = self.backward(event, others)
                if by is not None and by > self.tolerance:
                    module = event.module if event.kind == "in" else event.inside
                    places = self._places(self._grads(event, others))
                    return Place(module, "gradient", by, event, number > 0, places)
        return None

    def _places(self, found: list[float | None]) -> frozenset[int]:
        return frozenset(i for i, by in enumerate(found) if by is None or by > self.tolerance)


def _called_alike(whole: Run, ranks: Sequence[Run]) -> list[_Pair]:
    """Events in order, with those of the ranks, of modules that all call equally often."""
    first, *others = [Counter((e.kind, e.module) for e in run.events) for run in (whole, *ranks)]
    alike = {key for key, count in first.items() if all(one[key] == count for one in others)}
    by_key = [{event.key: event for event in run.events} for run in ranks]
    return [
        (event, [known[event.key] for known in by_key])
        for event in whole.events
        if (event.kind, event.module) in alike
    ]


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


def _largest(values: Iterable[Tensor | None]) -> float:
    return max((largest(one) for one in values if one is not None), default=0.0)
