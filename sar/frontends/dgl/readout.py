"""DGL's readouts over a sharded graph: one row for the rows of all ranks.

DGL's readout functions and global poolings end in segment operators that get
``graph.batch_num_nodes()`` instead of the graph; that is a :class:`NodeCount`, which leads here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.errors import NotSupportedError
from sar.frontends.dgl.counts import Counts
from sar.frontends.dgl.node_count import NodeCount
from sar.ops.aggregate import REDUCTIONS
from sar.ops.readout import extreme_over_ranks, sum_over_ranks, top_over_ranks
from sar.tracing.edge_reduce import reduce_edges
from sar.tracing.lazy import EdgeTensor


def segment_reduce(count: NodeCount, value: Tensor, reducer: str = "sum") -> Tensor:
    """[1, ...] sum, mean, max or min of the rows of all ranks, equal on every rank; collective.

    Without any row the result is 0. What is made of it counts once a rank:
    Note [Replicated results] in :mod:`sar.ops.readout`.
    """
    if isinstance(value, EdgeTensor):
        if reducer in REDUCTIONS:
            return reduce_edges(value, reducer, [0], keepdim=True)
    elif reducer in ("sum", "mean"):
        total = sum_over_ranks(value, count.group)
        if reducer == "mean":
            rows = count.group.all_reduce(torch.tensor(len(value)))
            total = total / max(1, int(rows))
        return total.unsqueeze(0)
    elif reducer in ("max", "min"):
        total = extreme_over_ranks(value, count.group, largest=reducer == "max")
        return total.masked_fill(total.isinf(), 0).unsqueeze(0)  # as DGL
    raise ValueError(f"reducer: got {reducer!r}, expected one of {', '.join(REDUCTIONS)}")


def segment_softmax(count: NodeCount, value: Tensor) -> Tensor:
    """Softmax over the rows of all ranks, [num_rows, ...]; collective."""
    with torch.no_grad():
        largest = segment_reduce(count, value, "max")  # a constant cancels
    weights = (value - largest).exp()
    return weights / segment_reduce(count, weights, "sum")


def topk(
    graph: Counts,
    typestr: str,
    feat: str,
    k: int,
    descending: bool,
    sortby: int | None,
    ntype_or_etype: Any,
) -> tuple[Tensor, Tensor]:
    """The rows of all ranks with the largest (or smallest) values in column ``sortby``; collective.

    [1, k, width] rows in order, 0 where there are fewer, and their global ids, int64 [1, k].
    """
    if sortby is None or typestr != "nodes":
        raise NotSupportedError(
            "topk: got edges or no sortby, expected nodes and a column to sort by"
        )
    rows = graph.nodes[ntype_or_etype].data[feat]  # type: ignore[attr-defined]
    keys = rows[:, sortby]
    best, position = top_over_ranks(
        rows, keys if descending else -keys, k, graph.batch_num_nodes(ntype_or_etype).group
    )
    return best.unsqueeze(0), position.unsqueeze(0)
