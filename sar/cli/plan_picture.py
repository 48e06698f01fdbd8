"""What `sar plan` compares, and `--plot`: the same against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sar.pictures import Plan, draw_plan, palette, save
from sar.pictures.plan import SIZE
from sar.plan import Costs, GraphStatistics, Hardware, Setting, estimate, predict, random_share

_MOST = 1024  # ranks of an estimate, whose rows are counted for each pair


def settings_of(size: int, activations: Sequence[str]) -> list[Setting]:
    """Strict rounds of each way to treat activations and, where they differ, one round."""
    strict = max(1, size - 1)
    rounds = [("strict", strict)] + ([("one-shot", 1)] if strict > 1 else [])
    return [
        Setting(f"{word}, {one}", number, one) for one in activations for word, number in rounds
    ]


def draw(
    path: Path, dark: bool, name: str,
    graph: GraphStatistics, costs: Mapping[str, Costs], hardware: Hardware,
) -> None:  # fmt: skip
    """Draw predictions for the ranks of ``graph``, and for an eighth to the fourfold of them."""
    asked = graph.size
    least = min(asked, hardware.ranks_per_host)
    sizes = [number for number in numbers(asked) if number >= least]
    memory: dict[str, list[tuple[int, float]]] = {}
    seconds: dict[str, list[tuple[int, float]]] = {}
    for number in sizes:
        sized = graph if number == asked else other_number(graph, number)
        for setting in settings_of(max(3, number), list(costs)):  # one-shot is a line of its own
            setting = replace(setting, rounds=min(setting.rounds, max(1, number - 1)))
            found = predict(sized, costs[setting.activations], setting, hardware)
            memory.setdefault(setting.name, []).append((number, found.memory_bytes))
            seconds.setdefault(setting.name, []).append((number, found.seconds))
    ranks = "1 rank" if asked == 1 else f"{asked} ranks"
    note = f"dotted: {ranks}" if graph.estimated else f"dotted: {ranks}, counted; others: estimates"
    limit = None if hardware.memory is None else hardware.memory / hardware.ranks_per_host
    plan = Plan(name, note, memory, seconds, asked, limit)
    save(path, partial(draw_plan, plan), SIZE, palette(dark))


def numbers(asked: int) -> list[int]:
    """An eighth of the ranks, twice as many, and so on to four times as many."""
    found = {max(1, asked * 2**power // 8) for power in range(6)}
    return sorted(number for number in found if number <= max(asked, _MOST))


def other_number(graph: GraphStatistics, number: int) -> GraphStatistics:
    """``graph`` in another number of parts, by a cut that is better than a random one, or worse,
    by as much as the cut of ``graph`` is."""
    nodes, edges = (sum(getattr(rank, name) for rank in graph.ranks) for name in ("nodes", "edges"))
    share = random_share(nodes, edges, number)
    if graph.size > 1:
        share *= graph.rows_sent() / max(1, nodes) / random_share(nodes, edges, graph.size)
    return estimate(
        graph.name, nodes, edges, number, features=graph.features, classes=graph.classes,
        halo_share=min(share, number - 1),
    )  # fmt: skip
