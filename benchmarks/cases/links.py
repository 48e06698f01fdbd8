"""Link prediction on a knowledge graph: trained on ranks, ranked by them and by one process."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

RANKS, STEPS = 4, 30
TASKS = "benchmarks.tasks.links"
FLOOR, APART = 0.2, 1e-6


@benchmark("links", "edges")
def links(options: Options) -> Report:
    """DistMult on FB15k-237: filtered MRR of 4 ranks, and how far one process' is from it.

    Rows of 128, full batch, 4 negatives for either end of every triple, 30 steps of Adam. The one
    process ranks the same weights with a dense product and no part of sar.
    """
    from sar.partition.sources.npz import read_npz

    file = options.data and options.data / "fb15k237.npz"
    if not file or not file.is_file():
        return Report(skipped="pass --data or set SAR_DATA: fb15k237.npz")
    cut = ("metis", RANKS)
    parts = graphs.prepare(options, "links-fb15k237", lambda: read_npz(file), [cut]).parts[cut]
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.pt")
        with Cluster(f"{TASKS}:Ranks", RANKS, environment=LAUNCH, parts=str(parts)) as many:
            many.call("start")
            fits = many.call("fit", first=0, last=STEPS)
            found = many.call("evaluate")[0]
            many.call("save", file=weights)
        with Cluster(f"{TASKS}:Alone", environment=LAUNCH, file=str(file.resolve())) as one:
            alone = one.call("mrr", weights=weights)[0]
    figures = [
        Figure("filtered MRR of the test triples", found["mrr"], at_least=FLOOR),
        Figure("difference from one process' MRR", abs(found["mrr"] - alone), at_most=APART),
    ]
    cpu = sum(fit["cpu"] for fit in fits) / STEPS
    row = [*found.values(), fits[0]["losses"][-1], cpu, fits[0]["wall"] / STEPS]
    columns = [*found, "last loss", "CPU s a step", "wall s a step"]
    return Report(figures, [Table(f"After {STEPS} steps", columns, [row])])
