"""Anonymous memory while a rank loads its partition."""

from __future__ import annotations

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

MB = 1e6
LIMIT = 2.5
CUTS = (("metis", 4), ("random", 8))


@benchmark("loading", "core")
def loading(options: Options) -> Report:
    """Anonymous memory while loading one partition, over the bytes of the structure that stays."""
    graph = graphs.rmat(options, CUTS)
    columns = ["partition", "peak MB", "stays MB", "structure MB", "peak / structure"]
    table = Table("Above the imported process; features stay in their files", columns)
    report = Report(tables=[table])
    for method, num in CUTS:
        with Cluster(
            "benchmarks.tasks.loading:Loading",
            environment=LAUNCH,
            parts=str(graph.parts[method, num]),
        ) as cluster:
            used = cluster.call("run", part_id=0)[0]
        ratio = used["peak"] / used["structure"]
        sizes = [used[name] / MB for name in ("peak", "stays", "structure")]
        table.rows.append([f"0 of {num}, {method}", *sizes, ratio])
        report.figures.append(Figure(f"loading, {method} cut in {num}", ratio, at_most=LIMIT))
    return report
