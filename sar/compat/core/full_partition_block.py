"""The original's one-shot graph: here a policy of the same graph, not another class."""

from __future__ import annotations

from typing import Any

from sar.frontends.dgl import ShardedGraph
from sar.frontends.dgl.legacy import ONE_SHOT


class _OneShot(type):
    def __instancecheck__(cls, graph: Any) -> bool:
        return isinstance(graph, ShardedGraph) and graph.policy == ONE_SHOT


class DistributedBlock(metaclass=_OneShot):
    """What ``isinstance`` calls a graph that fetches its whole halo at once and keeps it.

    ``graph.get_full_partition_graph()`` gives one, as does
    ``graph.with_policy(Policy(rounds=1, rematerialize=False))``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("DistributedBlock: make one with graph.get_full_partition_graph()")
