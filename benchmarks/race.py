"""Contenders that take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.registry import Figure, Table

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
        asked: answers to the other method that was called, by name.
    """

    turns: dict[Any, list[Epoch]]
    memory: dict[Any, list[dict[str, int]]] = field(default_factory=dict)
    asked: dict[Any, list[Any]] = field(default_factory=dict)

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

    def losses(self, base: str) -> list[Figure]:
        """The distance of each contender's losses from one's."""
        return [
            Figure(f"{n}: loss / {base}'s - 1", self.loss_apart(n, base), at_most=SAME_LOSS)
            for n in self.turns
            if n != base
        ]

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
    memory: int | Callable[[Any], int] = 0,
    ask: Mapping[Any, str] = MappingProxyType({}),
    then_ask: Mapping[Any, str] = MappingProxyType({}),
    ready: Callable[[], None] = lambda: None,
    turn: Callable[[Cluster], Epoch] | None = None,
) -> Race:
    """Start all contenders, let them train an epoch each in turn, and end them.

    A turn is two epochs, of which the second counts: a virtual machine that reports free pages
    gives the memory of those who wait to its host, and the first epoch pays for getting it back,
    which training without pauses never does.

    Args:
        memory: epochs whose activation memory is measured before, by name where they differ; they
            warm up as well.
        ask, then_ask: methods to call of contenders before the turns, and after them.
        ready: called once all are warm.
        turn: what is measured of a cluster in a turn; :func:`epoch` otherwise.
    """
    with ExitStack() as stack:
        clusters = {name: stack.enter_context(start()) for name, start in contenders.items()}
        found = Race({name: [] for name in clusters})
        if memory:
            for name, one in clusters.items():
                epochs = memory(name) if callable(memory) else memory
                found.memory[name] = one.call("memory", epochs=epochs)
        found.asked |= {name: clusters[name].call(method) for name, method in ask.items()}
        for one in clusters.values():
            for _ in range(WARM_UP):
                one.call("epoch")
        ready()
        for number in range(repeats):
            for name in list(clusters)[:: 1 if number % 2 else -1]:
                clusters[name].call("epoch")
                found.turns[name].append((turn or epoch)(clusters[name]))
        found.asked |= {name: clusters[name].call(method) for name, method in then_ask.items()}
    return found


def epoch(cluster: Cluster) -> Epoch:
    """One epoch of all ranks: sums, except for the wall clock, of which the longest counts, and the
    busiest rank's bytes and seconds."""
    ranks = cluster.call("epoch")
    total = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    most = {name: max(rank[name] for rank in ranks) for name in ("wall", "sent", "cpu")}
    busiest = {"busiest sent": most["sent"], "busiest cpu": most["cpu"]}
    return {**total, "wall": most["wall"], **busiest, "mean cpu": total["cpu"] / len(ranks)}
