"""The planner's predictions against runs that it was not fitted on."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import APART, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

MEMORY, BYTES, TIME = 0.10, 0.02, 0.30
EPOCHS = 3


@dataclass(frozen=True)
class Configuration:
    """A model on a cut graph; ``rounds`` None is strict."""

    name: str
    cut: tuple[str, int]
    model: dict[str, Any] = field(default_factory=dict)
    rounds: int | None = None
    activations: str = "keep"
    rmat: bool = True

    def prepare(self, options: Options) -> Path:
        """The partitions' JSON."""
        if self.rmat:
            return graphs.rmat(options, [self.cut]).parts[self.cut]
        return graphs.community(options, [self.cut], 100_000, 1_000_000).parts[self.cut]


CONFIGURATIONS = [
    Configuration("SAGE 3 x 256, METIS", ("metis", 4), {"model": "sage", "hidden": 256}),
    Configuration(
        "GCN 2 x 128, random", ("random", 2), {"model": "gcn", "layers": 2, "hidden": 128}
    ),
    Configuration(
        "SAGE 3 x 256, batch norm, random", ("random", 4),
        {"model": "sage", "batch_norm": True}, rmat=False,
    ),
    Configuration("GIN 3 x 64, METIS", ("metis", 8), {"model": "gin", "hidden": 64}),
    Configuration(
        "GAT 3 x 128, recompute", ("metis", 2), {"model": "gat", "hidden": 128},
        activations="recompute",
    ),
    Configuration(
        "GCN 4 x 192, one-shot", ("metis", 3),
        {"model": "gcn", "layers": 4, "hidden": 192}, 1, rmat=False,
    ),
]  # fmt: skip


@benchmark("planner", "limits")
def planner(options: Options) -> Report:
    """Predicted peak memory, bytes and seconds of an epoch against measured ones.

    Six configurations on this machine, one thread a rank, ranks taking turns on its cores; medians
    of up to three turns.
    """
    table = Table(
        "Predicted and measured",
        ["configuration", "MB a rank", "measured", "MB sent", "measured", "s an epoch", "measured"],
    )
    report = Report(tables=[table])
    for one in CONFIGURATIONS:
        parts = one.prepare(options)
        turns = [(_predict(parts, one), _run(parts, one)) for _ in range(min(3, options.repeats))]
        predicted = [[p.memory_bytes / 1e6, p.sent_bytes / 1e6, p.seconds] for p, _ in turns]
        measured = [[memory / 1e6, sent / 1e6, wall] for _, (memory, sent, wall) in turns]
        pairs = [*zip(map(median, zip(*predicted)), map(median, zip(*measured)), strict=True)]
        table.rows.append([one.name, *(value for pair in pairs for value in pair)])
        for what, bound, (mine, real) in zip(
            ("memory", "bytes", "time"), (MEMORY, BYTES, TIME), pairs, strict=True
        ):
            error = abs(mine / real - 1)
            report.figures.append(Figure(f"{one.name}: {what}", error, at_most=bound))
    return report


def _predict(parts: Path, one: Configuration) -> Any:
    from sar.plan import Hardware, Setting, Work, from_parts, measure_costs, predict
    from sar.train.options import ModelOptions

    graph = from_parts(parts)
    size, cores = graph.size, len(os.sched_getaffinity(0))
    work = Work(ModelOptions(**one.model), graph.features, 16, one.activations)
    costs = measure_costs(work)
    hardware = Hardware(bandwidth=1e12, ranks_per_host=size, cores=cores)
    return predict(graph, costs, Setting("", one.rounds or max(1, size - 1)), hardware)


def _run(parts: Path, one: Configuration) -> tuple[float, float, float]:
    """Resident bytes of the largest rank, bytes that all send, seconds of the slowest."""
    given = {"parts": str(parts), "model": one.model, "rounds": one.rounds, "mfgs": "off"}
    task = partial(Cluster, "benchmarks.tasks.trained:Trained", one.cut[1], environment=APART)
    with task(activations=one.activations, **given) as ranks:
        found = ranks.call("watch", epochs=EPOCHS)
    return (
        max(rank["resident"] for rank in found),
        sum(rank["sent"] for rank in found),
        max(rank["wall"] for rank in found),
    )
