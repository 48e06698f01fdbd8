"""Single layers of DGL beside DGL, on one rank: what is slower here shows where to look."""

from __future__ import annotations

from statistics import median

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark
from benchmarks.tasks.layers import LAYERS

SCALE = 15
TASKS = "benchmarks.tasks.layers"


@benchmark("layers", "core")
def layers(options: Options) -> Report:
    """Both passes of single layers of DGL, 64 wide, beside DGL; one rank and thread, R-MAT."""
    prepared = graphs.rmat(options, [("random", 1)], SCALE)
    columns = ["layer", "DGL, CPU s", "sar, CPU s", "sar / DGL"]
    report = Report(tables=[Table(f"Medians of {options.repeats} turns", columns)])
    parts = str(prepared.parts["random", 1])
    with (
        Cluster(f"{TASKS}:Dgl", environment=ONE_THREAD, file=str(prepared.file)) as dgl,
        Cluster(f"{TASKS}:Sar", environment=LAUNCH, parts=parts) as mine,
    ):
        for name in LAYERS:
            turns = [
                [one.call("seconds", name=name)[0] for one in (dgl, mine)]
                for _ in range(options.repeats)
            ]
            theirs, ours = (median(seconds) for seconds in zip(*turns))
            ratio = median(b / a for a, b in turns)
            report.tables[0].rows.append([name, theirs, ours, ratio])
            report.figures.append(Figure(f"{name}: seconds / DGL's", ratio))
    return report
