"""Why a module differs: found out by running the model on changed graphs in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sar.models.prepare import with_norms_of_ranks
from sar.models.validation.blame import Comparison, Place
from sar.models.validation.compare import Kind, Layout, Piece
from sar.models.validation.record import CALL, Event
from sar.models.validation.run import Run
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
_UNBIASED = 0.05  # of a change: as much can be a divisor of n - 1 in a deviation
OTHERS = "state or data outside of its inputs, or what only ranks do"
FUSED = "sar's fused layer and the layer's own code differ: please report it"


@dataclass(frozen=True)
class Changed:
    """A graph made of another, and which of its rows are those of the other."""

    graph: GraphArrays
    layout: Layout


def permuted(graph: GraphArrays) -> Changed:
    """The same graph with nodes and edges in another order."""
    rng = np.random.default_rng(1)
    nodes = {n: torch.from_numpy(rng.permutation(count)) for n, count in graph.num_nodes.items()}
    orders = {e: torch.from_numpy(rng.permutation(len(s))) for e, (s, _) in graph.edges.items()}
    number = {n: order.argsort() for n, order in nodes.items()}
    edges = {
        etype: (number[etype[0]][src][orders[etype]], number[etype[2]][dst][orders[etype]])
        for etype, (src, dst) in graph.edges.items()
    }
    made = replace(
        graph,
        edges=edges,
        node_data={n: _rows(data, nodes[n]) for n, data in graph.node_data.items()},
        edge_data={e: _rows(data, orders[e]) for e, data in graph.edge_data.items()},
    )
    there: dict[Any, Tensor] = {**nodes, **orders}
    here = {kind: torch.arange(len(order)) for kind, order in there.items()}
    return Changed(made, _layout(graph, made, here, there))


def twice(graph: GraphArrays, other: bool) -> Changed:
    """The graph beside a copy of itself, or of one with ``other`` features and more edges."""
    counts, times = graph.num_nodes, 2 if other else 1
    edges = {
        e: (
            torch.cat([src, *[src + counts[e[0]]] * times]),
            torch.cat([dst, *[dst + counts[e[2]]] * times]),
        )
        for e, (src, dst) in graph.edges.items()
    }

    def both(data: dict[str, Tensor], times: int = 1) -> dict[str, Tensor]:
        return {name: torch.cat([x, *[copied(name, x)] * times]) for name, x in data.items()}

    def copied(name: str, x: Tensor) -> Tensor:
        if name == ORIG_ID:
            return x + len(x)
        return x * 1.7 + 0.3 if other and x.is_floating_point() else x

    made = replace(
        graph,
        num_nodes={n: 2 * count for n, count in counts.items()},
        edges=edges,
        node_data={n: both(data) for n, data in graph.node_data.items()},
        edge_data={e: both(data, times) for e, data in graph.edge_data.items()},
    )
    sizes: dict[Any, int] = {**counts, **{e: len(src) for e, (src, _) in graph.edges.items()}}
    rows = {kind: torch.arange(size) for kind, size in sizes.items()}
    return Changed(made, _layout(graph, made, rows, rows))


def _rows(data: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    return {name: column[order] for name, column in data.items()}


def _layout(graph: GraphArrays, made: GraphArrays, here: dict, there: dict) -> Layout:
    kinds = []
    for types, before, after in (
        (list(graph.num_nodes), graph.num_nodes, made.num_nodes),
        (
            list(graph.edges),
            {e: len(ends[0]) for e, ends in graph.edges.items()},
            {e: len(ends[0]) for e, ends in made.edges.items()},
        ),
    ):
        starts, news = _starts(types, before), _starts(types, after)  # type: ignore[arg-type]
        for kind in types:
            piece = Piece(after[kind], here[kind], there[kind])  # type: ignore[index]
            kinds.append(Kind(before[kind], (piece,)))  # type: ignore[index]
        if len(types) > 1:
            piece = Piece(
                sum(after.values()),
                torch.cat([here[kind] + news[kind] for kind in types]),
                torch.cat([there[kind] + starts[kind] for kind in types]),
            )
            kinds.append(Kind(sum(before.values()), (piece,)))
    return Layout(kinds)


def _starts(types: list, sizes: dict) -> dict:
    ends = np.cumsum([0, *(sizes[kind] for kind in types)]).tolist()
    return dict(zip(types, ends))


class Reasons:
    """Experiments about the place where two runs part.

    Args:
        run: the model on a changed graph in one process, with a seed of random numbers.
        jittered: compares whole graph and ranks with the inputs of a module a little moved.
    """

    def __init__(
        self, graph: GraphArrays, compared: Comparison, run: Callable[[Changed, int], Run],
        jittered: Callable[[str], Comparison],
    ) -> None:  # fmt: skip
        self.graph, self.whole, self.run, self.jittered = graph, compared.whole, run, jittered
        self.tolerance = compared.tolerance

    def of(self, place: Place, module: nn.Module | None) -> str:
        """Why the module differs, in words."""
        if module is not None and place.what == "output" and place.event is not None:
            if place.event.kind == "out" and is_norm_of_rows(module):
                return NORM
        if place.event is None:
            return STATE if place.what.startswith("buffer") else SHARES
        why = self._shown(place, place.event)
        return f"{STATE}: {why}" if place.again and why not in (OTHERS, STATE) else why

    def _shown(self, place: Place, event: Event) -> str:
        """What experiments say."""
        if place.what == "gradient" and self._are_ties(place.module, event):
            return TIES
        same = self._same()
        if self._changes(event, place, self.run(same, 7), same.layout):
            return RANDOM
        order, double, other = (
            self._changes(event, place, self.run(made, 0), made.layout)
            for made in (
                permuted(self.graph),
                twice(self.graph, other=False),
                twice(self.graph, other=True),
            )
        )
        if order:
            return ORDER
        if double > _UNBIASED * other:
            return NUMBER
        if other:
            return STATISTIC
        return STATE if place.again else OTHERS

    def _same(self) -> Changed:
        rows = {n: torch.arange(count) for n, count in self.graph.num_nodes.items()}
        rows |= {e: torch.arange(len(src)) for e, (src, _) in self.graph.edges.items()}  # type: ignore[misc]
        return Changed(self.graph, _layout(self.graph, self.graph, rows, rows))

    def _changes(self, event: Event, place: Place, run: Run, layout: Layout) -> float:
        """How much another graph changes the event's rows that both have; 0 but for rounding."""
        other = next((one for one in run.events if one.key == event.key), None)
        mine = next((one for one in self.whole.events if one.key == event.key), None)
        if run.error is not None or other is None or mine is None:
            return 0.0
        pairs = zip(mine.values, other.values)
        if place.what == "gradient":
            pairs = zip(mine.grads, other.grads)
        found = [
            layout.difference(one, [two], strict=True)
            for at, (one, two) in enumerate(pairs)
            if at in place.places and one is not None and two is not None
        ]
        worst = max((by for by in found if by is not None), default=0.0)
        return worst if worst > self.tolerance else 0.0

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
