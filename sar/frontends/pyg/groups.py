"""Which graph each node is of, where rows of all ranks make up the graphs: ``data.batch``.

What is summed by it is one row a graph, the same on all ranks: Note [Replicated results] in
:mod:`sar.ops.readout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sar._private import make_wrapper
from sar.comm import Group, current_group
from sar.errors import NotSupportedError
from sar.frontends.pyg.functions import on_copy
from sar.frontends.pyg.functions import take as take_rows
from sar.frontends.pyg.index import EdgeEnd, Symbol
from sar.frontends.pyg.looks import LOOKS, named
from sar.ops.readout import sum_over_ranks
from sar.tracing.lazy import EdgeTensor
from sar.tracing.nodes import NumEdges


class NodeGroups(Symbol):
    """int64 [n]: the graph of each of this rank's rows, among graphs that all ranks share.

    Rows can be summed (``scatter``, poolings, aggregations), a softmax taken over them, and rows of
    graphs taken by it (``x[batch]``), all over the rows of all ranks; all else raises.

    Attributes:
        ids: int64 [n].
        group: the ranks that have the other rows.
        counts: int64 [num_graphs] rows of all ranks.
        is_whole: it stands for all rows of the graph, where one process has no ``batch``.
        of_edges: rows are those of edges; what is taken for them is one row, which broadcasts.
    """

    handlers: dict[Callable, Callable] = {}
    hint = "expected rows to be pooled by it (global_mean_pool(x, batch), scatter(x, batch))"
    ids: Tensor
    group: Group
    counts: Tensor
    is_whole: bool
    of_edges: bool

    @staticmethod
    def __new__(cls, ids: Tensor, group: Group, num_groups: int | None = None) -> NodeGroups:
        """Collective.

        Raises ``ValueError`` on every rank where ids are no integers [n], 0 or more and, if it is
        given, below ``num_groups``.
        """
        with group.agreed("batch"):
            _check(ids, num_groups)
        ids = ids.long()
        if num_groups is None:
            largest = ids.max() if len(ids) else ids.new_tensor(-1)
            num_groups = int(group.all_reduce(largest.clone(), "max")) + 1
        counts = group.all_reduce(torch.bincount(ids, minlength=num_groups))
        return cls._made(ids, group, counts, False)

    @classmethod
    def whole(cls, x: Tensor, group: Group | None = None) -> NodeGroups:
        """All rows of ``x`` are of one graph; collective, but for rows of edges."""
        if isinstance(x, EdgeTensor):
            relation = x.scope.relation
            count = torch.tensor([relation.num_edges_global], device=x.device)
            made = cls.of_one(relation.num_edges, count, relation.group)
            made.of_edges = True
            return made
        group = group or current_group()
        count = group.all_reduce(torch.tensor([len(x)], device=x.device))
        return cls.of_one(len(x), count, group)

    @classmethod
    def of_one(cls, here: int, count: Tensor, group: Group) -> NodeGroups:
        """``here`` rows of one graph, which has int64 [1] ``count`` on all ranks."""
        ids = count.new_zeros(1).expand(here)
        return cls._made(ids, group, count, True)

    @classmethod
    def _made(cls, ids: Tensor, group: Group, counts: Tensor, is_whole: bool) -> NodeGroups:
        made = make_wrapper(cls, [len(ids)], dtype=torch.int64, device=ids.device)
        made.ids, made.group, made.counts = ids, group, counts
        made.is_whole, made.of_edges = is_whole, False
        return made

    @property
    def num_groups(self) -> int:
        return len(self.counts)

    def looks(self) -> list[int]:
        return [len(self.ids)]


def _check(ids: Tensor, num_groups: int | None) -> None:
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"batch: got {ids.dtype} {list(ids.shape)}, expected int64 [num_nodes]")
    if len(ids) and (int(ids.min()) < 0 or (num_groups or 1 + int(ids.max())) <= int(ids.max())):
        below = "" if num_groups is None else f" and below {num_groups}"
        raise ValueError(
            f"batch: got numbers from {int(ids.min())} to {int(ids.max())}, expected 0 or "
            f"more{below}"
        )


# -- rows of graphs from rows of nodes -----------------------------------------------------------


def reduce_rows(
    groups: NodeGroups, x: Tensor, dim: int = 0, op: str = "sum", num_groups: Any = None
) -> Tensor:
    """Sum, mean, max or min [.., num_graphs, ..] of the rows of each graph; collective.

    A graph without rows has 0. The gradient of an extreme is shared among all rows that have it.
    """
    total = groups.num_groups if num_groups is None else int(num_groups)
    dim = dim % x.dim()
    if total < groups.num_groups:
        raise ValueError(f"dim_size: got {total}, expected at least {groups.num_groups} graphs")
    if groups.of_edges and isinstance(x, EdgeTensor):
        reduce = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[op]
        return getattr(x, reduce)(dim, keepdim=True)
    if isinstance(x, EdgeTensor) or x.shape[dim] != len(groups.ids):
        raise ValueError(
            f"rows: got {tuple(x.shape)} along dimension {dim}, expected {len(groups.ids)}, one "
            "for each number in batch"
        )
    rows = x.movedim(dim, 0)
    found = _sums(groups, rows, total) if op in ("sum", "mean") else _extremes(
        groups, rows, total, op == "max"
    )  # fmt: skip
    if op == "mean":
        counts = _padded(groups.counts, total).clamp(min=1)
        found = found / counts.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
    return found.movedim(0, dim)


def _sums(groups: NodeGroups, rows: Tensor, total: int) -> Tensor:
    if groups.num_groups == total == 1:
        return sum_over_ranks(rows, groups.group).unsqueeze(0)
    own = rows.new_zeros(total, *rows.shape[1:]).index_add(0, groups.ids, rows)
    return sum_over_ranks(own.unsqueeze(0), groups.group)


def _extremes(groups: NodeGroups, rows: Tensor, total: int, largest: bool) -> Tensor:
    """The gradient goes through a sum, whose value is 0, of what rows with the extreme differ by
    from themselves: so all of them share it, on whatever rank."""
    with torch.no_grad():
        limits = torch.finfo if rows.is_floating_point() else torch.iinfo
        bound = limits(rows.dtype).min if largest else limits(rows.dtype).max
        ids = groups.ids.view(-1, *[1] * (rows.dim() - 1)).expand(rows.shape)
        own = rows.new_full((total, *rows.shape[1:]), bound)
        own.scatter_reduce_(0, ids, rows, "amax" if largest else "amin", include_self=False)
        wide = own.double() if rows.is_floating_point() else own.long()
        found = groups.group.all_reduce(wide, "max" if largest else "min").to(rows.dtype)
        empty = (_padded(groups.counts, total) == 0).view(-1, *[1] * (rows.dim() - 1))
        found = found.masked_fill(empty, 0)
    if not _asks(groups.group, rows):
        return found
    hits = rows.detach() == found.index_select(0, groups.ids)
    ties = _sums(groups, hits.to(rows.dtype), total).clamp(min=1)
    share = torch.where(hits, (rows - rows.detach()) / ties.index_select(0, groups.ids), 0)
    return found + _sums(groups, share, total)


def _asks(group: Group, rows: Tensor) -> bool:
    """Whether rows ask for a gradient, which depends on no rank's data."""
    return torch.is_grad_enabled() and rows.requires_grad


