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

# Calls of each kind in which it is looked: odd and even ones, as there may be two in a step; and
# the first in which ranks are compared, when a step has been made. Later: every 49th.
_LOSSES, _FIRST_LOSS = {1, 2, 3, 5, 8, 13, 21, 34}, 2
_ROWS, _FIRST_ROWS = {1, 2, 3, 4, 5, 8, 13, 21, 34}, 5


def look_behind_loss(values: Any, group: Group) -> None:
    """What the values of a loss over all ranks depend on; collective now and then where no
    gradients are summed, else left for the next comparison in :func:`sar.gather_grads`."""
    number = _number("loss", group)
    if _is_due(number, _LOSSES):
        _look([values], number >= _FIRST_LOSS, group)


def look_behind_rows(rows: Callable[[], Iterable[Any]], group: Group) -> None:
    """The same of rows that a graph gets, where there is no loss over all ranks either."""
    number, steps = _number("rows", group), steps_of(group)
    if _is_due(number, _ROWS) and not (steps.summed or steps.numbers["loss"]):
        _look(rows(), number >= _FIRST_ROWS, group)


def _number(what: str, group: Group) -> int:
    """Of this call, or 0 where nothing is looked at; the same on all ranks, though values may ask
    for a gradient on some alone."""
    if group.size == 1 or not torch.is_grad_enabled():
        return 0
    numbers = steps_of(group).numbers
    numbers[what] += 1
    return numbers[what]


def _is_due(number: int, due: set[int]) -> bool:
    return number in due or (number > 0 and number % (CHECK_EVERY - 1) == 0)


def _look(tensors: Iterable[Any], is_compared: bool, group: Group) -> None:
    steps, found = steps_of(group), _behind(tensors, group)
    steps.loose = [ref(param) for param in found]
    is_trained = steps.see_written(found)
    if is_compared and not steps.summed:
        compare_loose(group, is_trained)


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
