"""A number of nodes that is this rank's as a size and the whole graph's as a divisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sar.graph.support import not_supported

# Functions that divide by their first and by their second argument.
_BY_FIRST = {Tensor.__rtruediv__, Tensor.__rdiv__, Tensor.reciprocal, torch.reciprocal}
_BY_SECOND = {
    Tensor.div, Tensor.__truediv__, Tensor.true_divide, Tensor.divide, Tensor.div_,
    Tensor.__itruediv__, Tensor.__idiv__, torch.div, torch.true_divide, torch.divide,
}  # fmt: skip
# Functions whose result counts the same nodes: both numbers go through them.
_VIEWS = {
    Tensor.__getitem__, Tensor.unbind, torch.unbind, Tensor.view, Tensor.reshape, Tensor.squeeze,
    Tensor.unsqueeze, Tensor.to, Tensor.float, Tensor.double, Tensor.long, Tensor.int,
}  # fmt: skip


class NodeCount(Tensor):
    """int64 counts of owned rows, for layers that both allocate and divide by ``batch_num_nodes``.

    Creating rows, indexing or comparing sees this rank's count; ``x / count`` divides by the
    count of all ranks, so that a mean over nodes is that of the whole graph.

    Attributes:
        everywhere: the counts of the whole graph; ``None`` on a block, where dividing raises.
    """

    everywhere: Tensor | None

    @staticmethod
    def of(here: Tensor, everywhere: Tensor | None) -> NodeCount:
        """The pair as one tensor."""
        made = here.as_subclass(NodeCount)
        made.everywhere = everywhere
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _BY_SECOND and "other" in kwargs:
            args = (args[0], kwargs.pop("other"))
        divisor = 0 if func in _BY_FIRST else 1 if func in _BY_SECOND else None
        if divisor is not None and isinstance(args[divisor], NodeCount):
            count = _everywhere(args[divisor])
            args = (*args[:divisor], count, *args[divisor + 1 :])
        here = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if func not in _VIEWS or not isinstance(args[0], NodeCount):
            return here
        if args[0].everywhere is None:
            return tree_map(lambda value: NodeCount.of(value, None), here)
        everywhere = func(args[0].everywhere, *args[1:], **kwargs)
        return tree_map(NodeCount.of, here, everywhere)


def _here(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, NodeCount) else value


def _everywhere(count: NodeCount) -> Tensor:
    if count.everywhere is None:
        raise not_supported("the number of a block's nodes on all ranks is not known to divide by")
    return count.everywhere
