"""Which module is the first whose numbers differ, in forward and in backward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from sar.models.validation.compare import Layout, apart, largest
from sar.models.validation.record import CALL, Event, Run, Values

TOLERANCE = 1e-7  # of float64, in units of the largest number; ranks add in another order
ROUGH = 1e-3  # where the model computes in narrower numbers itself
_SHARE = 1e-4  # of the largest gradient: smaller ones are compared with so much
Pair = tuple[Event, list[Event]]  # of the whole graph, and of the ranks
Difference = float | None  # ``None``: it cannot be told


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

    def forward(self, pair: Pair) -> Difference:
        """How far an event's tensors are apart."""
        return self._most(self._values(pair))

    def backward(self, pair: Pair) -> Difference:
        """The same of their gradients."""
        return self._most(self._grads(pair))

    def _values(self, pair: Pair) -> list[Difference]:
        return self._apart([one.values for one in (pair[0], *pair[1])], 0.0, pair[0].module == CALL)

    def _grads(self, pair: Pair) -> list[Difference]:
        return self._apart([one.grads for one in (pair[0], *pair[1])], self._gradients)

    def _apart(self, runs: list[Values], scale: float, shares: bool = False) -> list[Difference]:
        """By place; 0 where there is no tensor. ``shares``: one number may be a sum of ranks'."""
        if len(set(map(len, runs))) > 1:
            return [None]
        return [
            self.layout.difference(whole, parts, scale, shares=shares)  # type: ignore[arg-type]
            if whole is not None and all(one is not None for one in parts)
            else 0.0
            for whole, *parts in zip(*runs)
        ]

    def _most(self, found: list[Difference]) -> Difference:
        known = [one for one in found if one is not None]
        worst = max(known, default=0.0)
        return None if len(known) < len(found) and worst <= self.tolerance else worst

    def place(self) -> Place | None:
        """The first place that differs, if results, gradients or buffers do."""
        results = [self.forward(pair) for pair in self.events if pair[0].module == CALL]
        by = max((inf if one is None else one for one in results), default=0.0)
        if by > self.tolerance:
            return self._first_forward() or Place(CALL, "output", by)
        end = self._first_end()
        is_gradient = end is not None and end.what.startswith("gradient")
        return self._first_backward() or end if is_gradient else end

    def _first_end(self) -> Place | None:
        """The first gradient of a parameter or of a column that differs, or buffer."""
        for (step, what, name), value in self.whole.ends.items():
            parts = [run.ends.get((step, what, name)) for run in self.ranks]
            by = self._end(what, value, [one for one in parts if one is not None])
            if by is None or by > self.tolerance:
                what = f"buffer {name}" if what == "buffer" else f"gradient of {name}"
                return Place(name.rpartition(".")[0], what, inf if by is None else by)
        return None

    def _end(self, what: str, whole: Tensor, parts: list[Tensor]) -> Difference:
        ends = self.whole.ends.items()
        scale = 0.0 if what == "buffer" else _largest(x for key, x in ends if key[1] == what)
        if len(parts) < len(self.ranks):
            return None
        if what == "sum" and all(part.shape == whole.shape for part in parts):
            return apart(whole, torch.stack(parts).sum(0), scale)
        return self.layout.difference(whole, parts, scale)

    def _first_forward(self) -> Place | None:
        """The first event whose tensors differ, with those before it that cannot be compared."""
        agrees = -1  # the last event that does
        for at, pair in enumerate(self.events):
            by = self.forward(pair)
            if by is not None and by > self.tolerance:
                cause = self.events[agrees + 1]
                event, places = cause[0], self._places(self._values(cause))
                module = event.inside if event.kind == "in" else event.module
                return Place(module, "output", by, event, pair[0].step > 0, places)
            agrees = agrees if by is None else at
        return None

    def _first_backward(self) -> Place | None:
        """The first event, backwards through each step, whose gradients differ."""
        for pair in sorted(reversed(self.events), key=lambda pair: pair[0].step):
            by, event = self.backward(pair), pair[0]
            if by is not None and by > self.tolerance:
                module = event.module if event.kind == "in" else event.inside
                places = self._places(self._grads(pair))
                return Place(module, "gradient", by, event, event.step > 0, places)
        return None

    def _places(self, found: list[Difference]) -> frozenset[int]:
        return frozenset(i for i, by in enumerate(found) if by is None or by > self.tolerance)


def _called_alike(whole: Run, ranks: Sequence[Run]) -> list[Pair]:
    """Events in order, with those of the ranks, of modules that all call equally often."""
    first, *others = [Counter((e.kind, e.module) for e in run.events) for run in (whole, *ranks)]
    alike = {key for key, count in first.items() if all(one[key] == count for one in others)}
    by_key = [{event.key: event for event in run.events} for run in ranks]
    return [
        (event, [known[event.key] for known in by_key])
        for event in whole.events
        if (event.kind, event.module) in alike
    ]


def _largest(values: Iterable[Tensor | None]) -> float:
    return max((largest(one) for one in values if one is not None), default=0.0)
