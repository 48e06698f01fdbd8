"""Who is measured: DGL in one process, the ranks of this library, IntelLabs SAR where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import graphs
from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.hosts import Hosts
from benchmarks.registry import Options


@dataclass(frozen=True)
class Request:
    """What `sar bench` was asked.

    Attributes:
        scale: the graph has 2^scale nodes. cut: method of the partitions.
        ranks: numbers of ranks. epochs: measured epochs of each contender.
        rates: of the hosts' links, as tc takes them. sar_path: checkout of IntelLabs SAR or None.
    """

    scale: int
    cut: str
    model: str
    ranks: tuple[int, ...]
    epochs: int
    rates: tuple[str, ...]
    sar_path: Path | None
    cache: Path

    def graph(self) -> graphs.Prepared:
        """The generated graph with the cuts that are measured; kept in the cache."""
        cuts = [(self.cut, size) for size in self.ranks]
        return graphs.rmat(Options(cache=self.cache), cuts, self.scale)

    def dgl(self, graph: graphs.Prepared) -> Cluster:
        """The whole graph in one DGL process, started as DGL's own documents do."""
        return Cluster(
            f"{self._module}:Dgl", environment=ONE_THREAD, file=str(graph.file), **self._kind
        )

    def sar(
        self, graph: graphs.Prepared, size: int, rounds: int | None, hosts: Hosts | None = None
    ) -> Cluster:
        """Ranks of this library, one thread each."""
        parts = str(graph.parts[self.cut, size])
        return Cluster(
            f"{self._module}:Sar", size, environment=LAUNCH, hosts=hosts,
            parts=parts, rounds=rounds, **self._kind,
        )  # fmt: skip

    def original(self, graph: graphs.Prepared, size: int) -> Cluster:
        """Ranks of the checkout; its GraphSAGE, as its attention needs an older commit."""
        return Cluster(
            "benchmarks.tasks.sage:Original", size, environment=ONE_THREAD, first=self.sar_path,
            parts=str(graph.parts[self.cut, size]), checkout=str(self.sar_path),
        )  # fmt: skip

    @property
    def compares_original(self) -> bool:
        return self.sar_path is not None and self.model == "sage"

    @property
    def _module(self) -> str:
        return "benchmarks.tasks." + ("sage" if self.model == "sage" else "attention")

    @property
    def _kind(self) -> dict[str, Any]:
        return {} if self.model == "sage" else {"kind": self.model}
