"""Who is measured: DGL or PyG in one process, the ranks of this library, those of IntelLabs SAR."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cluster import LAUNCH, ONE_THREAD, Cluster
from benchmarks.graphs import Cut, Prepared

TASKS, PYG_TASKS = "benchmarks.tasks.training", "benchmarks.tasks.pyg"
DGL, ORIGINAL, STRICT, ONE_SHOT = "DGL", "IntelLabs SAR", "sar, strict", "sar, one-shot"
Environment = dict[str, str]
Start = Callable[..., Cluster]


def dgl(graph: Prepared, kind: str = "sage", environment: Environment = ONE_THREAD) -> Start:
    """The whole graph in one process; by default started as DGL's own documents do."""
    given = {"file": str(graph.file), "kind": kind}
    return partial(Cluster, f"{TASKS}:Dgl", environment=environment, **given)


def pyg(graph: Prepared, kind: str, edges: str, environment: Environment = ONE_THREAD) -> Start:
    """The whole graph in one process of PyG, as one of its kinds of edges."""
    given = {"file": str(graph.file), "kind": kind, "edges": edges}
    return partial(Cluster, f"{PYG_TASKS}:Pyg", environment=environment, **given)


def ours(
    graph: Prepared,
    cut: Cut,
    kind: str = "sage",
    environment: Environment = LAUNCH,
    *,
    task: str = f"{TASKS}:Sar",
    rounds: int | None = None,
    **given: Any,
) -> Start:
    """A rank for each part, one thread each; in strict rounds where nobody says how many."""
    given |= {"parts": str(graph.parts[cut]), "kind": kind, "rounds": rounds}
    return partial(Cluster, task, cut[1], environment=environment, **given)


def original(
    graph: Prepared,
    cut: Cut,
    checkout: Path | None,
    kind: str = "sage",
    environment: Environment = LAUNCH,
    **given: Any,
) -> Start:
    """The same of a checkout of IntelLabs SAR."""
    given |= {"parts": str(graph.parts[cut]), "kind": kind, "checkout": str(checkout)}
    task = f"{TASKS}:Original"
    return partial(Cluster, task, cut[1], environment=environment, first=checkout, **given)
