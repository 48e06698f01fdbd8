"""Single layers of DGL beside DGL, on one rank: what is slower here shows where to look."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from torch import Tensor, manual_seed, nn

from benchmarks import graphs, measure
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

SCALE = 15
WIDTH = 64
_ANY: dict[str, Any] = {"allow_zero_in_degree": True}
LAYERS: dict[str, Callable[[Any], nn.Module]] = {  # of dgl.nn, which takes long to import
    "GraphConv": lambda layers: layers.GraphConv(WIDTH, WIDTH, **_ANY),
    "SAGEConv, mean": lambda layers: layers.SAGEConv(WIDTH, WIDTH, "mean"),
    "SAGEConv, pool": lambda layers: layers.SAGEConv(WIDTH, WIDTH, "pool"),
    "GINConv, sum": lambda layers: layers.GINConv(nn.Linear(WIDTH, WIDTH), "sum"),
    "GINConv, max": lambda layers: layers.GINConv(nn.Linear(WIDTH, WIDTH), "max"),
    "TAGConv, 2 hops": lambda layers: layers.TAGConv(WIDTH, WIDTH, 2),
    "APPNPConv, 3 hops": lambda layers: layers.APPNPConv(3, 0.1),
    "GATConv": lambda layers: layers.GATConv(WIDTH, WIDTH // 4, 4, **_ANY),
    "GATv2Conv": lambda layers: layers.GATv2Conv(WIDTH, WIDTH // 4, 4, **_ANY),
    "DotGatConv": lambda layers: layers.DotGatConv(WIDTH, WIDTH // 4, 4, **_ANY),
    "AGNNConv": lambda layers: layers.AGNNConv(**_ANY),
    "EdgeConv": lambda layers: layers.EdgeConv(WIDTH, WIDTH, **_ANY),
    "EdgeConv, batch norm": lambda layers: layers.EdgeConv(WIDTH, WIDTH, batch_norm=True, **_ANY),
}


@benchmark("layers", "core")
def layers(options: Options) -> Report:
    """Both passes of single layers of DGL, 64 wide, beside DGL; one rank and thread, R-MAT."""
    prepared = graphs.rmat(options, [("random", 1)], SCALE)
    columns = ["layer", "DGL, CPU s", "sar, CPU s", "sar / DGL"]
    report = Report(tables=[Table(f"Medians of {options.repeats} turns", columns)])
    parts = str(prepared.parts["random", 1])
    with (
        Cluster(
            "benchmarks.cases.layers:Dgl", environment=ONE_THREAD, file=str(prepared.file)
        ) as dgl,
        Cluster("benchmarks.cases.layers:Sar", environment=LAUNCH, parts=parts) as mine,
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


class _Timed:
    """Times layers on ``graph``."""

    graph: Any
    features: Tensor

    def seconds(self, name: str) -> float:
        """Processor seconds of both passes, the second time."""
        manual_seed(0)
        layer = self.make(name)
        self.run(layer)
        watch = measure.Stopwatch()
        self.run(layer)
        return watch.read().cpu

    def make(self, name: str) -> nn.Module:
        import dgl.nn

        return LAYERS[name](dgl.nn)

    def run(self, layer: nn.Module) -> None:
        x = self.features.clone().requires_grad_()
        layer(self.graph, x).sum().backward()


class Dgl(_Timed):
    """DGL alone."""

    def __init__(self, file: str) -> None:
        import dgl

        data = graphs.read_graph(file)
        self.graph = dgl.graph((data["src"], data["dst"]), num_nodes=len(data["feat"]))
        self.graph.create_formats_()
        self.features = data["feat"][:, :WIDTH].contiguous()


class Sar(_Timed):
    """This library, the whole graph in one part."""

    def __init__(self, parts: str) -> None:
        import sar

        self.sar = sar
        data = sar.load_dgl_partition_data(parts, 0, "cpu")
        self.graph = sar.construct_full_graph(data)
        self.features = data.node_features["_N/feat"][:, :WIDTH].contiguous()

    def make(self, name: str) -> nn.Module:
        return self.sar.nn.convert_batch_norm(super().make(name))
