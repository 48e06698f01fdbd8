"""Blocks (message flow graphs): per layer, only the rows that the seeds depend on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sar.comm import current_group
from sar.config import Policy
from sar.frontends.dgl.build import agree_data, on_device
from sar.frontends.dgl.sharded import ShardedGraph
from sar.graph.block import build_block, whole_of_data
from sar.partition.load import PartitionData


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
    group = current_group()
    agree_data(partition_data, group, policy)
    error = _seed_error(partition_data, seed_nodes, n_layers)
    group.agree(error, "construct_mfgs", {"n_layers": n_layers})
    dst_rows, whole = _split_seeds(partition_data, seed_nodes), whole_of_data(partition_data)
    blocks = []
    for _ in range(n_layers):
        store = build_block(whole, group, dst_rows, keep_seed_nodes)
        blocks.append(on_device(store, partition_data, policy))
        dst_rows = store.src_rows
    return blocks[::-1]


def _seed_error(data: PartitionData, seeds: Any, num_layers: Any) -> Exception | None:
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 1:
        return ValueError(f"n_layers: got {num_layers!r}, expected an int of at least 1")
    if not isinstance(seeds, Tensor) or seeds.is_floating_point() or seeds.dim() != 1:
        return TypeError("seed_nodes: expected a 1-D integer tensor of global node ids")
    start, stop = data.book.part_ranges[data.part_id]
    if len(seeds) and (int(seeds.min()) < start or int(seeds.max()) >= stop):
        return ValueError(
            f"seed_nodes: got ids from {int(seeds.min())} to {int(seeds.max())}, "
            f"expected ids of this rank's part, [{start}, {stop})"
        )
    if len(torch.unique(seeds)) != len(seeds):
        return ValueError("seed_nodes: got repeated ids, expected distinct ones")
    return None


def _split_seeds(data: PartitionData, seeds: Tensor) -> dict[str, Tensor]:
    """Per node type the ascending rows of the part."""
    type_id, _, row = data.book.locate(torch.sort(seeds.cpu().long())[0])
    return {ntype: row[type_id == i] for i, ntype in enumerate(data.book.ntypes)}
