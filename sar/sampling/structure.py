"""Edges of a part's nodes, in an order that no cut changes, and who owns which node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sar.kernels.sampling import Csc, split
from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.partition.shards import ShardEdges
from sar.sampling.swap import Swap

_INT32 = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class Ids:
    """Dense ids of the nodes of a type, or the edges of a relation: part after part.

    Attributes:
        bounds: int64 [P + 1]; part p owns the ids from ``bounds[p]`` to ``bounds[p + 1]``.
    """

    bounds: Tensor

    @property
    def total(self) -> int:
        return int(self.bounds[-1])

    def first(self, part: int) -> int:
        """The smallest id that a part owns, if it owns any."""
        return int(self.bounds[part])


def node_ids(book: PartitionBook, ntype: str) -> Ids:
    """Of the nodes of a type."""
    return Ids(_bounds(book.node_ranges[ntype]))


def edge_ids(book: PartitionBook, etype: EType) -> Ids:
    """Of the edges of a relation; an edge is owned by who owns its destination."""
    return Ids(_bounds(book.edge_ranges[etype]))


def _bounds(ranges: np.ndarray) -> Tensor:
    counts = torch.as_tensor(ranges[:, 1] - ranges[:, 0])
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


def id_dtype(book: PartitionBook) -> torch.dtype:
    """int32 where all ids of nodes and edges fit, else int64: the same on all ranks."""
    ids = [node_ids(book, ntype) for ntype in book.ntypes]
    ids += [edge_ids(book, etype) for etype in book.canonical_etypes]
    return torch.int32 if max(one.total for one in ids) <= _INT32 else torch.int64


def in_edges(
    data: PartitionData, etype: EType, weight: Tensor | None = None, time: Tensor | None = None
) -> Csc:
    """The in-edges of this part's nodes, by destination; local.

    Neighbors are numbered by :func:`node_ids`, edges by :func:`edge_ids`. The edges of a node are
    in the order of their times and of their original ids where the partitions hold them, so that a
    draw by position does not depend on the cut. Needs 8 bytes an edge and 16 while it runs, 4 more
    each with int64 ids, 8 more with weights and with times.

    Args:
        weight: float64 [E], what chances are in proportion to, by ascending id.
        time: int64 [E], by ascending id.
    """
    book, shard, dtype = data.book, data.edges[etype], id_dtype(data.book)
    rows = shard.eid.cpu().long()
    when = None if time is None else time[rows]
    order = _order(shard.dst.cpu(), when, data.keys.edges(etype)[rows])
    eid = rows[order].to(dtype) + edge_ids(book, etype).first(data.part_id)
    sources = _source_ids(shard, node_ids(book, etype[0]), dtype)[order]
    weights = _NO_WEIGHTS if weight is None else weight[rows[order]]
    times = _NO_TIMES if when is None else when[order]
    return Csc(_starts(shard.dst.cpu(), data.num_nodes(etype[2])), sources, eid, weights, times)


def out_edges(
    data: PartitionData,
    etype: EType,
    swap: Swap,
    weight: Tensor | None = None,
    time: Tensor | None = None,
) -> Csc:
    """As :func:`in_edges`, the out-edges of this part's nodes, by source; collective.

    The owners of destinations send them: 48 bytes an edge while it runs.
    """
    count, ids = data.num_edges(etype), node_ids(data.book, etype[0])
    order, rows, sizes = split(source_ids(data, etype), ids.bounds)
    columns = [
        rows.long(),
        target_ids(data, etype),
        torch.arange(count) + edge_ids(data.book, etype).first(data.part_id),
        data.keys.edges(etype).long(),
        torch.zeros(count, dtype=torch.int64) if time is None else time,
        torch.zeros(count, dtype=torch.int64) if weight is None else weight.view(torch.int64),
    ]
    at = order.long()
    sent = torch.stack([columns[0], *(one[at] for one in columns[1:])], dim=1)
    came = swap.sizes(torch.tensor(sizes).view(-1, 1)).view(-1).tolist()
    src, dst, eid, key, when, weights = swap.send(sent, sizes, came).unbind(1)
    order = _order(src, None if time is None else when, key)
    dtype = id_dtype(data.book)
    return Csc(
        _starts(src, data.num_nodes(etype[0])),
        dst[order].to(dtype),
        eid[order].to(dtype),
        _NO_WEIGHTS if weight is None else weights[order].view(torch.float64),
        _NO_TIMES if time is None else when[order],
    )


def edge_weights(data: PartitionData, etype: EType, name: str) -> Tensor:
    """float64 [E] of a part's edges by ascending id.

    Raises ``ValueError`` for weights that are missing, not one number for each edge, negative, NaN
    or infinite.
    """
    full = f"{':'.join(etype)}/{name}"
    if full not in data.edge_features:
        there = [key for key in data.edge_features if key.startswith(":".join(etype) + "/")]
        raise ValueError(f"weight_attr: got {name!r}, expected one of {there or 'none'} of {etype}")
    weights = data.edge_features[full].double()
    if weights.dim() != 1:
        raise ValueError(f"weight_attr: {full!r} has shape {list(weights.shape)}, expected [E]")
    wrong = ~(weights.isfinite() & (weights >= 0))
    if wrong.any():
        row = int(wrong.nonzero()[0])
        got = float(weights[row])
        raise ValueError(f"weight_attr: {full!r} is {got} in row {row}, expected 0 or more")
    return weights


def source_ids(data: PartitionData, etype: EType) -> Tensor:
    """int64 [E] sources of a part's edges, by ascending id of the edge."""
    shard = data.edges[etype]
    ids = torch.empty(len(shard.src), dtype=torch.int64)
    ids[shard.eid.cpu().long()] = _source_ids(shard, node_ids(data.book, etype[0]), torch.int64)
    return ids


def target_ids(data: PartitionData, etype: EType) -> Tensor:
    """int64 [E] destinations of a part's edges, by ascending id of the edge."""
    shard, first = data.edges[etype], node_ids(data.book, etype[2]).first(data.part_id)
    ids = torch.empty(len(shard.dst), dtype=torch.int64)
    ids[shard.eid.cpu().long()] = shard.dst.cpu().long() + first
    return ids


def _order(rows: Tensor, time: Tensor | None, key: Tensor) -> Tensor:
    """int64 [E]: positions of edges by row, those of one by time, then by key."""
    order = torch.argsort(key, stable=True)
    if time is not None:
        order = order[torch.argsort(time[order], stable=True)]
    return order[torch.argsort(rows[order], stable=True)]


def _starts(rows: Tensor, count: int) -> Tensor:
    counts = torch.bincount(rows, minlength=count)
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])


_NO_WEIGHTS = torch.empty(0, dtype=torch.float64)
_NO_TIMES = torch.empty(0, dtype=torch.int64)


def _source_ids(shard: ShardEdges, ids: Ids, dtype: torch.dtype) -> Tensor:
    counts = torch.tensor(shard.offsets).diff()
    first = ids.bounds[:-1].to(dtype).repeat_interleave(counts)
    return first.add_(shard.src.cpu().to(dtype))
