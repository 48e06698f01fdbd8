"""From partition files to graphs that DGL's layers see."""

from __future__ import annotations

from torch import Tensor

from sar.config import Policy
from sar.frontends.dgl.sharded import ShardedGraph
from sar.graph.build import structure_of
from sar.graph.layer_blocks import blocks_of_seeds
from sar.partition.load import PartitionData


def construct_full_graph(
    partition_data: PartitionData, policy: Policy | None = None
) -> ShardedGraph:
    """The graph over all nodes of this rank's part; collective.

    Args:
        policy: how halos stream; ``None`` follows :class:`sar.Config` at each call.

    Raises:
        PartitionError: on every rank, when there are not as many parts as ranks, or when a rank
            has another part than its own.
        TypeError: on every rank, for another ``partition_data`` or ``policy`` on any of them.
        CommError: a rank needs a row that its owner does not have.
    """
    return ShardedGraph(structure_of(partition_data, policy), None, policy)


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
