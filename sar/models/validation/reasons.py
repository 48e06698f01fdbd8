"""Why a module differs: found out by running the model on changed graphs in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar.models.prepare import with_norms_of_ranks
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.compare import Kind, Layout, Piece, layout_of
from sar.models.validation.record import CALL, Event, Run
from sar.models.validation.run import Subject
from sar.partition.arrays import ORIG_ID, EType, GraphArrays

NORM = (
    "a norm of each rank's rows alone; sar.prepare(model, graph), or sar.convert_batch_norm, makes "
    "it that of all rows"
)
RANDOM = "random numbers that do not belong to rows; sar.nn.Dropout draws by rows"
ORDER = (
    "it depends on the order of rows or edges, or on their ids (sort, topk, cumsum, arange, rows "
    "that are counted off): each rank has its own rows alone, in another order"
)
STATISTIC = "a mean, an extreme or another statistic of all rows: a rank takes that of its own"
NUMBER = (
    "a sum over all rows, their number (len(x), x.shape[0], num_nodes()) or a choice among them "
    "(topk): a rank has its own rows alone"
)
TIES = (
    "equal values under a maximum or minimum: one process shares the gradient among them, ranks "
    "give it to one"
)
SHARES = (
    "ranks' gradients are summed, and these are no shares: what all ranks compute alike, as a "
    "penalty of parameters, counts once for each rank"
)
STATE = "what the module keeps from one call to the next"
OTHERS = "state or data outside of its inputs, or what only ranks do"
FUSED = "sar's fused layer and the layer's own code differ: please report it"
_UNBIASED = 0.05  # of a change: as much can be a divisor of n - 1 in a deviation


def changed(
    graph: GraphArrays, shuffle: Callable[[int], np.ndarray] = np.arange, copies: int = 0
) -> tuple[GraphArrays, Layout]:
    """A graph made of another, and which of its rows are those of the other.

    Args:
        shuffle: gives the order of nodes and of edges for their number.
        copies: 1: the graph beside a copy of itself; 2: beside one of other features, each of whose
            edges comes twice.
    """
    counts: dict[Any, int] = {**graph.num_nodes, **{e: len(x) for e, (x, _) in graph.edges.items()}}
    orders = {kind: torch.from_numpy(shuffle(count)) for kind, count in counts.items()}
    number = {ntype: orders[ntype].argsort() for ntype in graph.num_nodes}
    times = dict.fromkeys(graph.num_nodes, min(copies, 1)) | dict.fromkeys(graph.edges, copies)

    def column(kind: Any, name: str, x: Tensor) -> Tensor:
        x = copied = x[orders[kind]]
        if name == ORIG_ID:
            copied = x + len(x)
        elif copies == 2 and x.is_floating_point():
            copied = x * 1.7 + 0.3
        return torch.cat([x, *[copied] * times[kind]])

    def columns(data: Mapping[Any, Mapping[str, Tensor]]) -> dict[Any, dict[str, Tensor]]:
        return {one: {k: column(one, k, x) for k, x in of.items()} for one, of in data.items()}

    def ends(etype: EType, ids: Tensor, ntype: str) -> Tensor:
        ids = number[ntype][ids][orders[etype]]
        return torch.cat([ids, *[ids + counts[ntype]] * copies])

    def kind(one: Any) -> Kind:
        rows = torch.arange(counts[one])
        return Kind(counts[one], (Piece(counts[one] * (1 + times[one]), rows, orders[one]),))

    made = GraphArrays(
        graph.name, {n: count * (1 + times[n]) for n, count in graph.num_nodes.items()},
        {e: (ends(e, x, e[0]), ends(e, y, e[2])) for e, (x, y) in graph.edges.items()},
        columns(graph.node_data), columns(graph.edge_data),
    )  # fmt: skip
    return made, Layout(list(map(kind, graph.num_nodes)), list(map(kind, graph.edges)))


@dataclass(frozen=True)
class Trial:
    """A model over ranks that have ``parts`` of ``graph``, beside one process."""

    subject: Subject
    graph: GraphArrays
    parts: np.ndarray

    @property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.subject.model.named_modules())

    def compared(self, whole: Run | None = None) -> Comparison:
        """Both runs; ``whole`` is the one process', if it has run."""
        whole = whole or self.subject.whole(self.graph)
        ranks = self.subject.ranks(self.graph, self.parts)
        return Comparison(whole, ranks, layout_of(self.graph, self.parts))

    def why(self, place: Place, compared: Comparison) -> str:
        """The reason for which a place differs, in words."""
        module = self.modules.get(place.module)
        if place.event is None:
            return STATE if place.what.startswith("buffer") else SHARES
        if module is not None and (place.what, place.event.kind) == ("output", "out"):
            if type(with_norms_of_ranks(copy.deepcopy(module))) is not type(module):
                return NORM
        why = self._shown(place, place.event, compared)
        return f"{STATE}: {why}" if place.again and why not in (OTHERS, STATE) else why

    def _shown(self, place: Place, event: Event, compared: Comparison) -> str:
        """What experiments say."""

        def changes(made: tuple[GraphArrays, Layout], seed: int = 0) -> float:
            """How much another graph changes rows that both have; 0 but for rounding."""
            run = replace(self.subject, seed=seed).whole(made[0])
            others = [one for one in run.events if one.key == event.key and run.error is None]
            worst = max((_most_apart(event, one, place, made[1]) for one in others), default=0.0)
            return worst if worst > compared.tolerance else 0.0

        if place.what == "gradient" and self._are_ties(place.module, event):
            return TIES
        if changes(changed(self.graph), 7):
            return RANDOM
        if changes(changed(self.graph, np.random.default_rng(1).permutation)):
            return ORDER
        double, other = (changes(changed(self.graph, copies=copies)) for copies in (1, 2))
        if double > _UNBIASED * other:
            return NUMBER
        return STATISTIC if other else STATE if place.again else OTHERS

    def _are_ties(self, module: str, event: Event) -> bool:
        """Whether gradients agree where no two inputs of the module are equal."""
        if module == CALL:
            return False
        moved = replace(self, subject=replace(self.subject, jittered=module)).compared()
        pair = next((pair for pair in moved.events if pair[0].key == event.key), None)
        by = None if pair is None else moved.most(pair, True)
        return by is not None and by <= moved.tolerance


def _most_apart(event: Event, other: Event, place: Place, layout: Layout) -> float:
    """How far an event's tensors at the place are from those of a run of a changed graph."""
    is_grad = place.what == "gradient"
    both = (event.grads, other.grads) if is_grad else (event.values, other.values)
    found = [
        layout.difference(one, [two], strict=True) or 0.0
        for at, (one, two) in enumerate(zip(*both))
        if at in place.places and one is not None and two is not None
    ]
    return max(found, default=0.0)
