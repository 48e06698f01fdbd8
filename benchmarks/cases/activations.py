"""Activation memory with layers that keep, recompute or offload their activations."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.cluster import LAUNCH
from benchmarks.contenders import Start, dgl, ours
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, EPOCHS = 8, 3
CUT = ("metis", RANKS)
BOUNDS = {  # x DGL's / ranks, + so many rounds
    ("sage", "keep"): (1.15, 2),
    ("sage", "recompute, donate"): (0.8, 0),
    ("gat", "keep"): (0.95, 2),
    ("gat", "recompute"): (0.6, 0),
}
SMALL = {**LAUNCH, "MALLOC_MMAP_THRESHOLD_": "262144"}  # as docs/launching.md says
MODES = ("keep", "recompute", "offload", "lossy_bfloat16")
DONATED = ("keep, donate", "recompute, donate")  # with sar.optimize(model, donate=True)


@benchmark("activations", "limits")
def activations(options: Options) -> Report:
    """Activation memory of SAGE and GAT on 8 ranks, kept, recomputed, offloaded, rounded; METIS.

    Bounds, of DGL's / 8: SAGE 1.15 + two rounds kept, 0.8 recomputed with donated inputs; GAT 0.95
    + two rounds kept, 0.6 recomputed.
    """
    graph = graphs.rmat(options, [CUT])
    columns = ["model", "activations", "largest rank MB", "x DGL / ranks", "CPU s", "sent MB"]
    table = Table("Peak anonymous memory above that before the first epoch", columns)
    report = Report(tables=[table])
    for kind in ("sage", "gat"):
        with dgl(graph, kind)() as whole:
            single = whole.call("memory", epochs=1)[0]["activation"]
        table.rows.append([kind, "DGL, one process", single / MB, None, None, None])
        for mode in MODES if kind == "gat" else (*MODES, *DONATED):
            activations, _, donate = mode.partition(", ")
            environment = SMALL if activations == "recompute" else LAUNCH
            given = {"activations": activations, "donate": bool(donate)}
            start = ours(graph, CUT, kind, environment, **given)
            largest, one_round, cpu, sent = _measure(start)
            share = largest * RANKS / single
            table.rows.append([kind, mode, largest / MB, share, cpu, sent / MB])
            if (kind, mode) in BOUNDS:
                factor, rounds = BOUNDS[kind, mode]
                bound = (factor * single / RANKS + rounds * one_round) / MB
                name = f"{kind}, {mode}, largest of {RANKS} ranks"
                report.figures.append(Figure(name, largest / MB, "MB", at_most=bound))
    return report


def _measure(start: Start) -> tuple[int, int, float, int]:
    """Bytes on the largest rank, of its busiest round; CPU seconds and bytes sent in an epoch."""
    with start() as ranks:
        largest = max(one["activation"] for one in ranks.call("memory", epochs=EPOCHS))
        one_round = max(ranks.call("round_bytes"))
        epochs = ranks.call("epoch")
    return largest, one_round, sum(e["cpu"] for e in epochs), sum(e["sent"] for e in epochs)
