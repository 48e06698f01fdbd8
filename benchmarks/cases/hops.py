"""Through how many rooms of the package a layer passes: files and calls of a warm pass."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import manual_seed, nn

from benchmarks import graphs
from benchmarks.cluster import APART, Cluster
from benchmarks.registry import Figure, Options, Report, Table, benchmark

CUT, WIDTH = ("random", 2), 8
_ANY: dict[str, Any] = {"allow_zero_in_degree": True}
LAYERS: dict[str, Callable[[Any], nn.Module]] = {  # of dgl.nn or torch_geometric.nn
    "DGL SAGEConv": lambda layers: layers.SAGEConv(WIDTH, WIDTH, "mean"),
    "DGL GraphConv": lambda layers: layers.GraphConv(WIDTH, WIDTH, **_ANY),
    "DGL GINConv": lambda layers: layers.GINConv(nn.Linear(WIDTH, WIDTH), "sum"),
    "DGL GATConv": lambda layers: layers.GATConv(WIDTH, 4, 2, **_ANY),
    "DGL GATv2Conv": lambda layers: layers.GATv2Conv(WIDTH, 4, 2, **_ANY),
    "PyG SAGEConv": lambda layers: layers.SAGEConv(WIDTH, WIDTH),
    "PyG GCNConv": lambda layers: layers.GCNConv(WIDTH, WIDTH),
    "PyG GINConv": lambda layers: layers.GINConv(nn.Linear(WIDTH, WIDTH)),
    "PyG GATConv": lambda layers: layers.GATConv(WIDTH, 4, 2),
    "PyG GATv2Conv": lambda layers: layers.GATv2Conv(WIDTH, 4, 2),
    "PyG TransformerConv": lambda layers: layers.TransformerConv(WIDTH, 4, 2),
}
LIMITS = {  # files and calls of a forward pass
    **dict.fromkeys(["PyG SAGEConv", "PyG GCNConv", "PyG GINConv"], (20, 130)),
    "PyG GATConv": (24, 230),
}


@benchmark("hops", "pyg")
def hops(options: Options) -> Report:
    """Files and calls of the package that a layer of DGL or PyG enters: third epoch, 2 ranks."""
    prepared = graphs.regular(options, [CUT], 200, 2000, WIDTH)
    columns = ["layer", "forward, files", "calls", "backward, files", "calls"]
    report = Report(tables=[Table("What rank 0 enters over gloo", columns)])
    parts = str(prepared.parts[CUT])
    with Cluster("benchmarks.cases.hops:Walk", 2, environment=APART, parts=parts) as ranks:
        for name in LAYERS:
            found = ranks.call("entered", name=name)[0]
            report.tables[0].rows.append([name, *found])
            for what, number, limit in zip(("files", "calls"), found, LIMITS.get(name, ())):
                report.figures.append(Figure(f"{name}: {what}", number, at_most=limit))
    return report


class Rooms(Counter):
    """Counts calls into files of the package while it is entered."""

    def __enter__(self) -> Rooms:
        import sar

        self._inside = str(Path(sar.__file__).parent) + "/"
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(self._inside):
            self[file] += 1


class Walk:
    """One rank of this library, which runs a layer behind a linear one."""

    def __init__(self, parts: str) -> None:
        import sar
        import sar.pyg

        group = sar.initialize_comms()
        data = sar.load_partition_data(parts, group.rank)
        self.graph = sar.construct_full_graph(data)
        self.edges = sar.pyg.construct_full_graph(data).edge_index

    def entered(self, name: str) -> list[int]:
        """Files and calls of the third forward and of the third backward pass."""
        manual_seed(0)
        is_dgl = name.startswith("DGL")
        library = import_module("dgl.nn" if is_dgl else "torch_geometric.nn")
        first, layer = nn.Linear(WIDTH, WIDTH), LAYERS[name](library)
        for _ in range(3):
            x = first(torch.ones(self.graph.num_nodes(), WIDTH))
            with Rooms() as forward:
                out = layer(self.graph, x) if is_dgl else layer(x, self.edges)
            loss = out.square().sum()
            with Rooms() as backward:
                loss.backward()
        return [number for one in (forward, backward) for number in (len(one), one.total())]
