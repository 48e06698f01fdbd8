"""Cuts one graph by one method and watches what that takes, its child processes included."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure


class Cutting:
    """A process that has a graph's edges mapped from files, and its loops compiled."""

    def __init__(self, folder: str) -> None:
        from sar.partition.arrays import ETYPE_HOMO, NTYPE_HOMO, GraphArrays
        from sar.partition.column import map_tensor

        found = {path.stem: map_tensor(path) for path in Path(folder).glob("*.npy")}
        columns = {name: found[name] for name in found if name == "train_mask"}
        self.graph = GraphArrays(
            "g",
            {NTYPE_HOMO: int(found["num_nodes"])},
            {ETYPE_HOMO: (found["src"], found["dst"])},
            {NTYPE_HOMO: columns},
        )

    def run(self, name: str, balance: list[str], num_parts: int) -> dict[str, float]:
        """What the cut took beyond that of a small graph, and how good it is; seconds and bytes."""
        from sar.partition.quality import measure as measure_cut

        arguments: dict[str, Any] = {"num_parts": num_parts, "method": name, "balance": balance}
        taken(small_graph(), arguments)  # loads compiled loops
        _, small_cpu, small_peak = taken(small_graph(), arguments)  # of METIS: importing DGL
        parts, cpu, peak = taken(self.graph, arguments)
        quality = measure_cut(self.graph, parts, num_parts)
        return {
            "cpu": cpu - small_cpu,
            "peak": peak - small_peak,
            "cut": quality.cut_share,
            "nodes": quality.node_balance,
            "edges": quality.edge_balance,
            "halo": quality.halo_balance,
            "rows": int(quality.halo.sum()),
        }


def taken(graph: Any, arguments: dict[str, Any]) -> tuple[np.ndarray, float, int]:
    """The parts, processor seconds, and the most anonymous memory, of this process and children."""
    from sar.partition.cut import assign

    measure.settle()
    begin = cpu_seconds()
    with measure.PeakOfAll() as watch:
        parts = assign(graph, **arguments)
    return parts, cpu_seconds() - begin, watch.peak


def small_graph() -> Any:
    """Of one type, with training nodes."""
    from sar.partition.sources.generate import community_graph

    return community_graph(400, 4000, features=1)


def cpu_seconds() -> float:
    """User and system, of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def save_edges(graph: Any, folder: Path) -> None:
    """What :class:`Cutting` maps; whole or not at all."""
    ((src, dst),) = graph.edges.values()
    (data,) = graph.node_data.values()
    arrays = {"src": src, "dst": dst}
    if "train_mask" in data:
        arrays["train_mask"] = data["train_mask"].bool()
    unfinished = folder.with_name(folder.name + ".partial")
    unfinished.mkdir(parents=True, exist_ok=True)
    np.save(unfinished / "num_nodes.npy", graph.total_nodes)
    for name, column in arrays.items():
        np.save(unfinished / f"{name}.npy", column.numpy())
    unfinished.rename(folder)
