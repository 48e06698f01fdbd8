"""The original's graph classes, and what its scripts prepare: little that is left to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from sar.frontends.dgl import ShardedGraph
from sar.frontends.dgl.legacy import ONE_SHOT

Message = TypeVar("Message", bound=Callable[..., Any])

GraphShardManager = HeteroGraphShardManager = ShardedGraph


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


def patch_dgl() -> None:
    """Do nothing: DGL's layers run on sharded graphs as they are, or say that they do not."""


def message_has_parameters(
    param_foo: Callable[[Any], tuple[Tensor, ...]],
) -> Callable[[Message], Message]:
    """Leave a message function as it is: the parameters it uses are found when it runs.

    ``param_foo``, which names them for the original library, is never called.
    """
    if not callable(param_foo):
        raise TypeError(f"param_foo: got {type(param_foo).__name__}, expected a function")
    return lambda message: message
