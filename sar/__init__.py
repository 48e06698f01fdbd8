"""Exact full-batch training of graph neural networks over many hosts."""

import importlib
import sys
from typing import Any

from sar import comm
from sar.comm import (
    comm_device,
    current_group,
    initialize_comms,
    manual_seed,
    nfs_ip_init,
    rank,
    shutdown,
    world_size,
)
from sar.compat import install_modules, lazy_name
from sar.compat.construct_shard_manager import convert_dist_graph
from sar.compat.core import (
    DataLoader,
    DistNeighborSampler,
    DistributedBlock,
    GraphShardManager,
    HeteroGraphShardManager,
    message_has_parameters,
)
from sar.compat.data_loading import suffix_key_lookup
from sar.compat.logging_setup import logger, logging_setup
from sar.compat.patch_dgl import patch_dgl
from sar.config import Config, Lossy, Policy
from sar.errors import (
    CommError,
    DriftError,
    MissingDependencyError,
    NotSupportedError,
    PartitionError,
    SarError,
)
from sar.frontends.dgl import (
    ShardedGraph,
    construct_full_graph,
    construct_mfgs,
    load_dgl_partition_data,
    load_partition_data,
)
from sar.layers import Explanation, explain, optimize, prepare
from sar.memory import set_activations
from sar.nn import (
    DistributedBN1D,
    check,
    convert_batch_norm,
    convert_dropout,
    gather_grads,
    global_mean,
    global_sum,
    overlap_gradients,
    sync_params,
    trace,
)
from sar.partition.homogeneous import to_homogeneous
from sar.partition.options import PartitionOptions
from sar.partition.run import partition_graph

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "Config",
    "DataLoader",
    "DistNeighborSampler",
    "DistributedBN1D",
    "DistributedBlock",
    "DriftError",
    "Explanation",
    "GraphShardManager",
    "HeteroGraphShardManager",
    "Lossy",
    "MissingDependencyError",
    "NotSupportedError",
    "PartitionError",
    "PartitionOptions",
    "Policy",
    "SarError",
    "ShardedGraph",
    "check",
    "comm",
    "comm_device",
    "construct_full_graph",
    "construct_mfgs",
    "convert_batch_norm",
    "convert_dist_graph",
    "convert_dropout",
    "current_group",
    "explain",
    "gather_grads",
    "global_mean",
    "global_sum",
    "initialize_comms",
    "launch",
    "load_dgl_partition_data",
    "load_partition_data",
    "logger",
    "logging_setup",
    "manual_seed",
    "message_has_parameters",
    "nfs_ip_init",
    "optimize",
    "overlap_gradients",
    "partition_graph",
    "patch_dgl",
    "prepare",
    "rank",
    "set_activations",
    "shutdown",
    "suffix_key_lookup",
    "sync_params",
    "to_homogeneous",
    "trace",
    "world_size",
]


def __getattr__(name: str) -> Any:
    """``plan``, ``train`` and ``launch``, which are imported when they are asked for;
    ``RelGraphConv``, ``edge_softmax`` and ``patched_edge_softmax``, which are DGL's."""
    if name == "launch":
        return importlib.import_module(f"{__name__}.cli.functions").launch
    if name in ("plan", "train"):
        return importlib.import_module(f"{__name__}.{name}")
    return lazy_name(name)


install_modules(sys.modules[__name__])
