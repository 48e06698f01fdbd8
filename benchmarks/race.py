"""Contenders that take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.registry import Table

MB = 1e6
WARM_UP = 2  # epochs before those that count
SAME_LOSS = 1e-4
_HEADS = {"cpu": "cpu s", "user": "user s", "system": "system s", "wall": "wall s"}
_HEADS |= {"sent": "sent MB", "activation": "activation MB", "faults": "faults"}
Epoch = dict[str, float]


@dataclass
class Race:
    """What contenders did in each turn.

    Attributes:
        turns: their epochs by name, as many of each.
        memory: what each rank said of its memory, by name; see ``Task.memory``.
        asked: answers to the other methods that were called at the end, by name and method.
    """

    turns: dict[Any, list[Epoch]]
    memory: dict[Any, list[dict[str, int]]] = field(default_factory=dict)
    asked: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    def middle(self, name: Any, key: str) -> float:
        """Median of the turns; of ``activation``, the largest rank's bytes."""
        if key == "activation":
            return float(max(rank["activation"] for rank in self.memory[name]))
        return median(epoch[key] for epoch in self.turns[name])

    def ratio(self, name: Any, base: Any, key: str = "cpu") -> float:
        """Median of the turns' ratios, the one over the other."""
        pairs = zip(self.turns[name], self.turns[base])
        return median(mine[key] / max(theirs[key], 1e-9) for mine, theirs in pairs)

    def loss_apart(self, name: str, base: str) -> float:
        """Largest relative distance of losses: who computes something else races for nothing."""
        pairs = zip(self.turns[name], self.turns[base])
        return max(abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs)

    def table(self, title: str, keys: list[str], base: str | None = None) -> Table:
        """A row for each contender; with a base, its processor seconds' ratio to that one's."""
        heads = [_HEADS[key] for key in keys] + ([] if base is None else [f"x {base}"])
        table = Table(title, ["contender", *heads])
        for name in self.turns:
            row: list[Any] = [name]
            for key in keys:
                value = self.middle(name, key)
                row.append(value / MB if key in ("sent", "activation") else value)
            table.rows.append(row if base is None else [*row, self.ratio(name, base)])
        return table


def race(
    contenders: Mapping[Any, Callable[[], Cluster]],
    repeats: int,
    *,
    memory: int = 0,
    ask: Mapping[str, tuple[str, ...]] | None = None,
    ready: Callable[[], None] = lambda: None,
    turn: Callable[[Cluster], Epoch] | None = None,
) -> Race:
    """Start all contenders, let them train an epoch each in turn, and end them.

    A turn is two epochs, of which the second counts: a virtual machine that reports free pages
    gives the memory of those who wait to its host, and the first epoch pays for getting it back,
    which training without pauses never does.

    Args:
        memory: epochs whose activation memory is measured before; they warm up as well.
        ask: methods to call of a contender before the turns, by its name.
        ready: called once all are warm.
        turn: what is measured of a cluster in a turn; :func:`epoch` otherwise.
    """
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(start()) for name, start in contenders.items()}
        found = Race({name: [] for name in clusters})
        if memory:
            found.memory = {n: one.call("memory", epochs=memory) for n, one in clusters.items()}
        for name, methods in (ask or {}).items():
            found.asked[name] = {method: clusters[name].call(method) for method in methods}
        for one in clusters.values():
            for _ in range(WARM_UP):
                one.call("epoch")
        ready()
        for number in range(repeats):
            for name in list(clusters)[:: 1 if number % 2 else -1]:
                clusters[name].call("epoch")
                found.turns[name].append((turn or epoch)(clusters[name]))
    return found


def epoch(cluster: Cluster) -> Epoch:
    """One epoch of all ranks: sums, except for the wall clock, of which the longest counts."""
    ranks = cluster.call("epoch")
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    return {**total, "wall": max(rank["wall"] for rank in ranks)}
