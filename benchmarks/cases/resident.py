"""What a rank keeps in memory: bytes a node and an edge, with features in memory or in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

MB, KB = 1e6, 1e3
NODES, EDGES, FEATURES = 1_000_000, 14_000_000, 128
EPOCHS = 2
SAGE = {"model": "sage", "layers": 3, "hidden": 256, "batch_norm": True}
LIMITS = {"keep": 12.0, "recompute": 7.2}  # KB a node
PER_EDGE = {"both": 12.0, "one": 8.0}
SLACK = 1.05  # bounds of the segments, which are per node, on a graph of 28 edges a node
_SAME = (
    "features", "labels and splits", "edge arrays", "halo plan", "degrees and ids",
    "kept input sums", "model and optimizer", "idle buffers", "kept for backward",
)  # fmt: skip
KINDS = {
    "imported": "interpreter and libraries",
    **{name: name for name in _SAME},
    "peak": "largest anonymous memory",
    "resident": "largest resident memory",
}


@benchmark("resident", "limits")
def resident(options: Options) -> Report:
    """Resident memory a node: 1 M nodes, 14 M edges, 128 features, SAGE-256 with batch norm.

    Everything counts: interpreter and libraries, features, structure, activations, buffers. Needs
    14 GB; with several ranks on one machine the sum of their peaks is counted.
    """
    sizes = [ranks for ranks in (1, 2) if ranks <= max(options.ranks)]
    graph = graphs.regular(options, [("random", n) for n in sizes], NODES, EDGES, FEATURES)
    report = Report()
    for ranks in sizes:
        for mode in LIMITS:
            found = _measure(graph.parts["random", ranks], ranks, model=SAGE, activations=mode)
            nodes = sum(one["nodes"] for one in found)
            name = f"{mode}, {ranks} rank(s)"
            report.tables.append(_breakdown(name, found, nodes))
            peak = sum(one["resident"] for one in found) / nodes / KB
            report.figures.append(Figure(name, peak, "KB/node", at_most=LIMITS[mode]))
    return report


@benchmark("structure", "limits")
def structure(options: Options) -> Report:
    """Bytes an edge that stay after training: R-MAT 2^17, SAGE, 1, 4 and 8 ranks."""
    cuts = [(method, n) for n in (1, 4, 8) for method in ("metis", "random")]
    graph = graphs.rmat(options, cuts)
    columns = ["cut", "structure", "arrays B/edge", "with plan and degrees B/edge"]
    report = Report(tables=[Table("All ranks together, after an epoch", columns)])
    for method, ranks in cuts:
        for kind, limit in PER_EDGE.items():
            path = graph.parts[method, ranks]
            found = _measure(path, ranks, model={**SAGE, "hidden": 16}, structure=kind)
            edges = sum(one["edges"] for one in found)
            arrays = sum(one["edge arrays"] for one in found) / edges
            rest = sum(one["halo plan"] + one["degrees and ids"] for one in found) / edges
            report.tables[0].rows.append([f"{method}-{ranks}", kind, arrays, arrays + rest])
            bound = limit * SLACK + _segments(ranks)
            name = f"{method}-{ranks}, {kind}"
            report.figures.append(Figure(name, arrays, "B/edge", at_most=bound))
    return report


def _measure(parts: Path, ranks: int, **arguments: Any) -> list[dict[str, Any]]:
    task = "benchmarks.tasks.trained:Trained"
    with Cluster(task, ranks, environment=LAUNCH, parts=str(parts), **arguments) as cluster:
        return cluster.call("kinds", epochs=EPOCHS)


def _segments(ranks: int) -> float:
    """Bytes an edge of the bounds of segments, at 28 edges a node, if each row has some."""
    return 8 * max(1, ranks - 1) / 28 + 8 / 28 + 4 * max(0, ranks - 1) / 28


def _breakdown(name: str, found: list[dict[str, Any]], nodes: int) -> Table:
    rows = [[what, sum(one[key] for one in found) / nodes] for key, what in KINDS.items()]
    return Table(f"{name}: bytes a node", ["kind", "B/node"], rows)