def _padded(counts: Tensor, total: int) -> Tensor:
    return torch.nn.functional.pad(counts, (0, total - len(counts)))


def softmax(groups: NodeGroups, x: Tensor, dim: int = 0) -> Tensor:
    """Softmax over the rows of each graph, on all ranks; the shape of ``x``. Collective."""
    largest = take(reduce_rows(groups, x.detach(), dim, "max"), dim, groups)
    out = (x - largest).exp()
    return out / (take(reduce_rows(groups, out, dim, "sum"), dim, groups) + 1e-16)


def take(x: Tensor, dim: int, index: NodeGroups) -> Tensor:
    """The row along ``dim`` of each node's graph, of rows of graphs that all ranks have."""
    if x.shape[dim] < index.num_groups:
        raise ValueError(
            f"index_select: got rows {tuple(x.shape)} along dimension {dim}, expected "
            f"{index.num_groups}, one for each graph"
        )
    if index.of_edges:
        return x
    if index.num_groups == 1 and x.shape[dim] == 1:
        sizes = list(x.shape)
        sizes[dim] = len(index.ids)
        return x.expand(sizes)  # no copy for each row
    return x.index_select(dim, index.ids)


# -- torch's functions ---------------------------------------------------------------------------


def _getitem(x: Any, item: Any) -> Any:
    if isinstance(item, NodeGroups) and not isinstance(x, Symbol):
        return take(x, 0, item)
    if isinstance(x, NodeGroups) and isinstance(item, EdgeEnd):
        return take_rows(x.ids.contiguous(), 0, item)
    if isinstance(x, NodeGroups) and isinstance(item, Tensor) and not isinstance(item, Symbol):
        return NodeGroups(x.ids[item], x.group)
    raise NotSupportedError(
        f"indexing of a {type(x).__name__} by a {type(item).__name__}: {NodeGroups.hint}"
    )


def _setitem(x: Any, item: Any, value: Any) -> None:
    raise NotSupportedError(f"writing rows at a {type(item).__name__}: {NodeGroups.hint}")


