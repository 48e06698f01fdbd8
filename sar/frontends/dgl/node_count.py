"""A number of nodes that is this rank's as a size and the whole graph's as a divisor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar._private import tree_leaves, tree_map
from sar.tracing.support import not_supported


def _named(*names: str) -> set[Callable]:
    """The functions of torch and the methods of its tensors that have these names."""
    found = {getattr(place, name, None) for name in names for place in (torch, Tensor)}
    return {one for one in found if one is not None}


# Functions that divide by their first and by their second argument.
_BY_FIRST = _named("__rtruediv__", "__rdiv__", "reciprocal")
_BY_SECOND = _named(
    "div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__", "__idiv__", "divide_"
)
# Functions whose result counts the same nodes, or as many times more: both numbers go through them.
_BOTH = _named(
    "__getitem__", "unbind", "view", "reshape", "squeeze", "unsqueeze", "flatten", "expand",
    "to", "type", "float", "double", "long", "int", "half", "cpu", "cuda", "detach", "clone",
    "contiguous", "requires_grad_", "sum", "cumsum", "neg", "__neg__",
    "add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "mul", "__mul__", "__rmul__",
)  # fmt: skip
# Functions that see this rank's number: it is a size there, or is looked at.
_HERE = _named(
    "__int__", "__index__", "__len__", "__repr__", "__format__", "__hash__", "__bool__",
    "tolist", "numel", "dim", "size", "stride", "is_floating_point", "type_as", "element_size",
    "eq", "ne", "lt", "le", "gt", "ge", "equal", "__eq__", "__ne__", "__lt__", "__le__", "__gt__",
    "__ge__", "repeat_interleave", "zeros_like", "ones_like", "empty_like", "full_like",
    "ones", "zeros", "empty", "full", "rand", "randn", "arange", "eye", "new_zeros", "new_ones",
    "new_empty", "new_full", "new_tensor", "split", "tensor_split", "__deepcopy__", "__reduce_ex__",
    "data_ptr", "is_contiguous", "as_subclass",
)  # fmt: skip


class NodeCount(Tensor):
    """int64 counts of owned rows, for layers that both allocate and divide by ``batch_num_nodes``.

    Creating rows, indexing or comparing sees this rank's count, and so do ``int(count)`` and
    ``count.tolist()``. ``x / count`` divides by the count of all ranks, so that a mean over nodes
    is that of the whole graph. Sums, differences and multiples of counts are counts again. Whatever
    else is done with one raises ``NotSupportedError``: which number is meant is not known.

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
        if "other" in kwargs and len(args) == 1:
            args = (*args, kwargs.pop("other"))
        divisor = 0 if func in _BY_FIRST else 1 if func in _BY_SECOND else None
        if divisor is not None and isinstance(args[divisor], NodeCount):
            if not isinstance(args[1 - divisor] if len(args) > 1 else None, NodeCount):
                count = _everywhere(args[divisor])
                args = (*args[:divisor], count, *args[divisor + 1 :])
                return func(*args, **kwargs)
        elif func in _HERE or getattr(func, "__name__", "") == "__get__":
            return func(*tree_map(_here, args), **tree_map(_here, kwargs))
        if func not in _BOTH and divisor is None or _has_rows(args, kwargs):
            raise not_supported(
                f"{getattr(func, '__name__', func)} of a number of nodes: whether this rank's or "
                "the whole graph's is meant is not known; expected x / count, int(count) for rows "
                "of this rank, or graph.num_nodes_global()"
            )
        here = func(*tree_map(_here, args), **tree_map(_here, kwargs))
        counts = [one for one in tree_leaves((args, kwargs)) if isinstance(one, NodeCount)]
        if any(one.everywhere is None for one in counts):
            return tree_map(lambda value: NodeCount.of(value, None), here)
        everywhere = func(*tree_map(_there, args), **tree_map(_there, kwargs))
        return tree_map(NodeCount.of, here, everywhere)


def _has_rows(args: Any, kwargs: Any) -> bool:
    """Whether a tensor of something else than numbers of nodes takes part."""
    others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    return any(not isinstance(one, NodeCount) and one.is_floating_point() for one in others)


def _here(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, NodeCount) else value


def _there(value: Any) -> Any:
    return _everywhere(value) if isinstance(value, NodeCount) else value


def _everywhere(count: NodeCount) -> Tensor:
    if count.everywhere is None:
        raise not_supported("the number of a block's nodes on all ranks is not known to divide by")
    return count.everywhere
