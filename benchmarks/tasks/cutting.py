"""Cuts one graph by one method and watches what that takes, its child processes included."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.processes import anonymous_bytes, children, command_line

_INTERVAL = 0.005  # seconds between two readings


class Cutting:
    """A process that has a graph's edges mapped from files, and its loops compiled."""

    def __init__(self, rank: int, size: int, port: int, folder: str) -> None:
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
        begin = time.perf_counter()
        parts, cpu, peak = taken(self.graph, arguments)
        wall = time.perf_counter() - begin
        quality = measure_cut(self.graph, parts, num_parts)
        return {
            "cpu": cpu - small_cpu,
            "wall": wall,
            "peak": peak - small_peak,
            "largest": peak,
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
    with PeakOfAll() as watch:
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


class PeakOfAll:
    """Context manager: the largest anonymous memory of this process and its children together."""

    peak = 0

    def __enter__(self) -> PeakOfAll:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            own = command_line(os.getpid())  # a child that still is a copy of it holds no more
            below = [pid for pid in children(os.getpid()) if command_line(pid) != own]
            self.peak = max(self.peak, sum(map(anonymous_bytes, [os.getpid(), *below])))
            if self._stop.wait(_INTERVAL):
                return


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