def _scatter_add_(x: Tensor, dim: int, index: NodeGroups, src: Tensor) -> Tensor:
    if src.dim() != 1:
        raise NotSupportedError(f"scatter_add of rows {tuple(src.shape)}: {NodeGroups.hint}")
    return x.add_(reduce_rows(index, src, dim, "sum", x.shape[dim]))


def _index_add_(x: Tensor, dim: int, index: NodeGroups, source: Tensor, *, alpha: Any = 1) -> Any:
    return x.add_(reduce_rows(index, source, dim, "sum", x.shape[dim]), alpha=alpha)


def _bincount(groups: NodeGroups, weights: Any = None, minlength: int = 0) -> Tensor:
    total = max(groups.num_groups, minlength)
    if weights is not None:
        return reduce_rows(groups, weights, 0, "sum", total)
    return _padded(groups.counts, total)


def _numel(groups: NodeGroups) -> int:
    """This rank's, which compares with 0 as that of all ranks does."""
    count = NumEdges(len(groups.ids))
    count.everywhere = int(groups.counts.sum())
    return count


def _unique(groups: NodeGroups, *args: Any, **kwargs: Any) -> Tensor:
    if args or any(value for key, value in kwargs.items() if key != "sorted"):
        raise NotSupportedError("unique of a NodeGroups with more than the graphs' numbers")
    return groups.counts.nonzero().view(-1)


def _compared(name: str) -> Callable:
    def compare(x: Any, y: Any) -> Tensor:
        sides = [one.ids if isinstance(one, NodeGroups) else one for one in (x, y)]
        return getattr(torch, name)(*sides)

    return compare


_KNOWN: dict[Callable, Callable] = {
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    **dict.fromkeys(named("index_select"), take),
    **dict.fromkeys(named("scatter_add_"), _scatter_add_),
    **dict.fromkeys(named("scatter_add"), on_copy(_scatter_add_)),
    **dict.fromkeys(named("index_add_"), _index_add_),
    **dict.fromkeys(named("index_add"), on_copy(_index_add_)),
    **dict.fromkeys(named("bincount"), _bincount),
    **dict.fromkeys(named("numel", "nelement"), _numel),
    **dict.fromkeys(named("unique"), _unique),
    **dict.fromkeys(named("max"), lambda groups: torch.tensor(groups.num_groups - 1)),
    **dict.fromkeys(named("min"), lambda groups: groups.counts.nonzero()[0, 0]),
    **dict.fromkeys([*named("eq"), Tensor.__eq__], _compared("eq")),
    **dict.fromkeys([*named("ne"), Tensor.__ne__], _compared("ne")),
}
NodeGroups.handlers = LOOKS | _KNOWN


# -- PyG's functions -----------------------------------------------------------------------------

_OPS = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min"}


def _scatter(
    src: Tensor, index: NodeGroups, dim: int = 0, dim_size: Any = None, reduce: str = "sum"
) -> Tensor:
    if reduce not in _OPS:
        raise NotSupportedError(
            f"scatter by batch: got reduce={reduce!r}, expected one of {', '.join(_OPS)}"
        )
    return reduce_rows(index, src, dim, _OPS[reduce], dim_size)


def _softmax(
    src: Tensor, index: NodeGroups, ptr: Any = None, num_nodes: Any = None, dim: int = 0
) -> Tensor:
    return softmax(index, src, dim)


def refused(name: str, reason: str) -> Callable:
    """What stands in for a function that no rank can compute."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotSupportedError(f"{name}: {reason}")

    return refuse


_DENSE = "it takes all nodes of a graph at once, which are on several ranks"
_ALL_AT_ONCE = (
    "EquilibriumAggregation", "GRUAggregation", "GraphMultisetTransformer", "LCMAggregation",
    "LSTMAggregation", "MedianAggregation", "MulAggregation", "PatchTransformerAggregation",
    "QuantileAggregation", "SetTransformerAggregation", "SortAggregation",
)  # fmt: skip
_CHOICE = "it compares the nodes of all ranks and makes a graph of some of them"

# By module and name: which argument is one of ours, and what stands in then.
REPLACED: dict[tuple[str, str], tuple[int, str, Callable]] = {
    ("torch_geometric.utils._scatter", "scatter"): (1, "index", _scatter),
    ("torch_geometric.utils._softmax", "softmax"): (1, "index", _softmax),
    ("torch_geometric.utils._to_dense_batch", "to_dense_batch"): (
        1, "batch", refused("to_dense_batch", _DENSE),
    ),
    ("torch_geometric.utils._unbatch", "unbatch"): (1, "batch", refused("unbatch", _DENSE)),
    ("torch_geometric.nn.pool.select.topk", "topk"): (2, "batch", refused("topk", _CHOICE)),
    **{
        ("torch_geometric.nn.aggr", f"{name}.forward"): (2, "index", refused(name, _DENSE))
        for name in _ALL_AT_ONCE
    },
}  # fmt: skip
