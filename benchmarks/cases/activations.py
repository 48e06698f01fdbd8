"""Activation memory with layers that keep, recompute or offload their activations."""

from __future__ import annotations

from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, EPOCHS = 8, 3
BOUNDS = {  # x DGL's / ranks, + so many rounds
    ("SAGE", "keep"): (1.15, 2),
    ("SAGE", "recompute, donate"): (0.8, 0),
    ("GAT", "keep"): (0.95, 2),
    ("GAT", "recompute"): (0.6, 0),
}
SMALL = {**LAUNCH, "MALLOC_MMAP_THRESHOLD_": "262144"}  # as docs/launching.md says
MODES = ("keep", "recompute", "offload", "lossy_bfloat16")
DONATED = ("keep, donate", "recompute, donate")  # with sar.optimize(model, donate=True)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "SAGE": ("benchmarks.tasks.sage", {}),
    "GAT": ("benchmarks.tasks.attention", {"kind": "gat"}),
}


@benchmark("activations", "limits")
def activations(options: Options) -> Report:
    """Activation memory of SAGE and GAT on 8 ranks, kept, recomputed, offloaded, rounded; METIS.

    Bounds, of DGL's / 8: SAGE 1.15 + two rounds kept, 0.8 recomputed with donated inputs; GAT 0.95
    + two rounds kept, 0.6 recomputed.
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
        for mode in MODES if model == "GAT" else (*MODES, *DONATED):
            activations, _, donate = mode.partition(", ")
            given = {**arguments, "activations": activations}
            if donate:
                given["donate"] = True
            largest, one_round, cpu, sent = _measure(task, parts, given)
            share = largest * RANKS / single
            table.rows.append([model, mode, largest / MB, share, cpu, sent / MB])
            if (model, mode) in BOUNDS:
                factor, rounds = BOUNDS[model, mode]
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
