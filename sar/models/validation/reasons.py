"""Why a module differs: found out by running the model on changed graphs in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar.models.prepare import with_norms_of_ranks
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.compare import Kind, Layout, Piece
from sar.models.validation.record import CALL, Event, Run
from sar.partition.arrays import ORIG_ID, GraphArrays

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


@dataclass(frozen=True)
class Changed:
    """A graph made of another, and which of its rows are those of the other."""

    graph: GraphArrays
    layout: Layout


def permuted(graph: GraphArrays, shuffle: Callable[[int], np.ndarray]) -> Changed:
    """The same graph with nodes and edges in an order that ``shuffle`` gives for their number."""
    orders: dict[Any, Tensor] = {
        kind: torch.from_numpy(shuffle(count)) for kind, count in _counts(graph).items()
    }
    number = {ntype: orders[ntype].argsort() for ntype in graph.num_nodes}
    made = replace(
        graph,
        edges={
            e: (number[e[0]][src][orders[e]], number[e[2]][dst][orders[e]])
            for e, (src, dst) in graph.edges.items()
        },
        **_columns(graph, lambda kind, _, x: x[orders[kind]]),
    )
    return Changed(made, _layout(graph, made, orders))


def twice(graph: GraphArrays, other: bool) -> Changed:
    """The graph beside a copy of itself, or of one with ``other`` features and more edges."""
    counts, times = graph.num_nodes, 2 if other else 1

    def both(kind: Any, name: str, x: Tensor) -> Tensor:
        copied = x * 1.7 + 0.3 if other and x.is_floating_point() else x
        copied = x + len(x) if name == ORIG_ID else copied
        return torch.cat([x, *[copied] * (1 if kind in counts else times)])

    def ends(ids: Tensor, ntype: str) -> Tensor:
        return torch.cat([ids, *[ids + counts[ntype]] * times])

    made = replace(
        graph,
        num_nodes={n: 2 * count for n, count in counts.items()},
        edges={e: (ends(src, e[0]), ends(dst, e[2])) for e, (src, dst) in graph.edges.items()},
        **_columns(graph, both),
    )
    first = {kind: torch.arange(count) for kind, count in _counts(graph).items()}
    return Changed(made, _layout(graph, made, first))


def _counts(graph: GraphArrays) -> dict[Any, int]:
    """How many nodes or edges there are, by type."""
    return {**graph.num_nodes, **{e: len(src) for e, (src, _) in graph.edges.items()}}


def _columns(graph: GraphArrays, function: Callable[[Any, str, Tensor], Tensor]) -> dict[str, Any]:
    """All columns, as ``function`` of type, name and column gives them."""

    def of(data: Mapping[Any, Mapping[str, Tensor]]) -> dict[Any, dict[str, Tensor]]:
        return {
            kind: {name: function(kind, name, x) for name, x in columns.items()}
            for kind, columns in data.items()
        }

    return {"node_data": of(graph.node_data), "edge_data": of(graph.edge_data)}


def _layout(graph: GraphArrays, made: GraphArrays, there: dict[Any, Tensor]) -> Layout:
    """Of graphs whose first rows are rows ``there`` of the other."""
    before, after = _counts(graph), _counts(made)

    def kind(one: Any) -> Kind:
        here = torch.arange(before[one])
        return Kind(before[one], (Piece(after[one], here, there[one]),))

    return Layout(list(map(kind, graph.num_nodes)), list(map(kind, graph.edges)))


@dataclass(frozen=True)
class Reasons:
    """Experiments about the place where two runs part.

    Attributes:
        compared: the runs, of ``graph``.
        run: the model on a changed graph in one process, with a seed of random numbers.
        jittered: compares whole graph and ranks with the inputs of a module a little moved.
    """

    graph: GraphArrays
    compared: Comparison
    run: Callable[[Changed, int], Run]
    jittered: Callable[[str], Comparison]

    def of(self, place: Place, module: nn.Module | None) -> str:
        """Why the module differs, in words."""
        if place.event is None:
            return STATE if place.what.startswith("buffer") else SHARES
        if module is not None and (place.what, place.event.kind) == ("output", "out"):
            if is_norm_of_rows(module):
                return NORM
        why = self._shown(place, place.event)
        return f"{STATE}: {why}" if place.again and why not in (OTHERS, STATE) else why

    def _shown(self, place: Place, event: Event) -> str:
        """What experiments say."""
        if place.what == "gradient" and self._are_ties(place.module, event):
            return TIES
        changes = partial(self._changes, event, place)
        if changes(permuted(self.graph, np.arange), 7):
            return RANDOM
        order = changes(permuted(self.graph, np.random.default_rng(1).permutation))
        double, other = (changes(twice(self.graph, other=one)) for one in (False, True))
        if order:
            return ORDER
        if double > _UNBIASED * other:
            return NUMBER
        return STATISTIC if other else STATE if place.again else OTHERS

    def _changes(self, event: Event, place: Place, made: Changed, seed: int = 0) -> float:
        """How much another graph changes the event's rows that both have; 0 but for rounding."""
        run = self.run(made, seed)
        mine, other = (
            next((one for one in two.events if one.key == event.key), None)
            for two in (self.compared.whole, run)
        )
        if run.error is not None or other is None or mine is None:
            return 0.0
        both = (
            (mine.grads, other.grads) if place.what == "gradient" else (mine.values, other.values)
        )
        found = [
            made.layout.difference(one, [two], strict=True) or 0.0
            for at, (one, two) in enumerate(zip(*both))
            if at in place.places and one is not None and two is not None
        ]
        worst = max(found, default=0.0)
        return worst if worst > self.compared.tolerance else 0.0

    def _are_ties(self, module: str, event: Event) -> bool:
        """Whether gradients agree where no two inputs of the module are equal."""
        if module == CALL:
            return False
        compared = self.jittered(module)
        pair = next((pair for pair in compared.events if pair[0].key == event.key), None)
        by = None if pair is None else compared.backward(*pair)
        return by is not None and by <= compared.tolerance


def is_norm_of_rows(module: nn.Module) -> bool:
    """Whether :func:`sar.prepare` puts another module, or class, in its place."""
    return type(with_norms_of_ranks(copy.deepcopy(module))) is not type(module)
