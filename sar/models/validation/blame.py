"""Which module is the first whose numbers differ, in forward and in backward order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from sar.models.validation.compare import Layout, apart, largest
from sar.models.validation.record import CALL, Event, Run

TOLERANCE = 1e-7  # of float64, in units of the largest number; ranks add in another order
ROUGH = 1e-3  # where the model computes in narrower numbers itself; four units of 16 bits
_SHARE = 1e-4  # of the largest gradient: smaller ones are compared with so much
Pair = tuple[Event, list[Event]]  # of the whole graph, and of the ranks
Difference = float | None  # ``None``: it cannot be told


@dataclass(frozen=True)
class Place:
    """Where two runs part."""

    module: str  # whose own forward, or CALL
    what: str  # differs: "output", "gradient", "gradient of NAME", "buffer NAME", "error"
    by: float
    event: Event | None = None  # the first that differs, if it is one
    again: bool = False  # it is of a later step
    places: frozenset[int] = frozenset()  # which of its tensors differ


class Comparison:
    """The whole graph's run beside the ranks'."""

    def __init__(self, whole: Run, ranks: Sequence[Run], layout: Layout) -> None:
        self.whole, self.ranks, self.layout = whole, ranks, layout
        self.events = _called_alike(whole, ranks)
        values = [v for event in whole.events for v in event.values if v is not None]
        units = {torch.finfo(v.dtype).eps for v in values if v.is_floating_point()}
        narrow = units - {torch.finfo(torch.float64).eps}
        self.tolerance = max(ROUGH, 4 * max(narrow)) if narrow else TOLERANCE
        self._gradients = _SHARE * _largest(g for event in whole.events for g in event.grads)

    def apart(self, pair: Pair, grads: bool = False) -> list[Difference]:
        """How far an event's tensors are apart, or their gradients, by place; 0 where none is."""
        runs = [one.grads if grads else one.values for one in (pair[0], *pair[1])]
        if len(set(map(len, runs))) > 1:
            return [None]
        scale, shares = self._gradients if grads else 0.0, pair[0].module == CALL and not grads
        return [
            self.layout.difference(whole, parts, scale, shares=shares)  # type: ignore[arg-type]
            if whole is not None and all(one is not None for one in parts)
            else 0.0
            for whole, *parts in zip(*runs)
        ]

    def most(self, pair: Pair, grads: bool = False) -> Difference:
        """The largest of these, unless all that is known is small."""
        found = self.apart(pair, grads)
        known = [one for one in found if one is not None]
        worst = max(known, default=0.0)
        return None if len(known) < len(found) and worst <= self.tolerance else worst

    def place(self) -> Place | None:
        """The first place that differs, if results, gradients or buffers do."""
        results = [self.most(pair) for pair in self.events if pair[0].module == CALL]
        by = max((inf if one is None else one for one in results), default=0.0)
        if by > self.tolerance:
            return self._first_forward() or Place(CALL, "output", by)
        for key, value in self.whole.ends.items():
            what, name = key[1:]
            by = self._end(what, value, [run.ends[key] for run in self.ranks if key in run.ends])
            if what == "buffer" and by > self.tolerance:
                return Place(name.rpartition(".")[0], f"buffer {name}", by)
            if by > self.tolerance:
                end = Place(name.rpartition(".")[0], f"gradient of {name}", by)
                return self._first_backward() or end
        return None

    def _end(self, what: str, whole: Tensor, parts: list[Tensor]) -> float:
        """How far what is left after a step is apart."""
        ends = self.whole.ends.items()
        scale = 0.0 if what == "buffer" else _largest(x for key, x in ends if key[1] == what)
        if len(parts) < len(self.ranks):
            return inf
        if what == "sum" and all(part.shape == whole.shape for part in parts):
            return apart(whole, torch.stack(parts).sum(0), scale)
        by = self.layout.difference(whole, parts, scale)
        return inf if by is None else by

    def _first_forward(self) -> Place | None:
        """The first event whose tensors differ, with those before it that cannot be compared."""
        agrees = -1  # the last event that does
        for at, pair in enumerate(self.events):
            by = self.most(pair)
            if by is not None and by > self.tolerance:
                event = self.events[agrees + 1][0]
                module = event.inside if event.kind == "in" else event.module
                places = self._places(self.apart(self.events[agrees + 1]))
                return Place(module, "output", by, event, pair[0].step > 0, places)
            agrees = agrees if by is None else at
        return None

    def _first_backward(self) -> Place | None:
        """The first event, backwards through each step, whose gradients differ."""
        for pair in sorted(reversed(self.events), key=lambda pair: pair[0].step):
            by, event = self.most(pair, True), pair[0]
            if by is not None and by > self.tolerance:
                module = event.module if event.kind == "in" else event.inside
                places = self._places(self.apart(pair, True))
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
