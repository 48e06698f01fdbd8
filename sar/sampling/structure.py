"""In-edges of a part's nodes, in an order that no cut changes, and who owns which node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sar.partition.book import EType, PartitionBook
from sar.partition.load import PartitionData
from sar.partition.shards import ShardEdges

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


@dataclass(frozen=True)
class InEdges:
    """The in-edges of a part's nodes, of one relation, by destination.

    The edges of a node are in the order of their original ids where the partitions hold them, so
    that a draw by position does not depend on the cut.

    Attributes:
        indptr: int64 [n + 1], of the part's nodes of the destination's type.
        neighbor: [E] ids of the sources, as :func:`node_ids` numbers them.
        eid: [E] ids of the edges, as :func:`edge_ids` numbers them.
        keys: int32 or int64 [n], what names the destinations in random numbers.
    """

    indptr: Tensor
    neighbor: Tensor
    eid: Tensor
    keys: Tensor

    @property
    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.indptr, self.neighbor, self.eid


def id_dtype(book: PartitionBook) -> torch.dtype:
    """int32 where all ids of nodes and edges fit, else int64: the same on all ranks."""
    ids = [node_ids(book, ntype) for ntype in book.ntypes]
    ids += [edge_ids(book, etype) for etype in book.canonical_etypes]
    return torch.int32 if max(one.total for one in ids) <= _INT32 else torch.int64


def in_edges(data: PartitionData, etype: EType) -> InEdges:
    """The in-edges of this part's nodes; local.

    Needs 8 bytes an edge and 16 while it runs, 4 more each with int64 ids.
    """
    book, shard, dtype = data.book, data.edges[etype], id_dtype(data.book)
    order = _by_destination(shard, data.keys.edges(etype))
    num_rows = data.num_nodes(etype[2])
    counts = torch.bincount(shard.dst.cpu(), minlength=num_rows)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    eid = shard.eid.cpu()[order].to(dtype) + edge_ids(book, etype).first(data.part_id)
    sources = _source_ids(shard, node_ids(book, etype[0]), dtype)[order]
    return InEdges(indptr, sources, eid, data.keys.nodes(etype[2]))


def _by_destination(shard: ShardEdges, keys: Tensor) -> Tensor:
    """int64 [E]: positions of the edges by destination, those of one by ascending key."""
    by_key = torch.argsort(keys[shard.eid.cpu().long()], stable=True)
    return by_key[torch.argsort(shard.dst.cpu()[by_key], stable=True)]


def _source_ids(shard: ShardEdges, ids: Ids, dtype: torch.dtype) -> Tensor:
    counts = torch.tensor(shard.offsets).diff()
    first = ids.bounds[:-1].to(dtype).repeat_interleave(counts)
    return first.add_(shard.src.cpu().to(dtype))
