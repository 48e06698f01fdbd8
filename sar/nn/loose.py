"""Parameters of models that nobody named: found behind a loss, or behind the rows of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sar.comm import Group
from sar.nn.drift import compare_loose
from sar.nn.replicas import ShardedParameter
from sar.nn.steps import CHECK_EVERY, steps_of
from sar.ops.capture import leaves_of

# Calls of each kind after which it is looked: odd and even ones, as there may be two in a step.
_LOSSES, _ROWS = {2, 3, 5, 8, 13, 21, 34}, {5, 8, 13, 21, 34}


def look_behind_loss(values: Any, group: Group) -> None:
    """What the values of a loss over all ranks depend on; collective now and then where no
    gradients are summed, else left for the next comparison in :func:`sar.gather_grads`."""
    if _is_looked_at("loss", _LOSSES, group):
        steps = steps_of(group)
        steps.loose = [ref(param) for param in _behind([values], group)]
        if not steps.summed:
            compare_loose(group)


def look_behind_rows(rows: Callable[[], Iterable[Any]], group: Group) -> None:
    """The same of rows that a graph gets, where there is no loss over all ranks either."""
    if _is_looked_at("rows", _ROWS, group):
        steps = steps_of(group)
        if not (steps.summed or steps.numbers["loss"]):
            steps.loose = [ref(param) for param in _behind(rows(), group)]
            compare_loose(group)


def _is_looked_at(what: str, due: set[int], group: Group) -> bool:
    """Counts on all ranks alike: whether values ask for a gradient may differ."""
    if group.size == 1 or not torch.is_grad_enabled():
        return False
    numbers = steps_of(group).numbers
    numbers[what] += 1
    return numbers[what] in due or numbers[what] % (CHECK_EVERY - 1) == 0


def _behind(tensors: Iterable[Any], group: Group) -> list[nn.Parameter]:
    """The parameters that all ranks should hold alike: none with a row per node or edge."""
    own = {count for graph in list(group.graphs) for count in graph.row_counts}
    asking = [t for t in tensors if type(t) is Tensor and t.grad_fn is not None]
    found = {id(leaf): leaf for leaf in leaves_of(asking) if isinstance(leaf, nn.Parameter)}
    return [
        param
        for param in found.values()
        if not isinstance(param, ShardedParameter)
        and not is_lazy(param)
        and not (param.dim() and param.shape[0] in own)
    ]
