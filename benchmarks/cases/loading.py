"""Anonymous memory while a rank loads its partition."""

from __future__ import annotations

from torch import Tensor

from benchmarks import graphs, measure
from benchmarks.cluster import LAUNCH, Cluster
from benchmarks.race import MB
from benchmarks.registry import Figure, Options, Report, Table, benchmark

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
            "benchmarks.cases.loading:Loading",
            environment=LAUNCH,
            parts=str(graph.parts[method, num]),
        ) as cluster:
            used = cluster.call("run", part_id=0)[0]
        ratio = used["peak"] / used["structure"]
        sizes = [used[name] / MB for name in ("peak", "stays", "structure")]
        table.rows.append([f"0 of {num}, {method}", *sizes, ratio])
        report.figures.append(Figure(f"loading, {method} cut in {num}", ratio, at_most=LIMIT))
    return report


class Loading:
    """A process that has imported the library and not loaded anything yet."""

    def __init__(self, parts: str) -> None:
        import sar  # noqa: F401  the memory is counted above the imported process
        from sar.partition.load import load_partition

        self.load, self.parts = load_partition, parts

    def run(self, part_id: int) -> dict[str, int]:
        """Bytes: the peak while loading, what stays, and the structure's tensors."""
        measure.settle()
        before = measure.anonymous_bytes()
        with measure.PeakMemory() as watch:
            data = self.load(self.parts, part_id)
        measure.settle()
        return {
            # not `best`: files are mapped and unmapped on the way
            "peak": watch.peak.sampled - before,
            "stays": measure.anonymous_bytes() - before,
            "structure": sum(
                value.nbytes
                for shard in data.edges.values()
                for value in vars(shard).values()
                if isinstance(value, Tensor)
            ),
        }
