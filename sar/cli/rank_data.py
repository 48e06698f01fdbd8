"""What a rank that trains or predicts reads: its partition, its graph, its rows."""

from __future__ import annotations

import argparse

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
