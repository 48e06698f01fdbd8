"""What a rank that trains or predicts reads: its partition, its graph, its rows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import sar
from sar.cli.inputs import parts_of_rank
from sar.cli.launch import policy_of
from sar.comm import Group
from sar.partition.load import PartitionData
from sar.train.data import NodeData, load_node_data
from sar.train.options import DataOptions


def load_rank(
    args: argparse.Namespace,
    options: DataOptions,
    group: Group,
    device: torch.device,
    need_labels: bool = True,
) -> tuple[PartitionData, sar.ShardedGraph, NodeData]:
    """This rank's partition, its view of the graph, and its data; collective."""
    path = parts_of_rank(args, group)
    partition = sar.load_partition_data(path, group.rank, device, verify=args.verify)
    data = load_node_data(
        partition,
        options,
        need_labels=need_labels,
        map_features=args.map_features,
        group=group,
    )
    graph = sar.construct_full_graph(partition, policy_of(args))
    return partition, graph, data.to(device)


def put_columns(graph: sar.ShardedGraph, partition: PartitionData, names: Sequence[str]) -> None:
    """Let the graph have columns of edges that its model is called with.

    Raises ``ValueError``, alike on every rank, where the partitions hold none of the name.
    """
    for name in names:
        if len(graph.canonical_etypes) > 1:
            raise ValueError(f"call: got {name!r}, a column of edges of one relation, for several")
        prefix = ":".join(graph.canonical_etypes[0]) + "/"
        if prefix + name not in partition.edge_features:
            known = [key.removeprefix(prefix) for key in partition.edge_features]
            found = ", ".join(known) or "none"
            raise ValueError(f"call: got {name!r}, expected a column of the edges: {found}")
        graph.edata[name] = partition.edge_features[prefix + name]
