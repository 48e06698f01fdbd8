"""A sharded graph out of the part that DGL's own distributed graph holds in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sar.frontends.dgl import ShardedGraph, construct_full_graph
from sar.partition.book import EType, PartitionBook
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData
from sar.partition.shards import ShardEdges

if TYPE_CHECKING:
    import dgl


def convert_dist_graph(dist_graph: dgl.distributed.DistGraph) -> ShardedGraph:
    """The graph that a ``dgl.distributed.DistGraph`` is a part of; collective.

    Every rank passes its own; the part it holds must be the one of the rank's number. The
    structure is taken over. Features stay in the ``DistGraph``: read there the rows of
    ``dist_graph.get_partition_book().partid2nids(rank)``, which is the order of the nodes here.

    Raises ``TypeError`` for anything else and what :func:`sar.construct_full_graph` raises.
    """
    for member in ("get_partition_book", "local_partition"):
        if not hasattr(dist_graph, member):
            got = type(dist_graph).__name__
            raise TypeError(f"dist_graph: got {got}, expected a dgl.distributed.DistGraph")
    theirs = dist_graph.get_partition_book()
    book = _read_book(theirs, dist_graph.graph_name)
    edges = _shards(dist_graph.local_partition, book, int(theirs.partid))
    data = PartitionData(book, int(theirs.partid), edges, FeatureStore({}), FeatureStore({}))
    return construct_full_graph(data)


def _read_book(theirs: Any, name: str) -> PartitionBook:
    """Our book, from the counts of nodes and edges by type and part in DGL's."""
    etypes = list(theirs.canonical_etypes)
    parts = range(theirs.num_partitions())
    nodes = [[len(theirs.partid2nids(part, t)) for t in theirs.ntypes] for part in parts]
    edges = [[len(theirs.partid2eids(part, t)) for t in etypes] for part in parts]
    node_ranges = dict(zip(theirs.ntypes, _ranges(nodes)))
    edge_ranges = dict(zip(etypes, _ranges(edges)))
    return PartitionBook(name, len(parts), list(theirs.ntypes), etypes, node_ranges, edge_ranges)


def _ranges(counts: list[list[int]]) -> list[np.ndarray]:
    """Per type, [P, 2] ranges of global ids, which run over parts and, inside, over types."""
    table = np.asarray(counts, dtype=np.int64)
    ends = table.reshape(-1).cumsum().reshape(table.shape)
    return [np.stack([ends[:, t] - table[:, t], ends[:, t]], 1) for t in range(table.shape[1])]


def _shards(graph: dgl.DGLGraph, book: PartitionBook, part: int) -> dict[EType, ShardEdges]:
    """The inner edges of every type, grouped by the part of their source, by ascending id."""
    inner = graph.edata["inner_edge"].bool()
    src, dst = (graph.ndata["_ID"][ends[inner].long()] for ends in graph.edges())
    eids = graph.edata["_ID"][inner]
    _, owner, src_idx = book.locate(src)
    dst_idx = book.locate(dst)[2]
    shards = {}
    for etype in book.canonical_etypes:
        start, end = book.edge_ranges[etype][part].tolist()
        rows = torch.nonzero((eids >= start) & (eids < end)).view(-1)
        rows = rows[torch.argsort(owner[rows] * (end - start) + (eids[rows] - start))]
        counts = torch.bincount(owner[rows], minlength=book.num_parts)
        offsets = [0, *counts.cumsum(0).tolist()]
        shards[etype] = ShardEdges(
            src_idx[rows].int(), dst_idx[rows].int(), (eids[rows] - start).int(), offsets
        )
    return shards
