"""From partition files to graphs that DGL's layers see."""

from __future__ import annotations

import torch
from torch import Tensor

from sar.config import Policy
from sar.frontends.dgl.frame import Frame, Later
from sar.frontends.dgl.sharded import ShardedGraph
from sar.frontends.dgl.store import EID, GraphStore, framed
from sar.graph.build import structure_of
from sar.graph.layer_blocks import blocks_of_seeds
from sar.partition.features import FeatureStore
from sar.partition.load import PartitionData


def construct_full_graph(
    partition_data: PartitionData, policy: Policy | None = None
) -> ShardedGraph:
    """The graph over all nodes of this rank's part; collective.

    ``graph.ndata["feat"]``, ``graph.edata["weight"]`` and so on are the columns that the partitions
    hold, by these names. Each is read from its file when it is asked for first, and kept then.

    Args:
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Raises:
        PartitionError: on every rank, when there are not as many parts as ranks, or when a rank
            has another part than its own.
        TypeError: on every rank, for another ``partition_data`` or ``policy`` on any of them.
        ValueError: on every rank, where any put a column into its data that has other rows.
        CommError: a rank needs a row that its owner does not have.
    """
    store = framed(structure_of(partition_data, policy))
    with store.group.agreed("graph"):  # a rank may have put columns of other rows into its data
        for ntype, frame in store.src_frames.items():
            _put_stored(store, frame, partition_data.node_features, ntype)
        for etype, frame in store.edge_frames.items():
            _put_stored(store, frame, partition_data.edge_features, ":".join(etype))
    return ShardedGraph(store, None, policy)


def _put_stored(store: GraphStore, frame: Frame, columns: FeatureStore, kind: str) -> None:
    """Let a frame have the columns of a node type or a relation; none is read now."""
    for key in columns:
        owner, _, name = key.rpartition("/")
        if owner == kind and name != EID:  # which is the partitioning's own id
            frame[name] = _stored(columns, key, store.device)


def _stored(columns: FeatureStore, key: str, device: torch.device) -> Later:
    return Later(*columns.info(key), lambda: columns[key].to(device))


def construct_mfgs(
    partition_data: PartitionData,
    seed_nodes: Tensor,
    n_layers: int,
    keep_seed_nodes: bool = True,
    *,
    policy: Policy | None = None,
) -> list[ShardedGraph]:
    """One block a layer, first layer first, that together compute the seeds' outputs; collective.

    What ``dgl.to_block`` gives layer by layer on the whole graph: degrees are the block's. Results
    of the last block are in ascending order of the seeds' global ids, per node type.

    Args:
        seed_nodes: int [n] distinct global ids of nodes of this rank's part; may be empty.
        n_layers: number of blocks.
        keep_seed_nodes: let the source rows of a block begin with its destination rows. Without,
            source rows are in ascending order and hold only sources of edges.

    Raises:
        ValueError: on every rank, when seeds of any rank repeat or are not its own.
    """
    blocks = blocks_of_seeds(partition_data, seed_nodes, n_layers, keep_seed_nodes, policy)
    return [ShardedGraph(block, None, policy) for block in blocks]
