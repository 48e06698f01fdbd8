"""Activation memory with layers that keep, recompute or offload their activations."""

from __future__ import annotations

from typing import Any

from benchmarks import graphs
from benchmarks.cases.memory import MB
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, EPOCHS = 8, 3
BOUNDS = {"keep": (1.15, 2), "recompute": (0.6, 0)}  # x DGL's / ranks, + so many rounds
SMALL = {**LAUNCH, "MALLOC_MMAP_THRESHOLD_": "262144"}  # as docs/launching.md says
MODES = ("keep", "recompute", "offload", "lossy_bfloat16")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "SAGE": ("benchmarks.tasks.sage", {}),
    "GAT": ("benchmarks.tasks.attention", {"kind": "gat"}),
}


@benchmark("activations", "limits")
def activations(options: Options) -> Report:
    """Activation memory of SAGE and GAT on 8 ranks, kept, recomputed, offloaded, rounded; METIS.

    Bounds: 1.15 x DGL's / 8 + two rounds where they are kept, 0.6 x DGL's / 8 where they are
    recomputed.
    """
    prepared = graphs.rmat(options, [("metis", RANKS)])
    parts = str(prepared.parts["metis", RANKS])
    columns = ["model", "activations", "largest rank MB", "x DGL / ranks", "CPU s", "sent MB"]
    table = Table("Peak anonymous memory above that before the first epoch", columns)
    report = Report(tables=[table])
    for model, (task, arguments) in MODELS.items():
        whole = {**arguments, "file": str(prepared.file)}
        with Cluster(f"{task}:Dgl", environment=ONE_THREAD, **whole) as dgl:
            single = dgl.call("memory", epochs=1)[0]["activation"]
        table.rows.append([model, "DGL, one process", single / MB, None, None, None])
        for mode in MODES:
            largest, one_round, cpu, sent = _measure(
                task, parts, {**arguments, "activations": mode}
            )
            share = largest * RANKS / single
            table.rows.append([model, mode, largest / MB, share, cpu, sent / MB])
            if mode in BOUNDS:
                factor, rounds = BOUNDS[mode]
                bound = (factor * single / RANKS + rounds * one_round) / MB
                name = f"{model}, {mode}, largest of {RANKS} ranks"
                report.figures.append(Figure(name, largest / MB, "MB", at_most=bound))
    return report


def _measure(task: str, parts: str, arguments: dict) -> tuple[int, int, float, int]:
    """Bytes on the largest rank, of its busiest round; CPU seconds and bytes sent in an epoch."""
    environment = SMALL if arguments["activations"] == "recompute" else LAUNCH
    shared = {"environment": environment, "parts": parts, "rounds": None, **arguments}
    with Cluster(f"{task}:Sar", RANKS, **shared) as ranks:
        largest = max(one["activation"] for one in ranks.call("memory", epochs=EPOCHS))
        one_round = max(ranks.call("round_bytes"))
        epochs = ranks.call("epoch")
    return largest, one_round, sum(e["cpu"] for e in epochs), sum(e["sent"] for e in epochs)
