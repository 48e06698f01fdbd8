"""A number of nodes: of this rank where it is a size, of the whole graph where it divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar._private import make_wrapper, tree_leaves, tree_map
from sar.errors import NotSupportedError


def _named(*names: str) -> set[Callable]:
    """The functions of torch and the methods of its tensors that have these names."""
    found = {getattr(place, name, None) for name in names for place in (torch, Tensor)}
    return {one for one in found if one is not None}


_DIVIDE_BY_FIRST = _named("__rtruediv__", "__rdiv__", "reciprocal")
_DIVIDE_BY_SECOND = _named(
    "div", "__truediv__", "true_divide", "divide", "div_", "__itruediv__", "__idiv__", "divide_"
)
# Functions of counts that give the same counts in another shape, dtype or place.
_SAME = _named(
    "__getitem__", "unbind", "view", "reshape", "squeeze", "unsqueeze", "flatten",
    "to", "float", "double", "long", "cpu", "cuda", "detach", "clone", "contiguous",
)  # fmt: skip
# Functions with the positions of the arguments that are sizes.
_SIZES: dict[Callable, slice] = {
    **dict.fromkeys((torch.ones, torch.zeros, torch.empty, torch.rand, torch.randn), slice(None)),
    **dict.fromkeys((Tensor.new_ones, Tensor.new_zeros, Tensor.new_empty), slice(1, None)),
    **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.expand), slice(1, None)),
    torch.full: slice(1),
    **dict.fromkeys(_named("new_full", "repeat_interleave"), slice(1, 2)),
}
_METADATA = _named(
    "dim", "ndimension", "size", "numel", "nelement", "stride", "__len__", "__hash__",
    "element_size", "is_floating_point", "is_complex", "is_contiguous",
)  # fmt: skip


class NodeCount(Tensor):
    """int64 counts of owned rows, for layers that both allocate and divide by ``batch_num_nodes``.

    As a size of a tensor (``torch.ones(count, 4)``, ``repeat_interleave``) it is this rank's count.
    ``x / count`` divides by the count of all ranks, so that a mean over nodes is that of the whole
    graph. Shape, dtype and device may change. Whatever else is done with one raises
    ``NotSupportedError``: which number is meant is not known. It has no values of its own, so no
    function of torch can read one past this class.

    Attributes:
        here, everywhere: counts of this rank, and of all ranks (``None`` on a block: no dividing).
        group: the ranks that hold the other rows.
    """

    here: Tensor
    everywhere: Tensor | None
    group: Any

    @staticmethod
    def of(here: Tensor, everywhere: Tensor | None, group: Any = None) -> NodeCount:
        made = make_wrapper(NodeCount, here.shape, dtype=here.dtype, device=here.device)
        made.here, made.everywhere, made.group = here, everywhere, group
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        everywhere = None if self.everywhere is None else self.everywhere.tolist()
        return f"{type(self).__name__}(here={self.here.tolist()}, everywhere={everywhere})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if "other" in kwargs and len(args) == 1:
            args = (*args, kwargs.pop("other"))
        if func in _METADATA or getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        at = {place for place, arg in enumerate(args) if _has_count(arg)}
        if _has_count(kwargs):
            raise _unknown(func)
        if func in _SAME and at == {0}:
            return _of_both(func, args, kwargs)
        if func in _DIVIDE_BY_FIRST and at == {0}:
            return func(_divisor(args[0]), *args[1:], **kwargs)
        if func in _DIVIDE_BY_SECOND and at == {1}:
            return func(args[0], _divisor(args[1]), **kwargs)
        if at <= set(range(len(args))[_SIZES.get(func, slice(0))]):
            return func(*tree_map(_here, args), **kwargs)
        raise _unknown(func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise _unknown(func)


def _has_count(tree: Any) -> bool:
    return any(isinstance(leaf, NodeCount) for leaf in tree_leaves(tree))


def _here(value: Any) -> Any:
    return value.here if isinstance(value, NodeCount) else value


def _of_both(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    count, *rest = args
    here = func(count.here, *rest, **kwargs)
    if count.everywhere is None:
        return tree_map(lambda one: NodeCount.of(one, None, count.group), here)
    everywhere = func(count.everywhere, *rest, **kwargs)
    return tree_map(lambda a, b: NodeCount.of(a, b, count.group), here, everywhere)


def _divisor(count: NodeCount) -> Tensor:
    if count.everywhere is None:
        raise NotSupportedError("the number of a block's nodes on all ranks is not known")
    return count.everywhere


def _unknown(func: Any) -> NotSupportedError:
    return NotSupportedError(
        f"{getattr(func, '__name__', func)} of a number of nodes: whether this rank's or the whole "
        "graph's is meant is not known; expected x / count, a size as in torch.ones(count, 1), or "
        "graph.num_nodes() for this rank's and graph.num_nodes_global() for the whole graph's"
    )
